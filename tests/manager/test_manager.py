"""The in-process cache: prefix sharing, spilling and lifetimes, with real bytes on real tiers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tierkv.core.invariants import check_invariants
from tierkv.core.spec import KVSpec
from tierkv.errors import CorruptionError, InvalidArgument, PoolExhausted
from tierkv.manager import Fill, KVCacheManager

SPEC = KVSpec(model="test", layers=2, kv_heads=1, head_dim=8, dtype="float32", block_tokens=16)


def pattern(tokens: list[int]) -> Fill:
    """Writes into each block bytes that follow from the whole chain up to its end."""

    def fill(payload: np.ndarray, first_token: int, count: int) -> None:
        payload[:] = expected(tokens, (first_token + count - 1) // SPEC.block_tokens)

    return fill


def expected(tokens: list[int], block: int) -> np.ndarray:
    seed = hash(tuple(tokens[: (block + 1) * SPEC.block_tokens])) & 0xFFFFFFFF
    return np.random.default_rng(seed).integers(0, 256, SPEC.block_bytes, np.uint8)


def is_right(manager: KVCacheManager, sequence: int, tokens: list[int]) -> bool:
    blocks = -(-len(tokens) // SPEC.block_tokens)
    return all(
        np.array_equal(manager.payload(sequence, block), expected(tokens, block))
        for block in range(blocks)
    )


def test_a_prompt_of_forty_tokens_shares_its_two_full_blocks() -> None:
    prompt = list(range(50_000, 50_040))
    with KVCacheManager(SPEC, device_blocks=8) as manager:
        first = manager.begin_sequence(prompt, pattern(prompt))
        second = manager.begin_sequence(prompt, pattern(prompt))
        tables = manager.block_table(first), manager.block_table(second)
        assert tables[0][:2].tolist() == tables[1][:2].tolist()
        assert tables[0][2] != tables[1][2]
        stats = manager.stats()
        assert stats["shared_blocks"] == 2
        assert stats["blocks_by_tier"]["device"] == 4
        assert is_right(manager, first, prompt)
        assert is_right(manager, second, prompt)


def test_five_sequences_of_two_blocks_stay_correct_in_a_pool_of_four() -> None:
    prompts = [[n * 1000 + t for t in range(32)] for n in range(5)]
    with KVCacheManager(SPEC, device_blocks=4, host_blocks=16) as manager:
        opened = [manager.begin_sequence(prompt, pattern(prompt)) for prompt in prompts]
        for sequence, prompt in zip(opened, prompts, strict=True):
            assert is_right(manager, sequence, prompt)
        stats = manager.stats()
        assert stats["evictions"]["device>host"] >= 6
        assert "device>none" not in stats["evictions"]
        check_invariants(manager.state)


def test_a_shared_block_outlives_the_end_of_one_of_its_sequences() -> None:
    prompt = list(range(32))
    with KVCacheManager(SPEC, device_blocks=4) as manager:
        first = manager.begin_sequence(prompt, pattern(prompt))
        second = manager.begin_sequence(prompt, pattern(prompt))
        manager.end_sequence(first)
        other = [900 + t for t in range(32)]
        third = manager.begin_sequence(other, pattern(other))
        assert is_right(manager, second, prompt)
        assert is_right(manager, third, other)


@pytest.mark.parametrize("below", [{"host_blocks": 3, "disk_blocks": 40}, {"disk_blocks": 40}])
def test_growing_sequences_take_turns_through_all_tiers(below: dict[str, int]) -> None:
    with KVCacheManager(SPEC, device_blocks=5, **below) as manager:
        tokens = {manager.begin_sequence([n]): [n] for n in range(4)}
        for step in range(12):
            for sequence, ids in tokens.items():
                fresh = [100 * step + sequence + t for t in range(5)]
                ids += fresh
                manager.append_tokens(sequence, fresh, pattern(ids))
        for sequence, ids in tokens.items():
            assert manager.tokens(sequence) == ids
            assert is_right(manager, sequence, ids)
        check_invariants(manager.state)


def test_without_a_lower_tier_a_full_pool_is_an_error_that_changes_nothing() -> None:
    prompt = list(range(32))
    with KVCacheManager(SPEC, device_blocks=3) as manager:
        first = manager.begin_sequence(prompt, pattern(prompt))
        before = manager.stats()
        with pytest.raises(PoolExhausted) as caught:
            manager.begin_sequence([7] * 32)
        assert caught.value.details["asked"] == 2
        assert manager.stats()["blocks_by_tier"] == before["blocks_by_tier"]
        assert is_right(manager, first, prompt)


def test_a_sequence_that_lost_a_block_keeps_the_tokens_before_it(tmp_path: Path) -> None:
    prompt, other = list(range(40)), [7] * 48
    with KVCacheManager(SPEC, device_blocks=3, disk_blocks=9, directory=tmp_path) as manager:
        first = manager.begin_sequence(prompt, pattern(prompt))
        manager.begin_sequence(other, pattern(other))
        (segment,) = tmp_path.rglob("*.seg")
        content = bytearray(segment.read_bytes())
        content[content.index(expected(prompt, 1).tobytes())] ^= 1
        segment.write_bytes(content)
        with pytest.raises(CorruptionError):
            manager.block_table(first)
        assert manager.tokens(first) == prompt[:16]
        longer = prompt[:16] + [9] * 20
        manager.append_tokens(first, longer[16:], pattern(longer))
        assert is_right(manager, first, longer)
        check_invariants(manager.state)


def test_token_ids_of_any_size_are_told_apart() -> None:
    with KVCacheManager(SPEC, device_blocks=8) as manager:
        manager.begin_sequence([256] * 16)
        other = manager.begin_sequence([0, 1] * 8)
        assert manager.stats()["shared_blocks"] == 0
        manager.end_sequence(other)


def bad(call: Callable[[], object], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        call()


def test_bad_input_is_named() -> None:
    spec = KVSpec(model="m", layers=1, kv_heads=1, head_dim=8, vocab_size=100)
    with KVCacheManager(spec, device_blocks=4) as manager:
        bad(lambda: manager.begin_sequence([1, 100]), "token id 100 at position 1")
        bad(lambda: manager.begin_sequence([-1]), "token id -1")
        bad(lambda: manager.append_tokens(9, [1]), "no sequence 9")
        bad(lambda: manager.end_sequence(9), "no sequence 9")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with KVCacheManager(SPEC, device_blocks=2, disk_blocks=2, directory=tmp_path) as manager:
        manager.begin_sequence([1] * 16)
    assert list(tmp_path.iterdir()) == []
