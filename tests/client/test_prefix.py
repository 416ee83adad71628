"""Chain hashes against a model written the long way."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.core.prefix import chain_hashes, extra_digests

SEED = bytes(range(16))


def model(seed, tokens, block_tokens, extras=None):
    hashes = []
    for block in range(len(tokens) // block_tokens):
        state = xxhash.xxh3_128()
        state.update(hashes[-1] if hashes else seed)
        for token in tokens[block * block_tokens : (block + 1) * block_tokens]:
            state.update(int(token).to_bytes(4, "little"))
        if extras is not None and extras[block]:
            state.update(int(extras[block]).to_bytes(8, "little"))
        hashes.append(state.digest())
    return hashes


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=70),
    block_tokens=st.integers(1, 17),
    data=st.data(),
)
def test_hashes_equal_the_model(tokens, block_tokens, data):
    blocks = len(tokens) // block_tokens
    extras = data.draw(
        st.none() | st.lists(st.integers(0, 2**64 - 1) | st.just(0), min_size=blocks)
    )
    found = chain_hashes(
        SEED,
        np.array(tokens, np.uint32),
        block_tokens,
        None if extras is None else np.array(extras, np.uint64),
    )
    assert found.dtype == np.uint8
    assert found.shape == (blocks, 16)
    assert [row.tobytes() for row in found] == model(SEED, tokens, block_tokens, extras)


def test_a_known_value():
    # xxh3_128 of 16 zero bytes and the tokens 1, 2 as u32: fixes byte order for other languages.
    expected = xxhash.xxh3_128_hexdigest(bytes(16) + bytes.fromhex("0100000002000000"))
    assert chain_hashes(bytes(16), np.array([1, 2], np.uint32), 2).tobytes().hex() == expected


def test_a_chain_continues_from_its_last_hash():
    tokens = np.arange(100, dtype=np.uint32)
    whole = chain_hashes(SEED, tokens, 10)
    rest = chain_hashes(whole[3].tobytes(), tokens[40:], 10)
    assert (rest == whole[4:]).all()


def test_blocks_without_extra_keys_are_shared_with_those_that_never_had_any():
    tokens = np.arange(40, dtype=np.uint32)
    plain = chain_hashes(SEED, tokens, 10)
    keyed = chain_hashes(SEED, tokens, 10, extra_digests([None, None, b"image", None]))
    assert (keyed[:2] == plain[:2]).all()
    assert (keyed[2:] != plain[2:]).any(axis=1).all()


def test_extra_digests():
    digests = extra_digests([b"a", None, b"", b"b"])
    assert digests.dtype == np.uint64
    assert digests.tolist() == [
        xxhash.xxh3_64_intdigest(b"a"),
        0,
        0,
        xxhash.xxh3_64_intdigest(b"b"),
    ]
