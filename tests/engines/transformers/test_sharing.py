"""Who finds whose blocks: other processes do, other weights never."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from examples.demo_daemon import DemoDaemon
from tests.engines.transformers.conftest import Attach
from tests.engines.transformers.running import GREEDY, by_hand
from tests.engines.transformers.tiny import llama, prompt
from tierkv.errors import InvalidArgument
from tierkv.integrations.transformers import Attached, attach

ROOT = Path(__file__).parents[3]
OTHER = """
import json, sys
import torch
import tierkv
from tests.engines.transformers.tiny import llama, prompt
from tierkv.integrations.transformers import attach
torch.set_num_threads(1)
model = llama()
with tierkv.connect(sys.argv[1]) as client:
    attached = attach(model, client)
    cache = attached.cache()
    out = model.generate(
        prompt(100), do_sample=False, max_new_tokens=40, **{attached.cache_name: cache}
    )
    print(json.dumps([cache.cached_tokens, out.tolist()]))
"""


def cached(model: Any, attached: Attached, ids: torch.Tensor) -> int:
    """Generate, and tell how many tokens were not computed."""
    cache = attached.cache()
    model.generate(ids, **by_hand(attached, cache), **GREEDY)
    cache.end()
    return cache.cached_tokens


def in_another_process(daemon: DemoDaemon, tmp_path: Path) -> tuple[int, list[list[int]]]:
    """The same prompt there: cached tokens, and the answer. Another folder and hash seed."""
    path = os.pathsep.join(str(ROOT / part) for part in ("", "wal", "kernels"))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "77"}
    ran = subprocess.run(
        [sys.executable, "-c", OTHER, daemon.socket],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    tokens, answer = json.loads(ran.stdout.splitlines()[-1])
    return tokens, answer


def test_a_prefix_outlives_the_worker_and_the_daemon(
    own_daemon: DemoDaemon, tmp_path: Path
) -> None:
    expected = llama().generate(prompt(100), **GREEDY)
    assert in_another_process(own_daemon, tmp_path) == (0, expected.tolist())
    own_daemon.kill()
    own_daemon.start()
    model = llama()
    with tierkv.connect(own_daemon.socket) as client:
        attached = attach(model, client)
        assert cached(model, attached, prompt(100)) == 96
        assert torch.equal(model.generate(prompt(100), **GREEDY), expected)
    assert in_another_process(own_daemon, tmp_path) == (96, expected.tolist())


def test_two_models_share_a_daemon_and_no_block(attach_here: Attach) -> None:
    models = [llama(seed=1), llama(seed=2)]
    expected = [llama(seed=seed).generate(prompt(60), **GREEDY) for seed in (1, 2)]
    attached = [attach_here(model) for model in models]
    for tokens in (0, 48):
        for model, handle, right in zip(models, attached, expected, strict=True):
            assert cached(model, handle, prompt(60)) == tokens
            assert torch.equal(model.generate(prompt(60), **GREEDY), right)


def test_the_same_weights_are_the_same_model(attach_here: Attach) -> None:
    first, second = llama(), llama()
    cached(first, attach_here(first), prompt(60))
    assert cached(second, attach_here(second), prompt(60)) == 48


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.add_(0.01),
        lambda weight: weight.data.add_(0.01),
        lambda weight: weight.data.__setitem__((3, 4), 5.0),
    ],
    ids=["in place", "around the version counter", "one element, seen at attach"],
)
def test_changed_weights_find_nothing_old(attach_here: Attach, change: Any, request: Any) -> None:
    """As by training, or by merging an adapter into them."""
    model = llama()
    attached = attach_here(model)
    cached(model, attached, prompt(60))
    with torch.no_grad():
        change(model.model.layers[0].mlp.up_proj.weight)
    if "at attach" in request.node.name:
        attached.detach()
        attached = attach_here(model)
    assert cached(model, attached, prompt(60)) == 0
    assert cached(model, attached, prompt(60)) == 48


def test_a_switched_adapter_is_another_model(attach_here: Attach) -> None:
    """A layer as the package peft puts it in place of a linear one."""

    class Adapted(torch.nn.Linear):
        disable_adapters = True

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return super().forward(states) * (1.0 if self.disable_adapters else 1.5)

    model = llama()
    layer = model.model.layers[0].mlp.up_proj
    layer.__class__ = Adapted
    attached = attach_here(model)
    for disabled, tokens in ((True, 0), (False, 0), (True, 48), (False, 48)):
        layer.disable_adapters = disabled
        assert cached(model, attached, prompt(60)) == tokens


def test_adapters_of_single_rows_store_nothing(attach_here: Attach) -> None:
    """peft hands ``adapter_names`` over by hooks on the layers that have adapters."""
    model = llama()
    layer = model.model.layers[0].mlp.up_proj
    layer.disable_adapters = False
    attached = attach_here(model)
    handle = layer.register_forward_pre_hook(lambda _module, args: (2 * args[0],))
    model.generate(prompt(60), **GREEDY)
    with pytest.raises(InvalidArgument, match="adapter_names"):
        cached(model, attached, prompt(60))
    handle.remove()
    assert cached(model, attached, prompt(60)) == 0


def test_a_cache_of_other_weights_is_not_gone_on_with(attach_here: Attach) -> None:
    model = llama()
    attached = attach_here(model)
    cache = attached.cache()
    answer = model.generate(prompt(60), **by_hand(attached, cache), **GREEDY)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    longer = torch.cat((answer, prompt(9)), 1)
    with pytest.raises(InvalidArgument, match="weights have changed"):
        model.generate(longer, **by_hand(attached, cache), **GREEDY)


def test_configuration_that_changes_keys_is_another_model(attach_here: Attach) -> None:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    models = [llama(), llama(rope_parameters=rope)]
    for model in models:
        assert cached(model, attach_here(model), prompt(60)) == 0
        assert torch.equal(
            model.generate(prompt(60), **GREEDY),
            llama(rope_parameters=model.config.rope_parameters).generate(prompt(60), **GREEDY),
        )


def test_tenants_share_nothing(attach_here: Attach) -> None:
    for salt in ("one", "two"):
        model = llama()
        assert cached(model, attach_here(model, salt=salt), prompt(60)) == 0


def test_blocks_of_another_size_are_others(attach_here: Attach) -> None:
    for block_tokens in (16, 32):
        model = llama()
        attached = attach_here(model, block_tokens=block_tokens)
        assert cached(model, attached, prompt(60)) == 0
        assert cached(model, attached, prompt(60)) == 59 // block_tokens * block_tokens
