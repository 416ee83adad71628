"""The cache as an object: what transformers and people call on it, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import tierkv
from tests.engines.transformers.conftest import Attach
from tests.engines.transformers.running import by_hand, held
from tests.engines.transformers.tiny import llama, prompt, ragged
from tierkv.errors import InvalidArgument
from tierkv.integrations.transformers import Attached, TierKVCache


@torch.no_grad()
def feed(attached: Attached, cache: TierKVCache, ids: Tensor, **more: Any) -> Tensor:
    """The logits of these columns."""
    logits: Tensor = attached.model(ids, **by_hand(attached, cache), **more).logits
    return logits


@torch.no_grad()
def plain(ids: Tensor, **more: Any) -> Tensor:
    """The logits of these columns without tierkv."""
    logits: Tensor = llama()(ids, **more).logits
    return logits


def close(got: Tensor, expected: Tensor) -> bool:
    return bool((got - expected).abs().max() < 1e-4)


def test_it_is_fed_piece_by_piece(attached: Attached) -> None:
    ids, cache = prompt(90, rows=2), attached.cache()
    got = [feed(attached, cache, ids[:, at : at + n]) for at, n in ((0, 50), (50, 1), (51, 39))]
    assert close(torch.cat(got, 1), plain(ids))
    assert (cache.get_seq_length(), cache.batch_size) == (90, 2)
    assert cache.get_mask_sizes(5) == (95, 0)
    assert len(cache) == 4
    assert not cache.is_compileable


@pytest.mark.parametrize("number", [-1, -7, -16, -40, -90, 1, 50, 89], ids=str)
def test_crop_takes_columns_back(attached: Attached, number: int) -> None:
    """Others may come in their place; what was sealed stays what it was, for others."""
    ids, cache = prompt(90, rows=2), attached.cache()
    feed(attached, cache, ids)
    keep = number if number > 0 else 90 + number
    cache.crop(number)
    assert cache.get_seq_length() == keep
    other = torch.cat((ids[:, :keep], prompt(30, rows=2, seed=8)), 1)
    assert close(feed(attached, cache, other[:, keep:]), plain(other)[:, keep:])
    again = attached.cache()
    assert close(feed(attached, again, ids, logits_to_keep=1), plain(ids)[:, -1:])
    assert again.cached_tokens == 2 * 80


def test_crop_of_nothing(attached: Attached) -> None:
    ids, cache = prompt(40), attached.cache()
    feed(attached, cache, ids)
    cache.crop(0)
    cache.crop(1000)
    assert cache.get_seq_length() == 40


def test_rows_are_reordered_repeated_and_selected(attached: Attached) -> None:
    """Rows that come from one share its blocks, until they are written to."""
    ids, cache = prompt(45, rows=3), attached.cache()
    feed(attached, cache, ids)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    ids = torch.cat((ids[[2, 2, 0]], prompt(9, rows=3, seed=3)), 1)
    assert close(feed(attached, cache, ids[:, 45:]), plain(ids)[:, 45:])
    cache.batch_repeat_interleave(2)
    ids = torch.cat((ids.repeat_interleave(2, 0), prompt(9, rows=6, seed=4)), 1)
    assert close(feed(attached, cache, ids[:, 54:]), plain(ids)[:, 54:])
    cache.batch_select_indices(torch.tensor([5, 0]))
    ids = torch.cat((ids[[5, 0]], prompt(9, rows=2, seed=5)), 1)
    assert close(feed(attached, cache, ids[:, 63:]), plain(ids)[:, 63:])
    cache.batch_select_indices(torch.tensor([False, True]))
    ids = torch.cat((ids[1:], prompt(9, seed=6)), 1)
    assert close(feed(attached, cache, ids[:, 72:]), plain(ids)[:, 72:])
    assert held(attached.client) == 1


def test_it_begins_anew(attached: Attached) -> None:
    cache = attached.cache()
    feed(attached, cache, prompt(40, rows=3))
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size, cache.is_initialized) == (0, -1, False)
    assert held(attached.client) == 0
    assert close(feed(attached, cache, prompt(30, seed=2)), plain(prompt(30, seed=2)))


def test_padding_may_be_anywhere(attached: Attached) -> None:
    """On the right, too, with more after it, as when a chat's turns were padded one by one."""
    ids, cache = prompt(60, rows=2), attached.cache()
    mask = torch.ones_like(ids)
    mask[0, 20:33] = 0
    mask[1, :5] = mask[1, 50:] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = plain(ids, attention_mask=mask, position_ids=positions)
    got = torch.cat(
        [
            feed(attached, cache, ids[:, :40], attention_mask=mask[:, :40]),
            feed(attached, cache, ids[:, 40:], attention_mask=mask),
        ],
        1,
    )
    assert close(got[mask.bool()], expected[mask.bool()])


def test_an_interrupted_pass_can_be_repeated(model: Any, attached: Attached) -> None:
    ids, cache = prompt(60), attached.cache()
    feed(attached, cache, ids[:, :40])

    def fail(_module: Any, _args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        feed(attached, cache, ids[:, 40:])
    handle.remove()
    with torch.no_grad():
        assert close(model(ids, use_cache=False).logits, plain(ids))
    assert cache.get_seq_length() == 40
    assert close(feed(attached, cache, ids[:, 40:]), plain(ids)[:, 40:])


def test_what_it_refuses(model: Any, attached: Attached) -> None:
    ids = prompt(40)
    more = {"attention_mask": torch.ones(1, 39)}
    shifted = {"position_ids": torch.arange(40).view(1, 40) + 1}
    whole = {"attention_mask": torch.ones(1, 1, 40, 40)}
    odd = {"token_type_ids": torch.zeros_like(ids)}
    for given, words in (
        (more, "attention_mask is"),
        (whole, "attention_mask is"),
        (shifted, "position_ids are not"),
        (odd, "token_type_ids"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            feed(attached, attached.cache(), ids, **given)
    embedded = {"inputs_embeds": model.model.embed_tokens(ids)}
    with pytest.raises(InvalidArgument, match="inputs_embeds"), torch.no_grad():
        model(**embedded, **by_hand(attached, attached.cache()))
    with pytest.raises(InvalidArgument, match="gradients"):
        model(ids, **by_hand(attached, attached.cache()))
    with pytest.raises(InvalidArgument, match="not attached"), torch.no_grad():
        llama()(ids, **by_hand(attached, attached.cache()))
    with pytest.raises(InvalidArgument, match="not attached"), torch.no_grad():
        model.model(ids, **by_hand(attached, attached.cache()))


def test_what_a_used_cache_refuses(attached: Attached) -> None:
    ids, mask = ragged(40, [0, 9]).values()
    cache = attached.cache()
    feed(attached, cache, ids, attention_mask=mask)
    next_ids = prompt(1, rows=2)
    for given, words in (
        ({}, "differs"),
        ({"attention_mask": torch.ones(2, 41)}, "differs"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            feed(attached, cache, next_ids, **given)
    with pytest.raises(InvalidArgument, match="3 rows are fed to a cache of 2"):
        feed(attached, cache, prompt(1, rows=3))
    cache.end()
    with pytest.raises(InvalidArgument, match="ended"):
        feed(attached, cache, next_ids, attention_mask=torch.cat((mask, torch.ones(2, 1)), 1))


def test_a_compiled_model(model: Any, attached: Attached) -> None:
    """torch.compile leaves out what talks to tierkv."""
    compiled = torch.compile(model, backend="eager")
    ids = prompt(60)
    for cached in (0, 48):
        cache = attached.cache()
        with torch.no_grad():
            got = compiled(ids, logits_to_keep=1, **by_hand(attached, cache)).logits
        assert close(got, plain(ids)[:, -1:])
        assert cache.cached_tokens == cached
    with torch.no_grad():
        assert close(compiled(ids, use_cache=False).logits, plain(ids))


def test_two_threads_generate_at_once(model: Any, attached: Attached) -> None:
    prompts = [prompt(60, seed=seed) for seed in range(4)]
    expected = [llama().generate(ids, do_sample=False, max_new_tokens=20) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        got = list(
            pool.map(
                lambda ids: model.generate(ids, do_sample=False, max_new_tokens=20), prompts * 2
            )
        )
    assert all(map(torch.equal, got, expected * 2))


def test_a_client_that_is_closed(model: Any, attached: Attached, client: tierkv.Client) -> None:
    """The model goes on without tierkv."""
    client.close()
    got = model.generate(prompt(60), do_sample=False, max_new_tokens=20)
    assert torch.equal(got, llama().generate(prompt(60), do_sample=False, max_new_tokens=20))


def test_detach_ends_caches_that_live(model: Any, attached: Attached) -> None:
    before = held(attached.client)
    cache = attached.cache()
    feed(attached, cache, prompt(40))
    assert held(attached.client) == before + 1
    attached.detach()
    assert held(attached.client) == before
    with torch.no_grad(), pytest.raises(InvalidArgument, match="not attached"):
        model(prompt(1), **by_hand(attached, cache))


def test_detach_gives_back_the_models_own_generate(model: Any, attach_here: Attach) -> None:
    own = model.generate = lambda: "its own"
    attach_here(model).detach()
    assert model.generate is own


def test_the_older_name_of_the_cache_is_taken(model: Any, attached: Attached) -> None:
    ids, cache = prompt(60), attached.cache()
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        assert cache.get_seq_length() == 40
        assert close(model(ids[:, 40:], past_key_values=cache).logits, plain(ids)[:, 40:])


def test_nothing_is_stored_in_training(model: Any, attached: Attached) -> None:
    """Dropout would make the keys and values random."""
    model.train()
    with pytest.raises(InvalidArgument, match="training mode"):
        feed(attached, attached.cache(), prompt(40))
    model.generate(prompt(40), do_sample=False, max_new_tokens=4)
    model.eval()
    cache = attached.cache()
    feed(attached, cache, prompt(40), logits_to_keep=1)
    assert cache.cached_tokens == 0
