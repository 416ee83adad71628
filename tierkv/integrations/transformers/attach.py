"""The front door: let a transformers model keep its KV cache in tierkv."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from transformers.utils import ModelOutput

from tierkv.client.sync import Client, Namespace, connect
from tierkv.core.spec import KVSpec
from tierkv.errors import InvalidArgument, PoolExhausted, TierkvError
from tierkv.integrations.transformers import weights
from tierkv.integrations.transformers.attention import NAMES, register
from tierkv.integrations.transformers.batch import Batch
from tierkv.integrations.transformers.cache import TierKVCache
from tierkv.integrations.transformers.check import check_attention
from tierkv.integrations.transformers.hooks import Hooks
from tierkv.integrations.transformers.models import check_model, spec_of

log = logging.getLogger(__name__)

CALL_S = 10.0
"""How long a generation waits for a daemon that hangs, before it goes on without."""

AWAY_S = 2.0
"""How long a generation waits for a daemon that is gone and may come back. A daemon that did not is
not asked again for as long, so that nobody waits for it each time."""


def attach(
    model: Any,
    client: Client | None = None,
    *,
    block_tokens: int = 16,
    salt: str = "",
    tenant: str = "",
    patch_generate: bool = True,
    check: bool = True,
) -> Attached:
    """Keep the KV cache of ``model`` (a transformers causal LM) in tierkv from now on.

    ``model.generate()`` then finds what any process has computed before, and stores what it
    computes, with no argument changed; ``patch_generate=False`` leaves it as it is, and caches are
    passed by hand (see ``Attached.cache``). ``client`` defaults to ``tierkv.connect()``. ``tenant``
    says whose blocks these are: models of different tenants share none, and operators see what
    each has. ``salt`` separates alike, and is shown to nobody. ``check`` compares some logits with
    the plain model's, which takes the time of two short forward passes.

    Raises InvalidArgument, with the reason, for a model that tierkv cannot serve, and Unavailable
    when no daemon serves.
    """
    check_model(model)
    with ExitStack() as unless_attached:
        if client is None:
            client = connect(name="transformers", call_timeout_s=CALL_S, reconnect_s=AWAY_S)
            unless_attached.callback(client.close)
        attached = Attached(
            *(model, client, block_tokens, salt, tenant),
            patch_generate=patch_generate,
            check=check,
        )
        unless_attached.pop_all()
    return attached


class Attached:
    """A model and the daemon that holds its KV. Made by ``attach``; ``detach`` undoes it.

    Threads may share it as far as they may share the model.
    """

    def __init__(
        self,
        model: Any,
        client: Client,
        block_tokens: int,
        salt: str,
        tenant: str,
        *,
        patch_generate: bool,
        check: bool,
    ) -> None:
        if "_tierkv" in vars(model):
            raise InvalidArgument("this model is attached already: detach() it first")
        self.model = model
        self.client = client
        self._block_tokens = block_tokens
        self._salt, self._tenant = salt, tenant
        self._device = next(model.parameters()).device
        self._dropped: deque[Batch] = deque()
        self._batches: weakref.WeakSet[Batch] = weakref.WeakSet()
        self._own_generate = vars(model).get("generate")
        self._away_until = 0.0
        self._namespace: Namespace | None = None
        self._mark, self._probe = 0, b""
        self.spec = self._look_at_weights()
        self._open_namespace()
        self._plain = model.config._attn_implementation
        register()
        model.set_attn_implementation(NAMES.get(self._plain, self._plain))
        self._hooks = Hooks(model)
        model._tierkv = self
        try:
            if check:
                batch = Batch(self.spec, self._device, None, weights=self._mark)
                check_attention(model, TierKVCache(batch, self.spec.layers), self.cache_name)
        except BaseException:
            self.detach()
            raise
        if patch_generate:
            model.generate = self._generate_by(model.generate)

    @property
    def namespace(self) -> Namespace | None:
        """Where the blocks of the model's present weights are; None if no daemon was to be had."""
        return self._namespace

    @property
    def cache_name(self) -> str:
        """The argument of ``forward`` and ``generate`` that takes a cache, in this transformers."""
        return self._hooks.cache_name

    def cache(self) -> TierKVCache:
        """An empty cache for one call of ``generate``, or for many that go on from each other.

        The first forward pass with it finds the longest cached prefix of each row; only what the
        caller wants results of (``logits_to_keep``) and what is not cached is computed. ``end()``
        gives its blocks up, or else that happens some time after it was dropped.
        """
        while self._dropped:
            self._dropped.popleft().end()
        batch = Batch(
            self.spec_now(),
            self._device,
            self._open_namespace(),
            weights=self._mark,
            on_loss=self._be_away,
        )
        cache = TierKVCache(batch, self.spec.layers)
        self._batches.add(batch)
        weakref.finalize(cache, self._dropped.append, batch).atexit = False
        return cache

    def spec_now(self) -> KVSpec:
        """The namespace of the weights as they are now: another one after they have changed."""
        if (weights.mark(self.model), weights.probe(self.model)) != (self._mark, self._probe):
            self.spec, self._namespace = self._look_at_weights(), None
        return self.spec

    def detach(self) -> None:
        """The model is as it was. Caches that were made end; the client stays open."""
        for batch in list(self._batches):
            batch.end()
        self._dropped.clear()
        self._hooks.remove()
        self.model.set_attn_implementation(self._plain)
        vars(self.model).pop("generate", None)
        if self._own_generate is not None:
            self.model.generate = self._own_generate
        vars(self.model).pop("_tierkv", None)

    def _look_at_weights(self) -> KVSpec:
        # Marked before they are read: a change meanwhile is noticed next time.
        self._mark, self._probe = weights.mark(self.model), weights.probe(self.model)
        name = weights.fingerprint(self.model)
        separates = {"salt": self._salt, "tenant": self._tenant}
        return spec_of(self.model, name, block_tokens=self._block_tokens, **separates)

    def _open_namespace(self) -> Namespace | None:
        if time.monotonic() < self._away_until:
            return None
        if self._namespace is None:
            try:
                self._namespace = self.client.namespace(self.spec)
            except InvalidArgument:
                raise
            except TierkvError as error:
                self._be_away(error)
                return None
            self._check_device(self._namespace)
        return self._namespace

    def _check_device(self, namespace: Namespace) -> None:
        pool = namespace.blocks.device
        if pool != self._device:
            raise InvalidArgument(
                f"the model is on {self._device}, the daemon's device tier on {pool}: move the "
                "model, or set the daemon's device.kind"
            )

    def _be_away(self, error: TierkvError) -> None:
        if isinstance(error, PoolExhausted):  # of this one; the next may fit
            return
        log.warning("no tierkv for %g s: %s", AWAY_S, error.message)
        self._away_until = time.monotonic() + AWAY_S

    def _generate_by(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """``model.generate`` with a tierkv cache where the caller asked for no other one."""

        @functools.wraps(plain)
        def generate(*args: Any, **kwargs: Any) -> Any:
            if not self._wants_cache(args, kwargs):
                log.info("this generate() was asked for another cache, or for none")
                return plain(*args, **kwargs)
            cache = self.cache()
            kwargs[self.cache_name] = cache
            kept = False
            try:
                result = plain(*args, **kwargs)
                kept = isinstance(result, ModelOutput)  # it has the cache in it
            finally:
                if not kept:
                    cache.end()
            log.info("%d tokens were cached", cache.cached_tokens)
            return result

        return generate

    def _wants_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given_config = args[1] if len(args) > 1 else kwargs.get("generation_config")
        config = given_config or self.model.generation_config
        use = kwargs.get("use_cache", getattr(config, "use_cache", True))
        kind = kwargs.get("cache_implementation", getattr(config, "cache_implementation", None))
        given = any(kwargs.get(n) is not None for n in ("cache", "past_key_values"))
        unserved = self.model.training or kwargs.get("inputs_embeds") is not None
        unserved |= weights.differ_by_row(self.model)
        unserved |= bool(kwargs.get("output_attentions", getattr(config, "output_attentions", 0)))
        return use is not False and kind in (None, "dynamic") and not given and not unserved
