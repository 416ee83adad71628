"""The connector's side in the engine's scheduler: what to load, what to save."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tierkv.client.sync import Namespace
from tierkv.core.spec import KVSpec
from tierkv.errors import InvalidArgument, TierkvError
from tierkv.integrations.attachment import LOST, Attachment
from tierkv.integrations.vllm.adapters import Adapters
from tierkv.integrations.vllm.attaching import attachment
from tierkv.integrations.vllm.chain import Chain, ChainOf, ExtraKeysOf
from tierkv.integrations.vllm.events import StoredEvents
from tierkv.integrations.vllm.geometry import Geometry
from tierkv.integrations.vllm.logs import log
from tierkv.integrations.vllm.messages import Load, Save, Saved, Step
from tierkv.integrations.vllm.settings import Settings
from tierkv.integrations.vllm.stats import ConnectorStats, Counts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

FOUND_S = 0.5
"""How long an answer is good: a request that waits for room is asked about again each step."""


class Roles(NamedTuple):
    """What vLLM's configuration wants of the connector: loads, saves, and events that tell.

    ``knows_media``: whether media have names that say what is in them.
    """

    loads: bool
    saves: bool
    tells: bool
    knows_media: bool


class Hit(NamedTuple):
    """What tierkv has of a prompt of ``num_tokens``: leading blocks in all, and those on disk."""

    num_tokens: int
    blocks: int
    on_disk: int
    asked_s: float


@dataclass
class Tracked:
    """A request of the engine. ``chain``: None if it cannot be told what its KV depends on.

    ``noted``: leading blocks that need not be saved any more. ``computed``: tokens that the engine
    had itself when it asked for more. ``reached``: tokens that it had, computes, or loads from
    tierkv. ``loading``: its ids of the blocks that are being loaded.
    """

    request: Request
    chain: ChainOf | None
    reads: bool
    saves: bool
    noted: int = 0
    computed: int = 0
    reached: int = 0
    hit: Hit | None = None
    loading: frozenset[int] = frozenset()


class SchedulerSide:
    """One for each engine. Never waits longer than ``lookup_timeout_s`` for the daemon."""

    def __init__(
        self, caches: KVCacheConfig, settings: Settings, extra_keys: ExtraKeysOf, roles: Roles
    ) -> None:
        self._caches = caches
        self._settings = settings
        self._roles = roles
        self._extra_keys = extra_keys
        self._geometry = Geometry.of(caches)
        self._attachment: Attachment | None = None
        self._workers = 1
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._given: list[int] = []
        self._numbers = itertools.count(1)
        self._adapters = Adapters()
        self._generation = b""
        self._counts = Counts()
        self._events = StoredEvents(self._geometry, caches) if roles.tells else None

    def attach(self, specs: Sequence[KVSpec]) -> None:
        """Look up blocks under what the workers say they are: one spec for each.

        Raises InvalidArgument if none says so.
        """
        if not specs:
            raise InvalidArgument(
                "no worker says what its blocks are: in a MultiConnector only the first connector "
                "that has something to say is heard, so name TierKVConnector first"
            )
        self._disconnect()
        self._workers = len(specs)
        timeout_s = self._settings.lookup_timeout_s
        self._attachment = attachment(self._settings, specs, "lookup", timeout_s)

    def close(self) -> None:
        """End the connection, and its threads."""
        self._adapters.close()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None

    # --- requests ---------------------------------------------------------------------------------

    def match(self, request: Request, computed: int) -> int:
        """Tokens behind the first ``computed`` ones that can be loaded."""
        tracked = self._track(request)
        tracked.computed = tracked.reached = computed
        size = self._geometry.block_tokens
        usable = (request.num_tokens - 1) // size
        if computed % size or usable <= computed // size or not tracked.reads:
            return 0
        hit = self._look_up(tracked, usable, computed)
        return max(hit.blocks * size - computed, 0)

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine has made room, for ``tokens`` that are to be loaded among others.

        Another connector beside this one may load into what is not for ours.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        self._given += self._geometry.written(self._own(tables), tracked.computed)
        if not tokens or tracked.chain is None:
            return
        size = self._geometry.block_tokens
        first, stop = tracked.computed // size, (tracked.computed + tokens) // size
        chain = tracked.chain.first(stop)  # as in the lookup, so all tokens are there
        rows = self._geometry.rows(self._own(tables), first, stop)
        self._loads.append(Load(request.request_id, chain, first, rows))
        tracked.noted = max(tracked.noted, stop)
        tracked.reached += tokens
        tracked.loading = frozenset(rows[rows >= 0].tolist())
        self._counts.add(hit_tokens=tokens)

    def sources(self, request: Request, tokens: int) -> tuple[int, int]:
        """Of ``tokens`` that are loaded: how many come from memory, and from disk."""
        tracked = self._requests.get(request.request_id)
        hit = None if tracked is None else tracked.hit
        on_disk = 0 if hit is None else min(hit.on_disk * self._geometry.block_tokens, tokens)
        return tokens - on_disk, on_disk

    def finished(self, request: Request) -> None:
        """The engine has done with it."""
        self._requests.pop(request.request_id, None)

    def step(self, output: SchedulerOutput) -> Step:
        """The work of a step that is about to run."""
        step = Step(self._loads, written=self._given, idle=not output.total_num_scheduled_tokens)
        self._loads, self._given = [], []
        tables_of = output.kv_connector_block_state.get_block_ids
        cached = output.scheduled_cached_reqs
        # These write into blocks that an earlier step has said when it got them.
        settled = {
            request_id
            for request_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True)
            if new is None
        }
        for request_id, tokens in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None:  # not ours to say what it writes into
                step.written += self._geometry.written(self._own(tables_of(request_id)), 0)
                continue
            computed = tracked.request.num_computed_tokens
            if output.has_sync_kv_loads and computed > tracked.reached:
                # Another connector loads the rest within this step, and may fail to.
                tracked.saves = False
            tracked.reached = computed + tokens
            full = self._full(tracked)
            if request_id in settled and full <= tracked.noted:
                continue  # a whole table is long, and most steps need none
            tables = self._own(tables_of(request_id))
            step.written += self._geometry.written(tables, computed)
            if full > tracked.noted and (save := self._save(tracked, tables, full)) is not None:
                step.saves.append(save)
        return step

    def loaded(self, requests: Iterable[str], missing: Set[int], failed: Set[str]) -> None:
        """Loads have ended; ``missing`` blocks, or those of ``failed`` requests, did not come.

        Such a request looks for nothing more: it would find the same. One of several workers may
        say what it misses steps before the last of them has ended the load.
        """
        if missing or failed:
            for request_id, tracked in self._requests.items():
                if request_id in failed or tracked.loading & missing:
                    tracked.reads, tracked.noted = False, 0
        for request_id in requests:
            ended = self._requests.get(request_id)
            if ended is not None:
                ended.loading, ended.hit = frozenset(), None

    def saved(self, report: Saved) -> None:
        """Saves have ended, some of them at all workers."""
        if self._events is not None:
            self._events.ended(report, self._workers)

    def take_events(self) -> Iterable[Any]:
        """Blocks that tierkv has since the last call, as vLLM's events."""
        return self._events.take() if self._events is not None else ()

    def take_stats(self) -> ConnectorStats | None:
        """What was counted since the last call."""
        return self._counts.take()

    def forget(self) -> None:
        """Use nothing that is stored now: the engine's weights may change under it.

        What it stores from now on only this engine can find, as long as it runs.
        """
        self._generation = secrets.token_bytes(16)
        for tracked in self._requests.values():
            tracked.chain, tracked.hit = None, None

    # --- how --------------------------------------------------------------------------------------

    def _track(self, request: Request) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            owner = self._owner(request)
            asked: Mapping[str, Any] = request.kv_transfer_params or {}
            chain = None
            if owner is not None:
                size = self._geometry.block_tokens
                chain = ChainOf(request, size, owner, self._extra_keys)
            reads = self._roles.loads and not request.skip_reading_prefix_cache
            saves = self._roles.saves and self._settings.save
            tracked = Tracked(
                request,
                chain,
                bool(reads and asked.get("tierkv.read", True)),
                bool(saves and asked.get("tierkv.save", True)),
            )
            self._requests[request.request_id] = tracked
        return tracked

    def _owner(self, request: Request) -> tuple[Any, ...] | None:
        """What its whole chain depends on; None if that cannot be told."""
        if (request.mm_features or request.resumable) and not self._roles.knows_media:
            return None  # a session's next message may have media
        owner: list[Any] = [("generation", self._generation)] if self._generation else []
        adapter = request.lora_request
        if adapter is not None:
            fingerprint = self._adapters.fingerprint(adapter, self._settings.lookup_timeout_s)
            if fingerprint is None:
                return None
            owner.append(("adapter", fingerprint))
        return tuple(owner)

    def _look_up(self, tracked: Tracked, usable: int, computed: int) -> Hit:
        request, hit = tracked.request, tracked.hit
        now_s = time.monotonic()
        if hit and hit.num_tokens == request.num_tokens and now_s - hit.asked_s < FOUND_S:
            return hit
        tracked.hit = hit = Hit(request.num_tokens, *self._find(tracked, usable), now_s)
        self._counts.add(lookups=1, lookup_tokens=request.num_tokens - computed)
        return hit

    def _find(self, tracked: Tracked, usable: int) -> tuple[int, int]:
        """Leading blocks that all workers' namespaces have, and how many of them are on disk."""
        namespaces = self._attachment.namespaces if self._attachment is not None else None
        if namespaces is None or tracked.chain is None:
            return 0, 0
        on_disk = 0
        try:
            chain = tracked.chain.first(usable)
            for namespace in namespaces:
                chain, disk = self._find_in(namespace, chain)
                on_disk = max(on_disk, disk)
        except LOST as error:
            if self._attachment is not None:
                self._attachment.lost(error)
            self._counts.add(failed_lookups=1)
            return 0, 0
        except TierkvError as error:
            log.warning("request %s finds nothing: %s", tracked.request.request_id, error)
            self._counts.add(failed_lookups=1)
            return 0, 0
        return len(chain.tokens) // self._geometry.block_tokens, on_disk

    def _find_in(self, namespace: Namespace, chain: Chain) -> tuple[Chain, int]:
        found = namespace.lookup(chain.tokens, keep=0, extra_keys=chain.extra_keys, prefetch=True)
        size = self._geometry.block_tokens
        return chain.first(found.tokens // size, size), found.disk

    def _full(self, tracked: Tracked) -> int:
        """Leading blocks that are full when this step has run, of a request that is saved."""
        request = tracked.request
        if tracked.chain is None or not tracked.saves:
            return 0
        known: int = request.num_tokens if self._settings.save_output else request.num_prompt_tokens
        return min(tracked.reached, known) // self._geometry.block_tokens

    def _save(self, tracked: Tracked, tables: Sequence[Sequence[int]], full: int) -> Save | None:
        request = tracked.request
        if tracked.chain is None:
            return None
        try:
            chain = tracked.chain.first(full)
        except InvalidArgument as error:
            log.warning("request %s is not saved: %s", request.request_id, error)
            tracked.saves = False
            return None
        first, tracked.noted = tracked.noted, full
        save = Save(next(self._numbers), chain, self._geometry.rows(tables, 0, full), first)
        if self._events is not None:
            self._events.expect(save.number, request, first, full)
        return save

    def _own(self, tables: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        selected: Sequence[Sequence[int]] = self._caches.select_transfer_block_ids(tables)
        return selected
