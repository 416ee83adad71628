"""write_blocks and read_blocks: content, checksums, what they refuse. The fake daemon compares
every checksum it is sent with the payload."""

from __future__ import annotations

import array

import numpy as np
import pytest
import torch

from tierkv.errors import InvalidArgument, LeaseLost
from tierkv.native.library import load
from tierkv.native.loops import NativeLoops, PythonLoops
from tierkv.rpc import messages as m

BLOCK = 4
PROMPT = list(range(10, 26))


@pytest.fixture(params=["native", "python"], autouse=True)
def loops(request, client):
    client._core.loops = (
        NativeLoops(load({})) if request.param == "native" else PythonLoops("the test says so")
    )


@pytest.fixture
def data(spec):
    return np.random.default_rng(3).integers(0, 256, (4, spec.block_bytes), np.uint8)


def seals(daemon):
    return [request for request in daemon.requests if isinstance(request, m.Seal)]


def test_a_round_trip(ns, data):
    with ns.begin(PROMPT, keep=0) as sequence:
        sequence.reserve(len(PROMPT))
        assert sequence.write_blocks(0, data[:1]) == 1
        assert sequence.write_blocks(1, data[1:]) == 3
        sequence.append(PROMPT)
        np.testing.assert_array_equal(ns.pool[sequence.block_table, : data.shape[1]], data)
    out = np.zeros((3, data.shape[1]), np.uint8)
    with ns.begin(PROMPT, keep=0) as sequence:
        assert sequence.cached_tokens == len(PROMPT)
        assert sequence.read_blocks(1, out) == 3
    np.testing.assert_array_equal(out, data[1:])


def test_all_that_has_bytes_can_be_copied(ns, spec, data):
    kinds = [
        data,
        data.view(np.float32),
        data.tobytes(),
        bytearray(data.tobytes()),
        memoryview(data),
        array.array("B", data.tobytes()),
        data.reshape(4, spec.layers, 2, BLOCK, -1),
        torch.tensor(data).numpy(),
        np.repeat(data, 2, axis=0)[::2],
        np.pad(data, ((0, 0), (0, 5)))[:, : spec.block_bytes],
    ]
    with ns.begin([]) as sequence:
        sequence.reserve(16)
        for kind in kinds:
            sequence.write_blocks(0, np.zeros_like(data))
            assert sequence.write_blocks(0, kind) == 4, type(kind)
            np.testing.assert_array_equal(ns.pool[sequence.block_table, : data.shape[1]], data)
        sequence.append(PROMPT)
        for out in (
            np.zeros((4, spec.block_bytes // 4), np.float32),
            bytearray(data.nbytes),
            np.zeros((8, spec.block_bytes), np.uint8)[::2],
        ):
            assert sequence.read_blocks(0, out) == 4
            assert np.asarray(memoryview(out)).tobytes() == data.tobytes()


def test_writing_again_gives_other_checksums(ns, data, daemon):
    with ns.begin([]) as sequence:
        sequence.reserve(16)
        sequence.write_blocks(0, data)
        sequence.write_blocks(1, data[:2])
        sequence.append(PROMPT)
    assert len(seals(daemon)) == 1


def test_writing_by_layer_and_through_views_before_is_seen(ns, spec, data):
    kv = torch.ones(1, spec.kv_heads, spec.head_dim)
    with ns.begin([]) as sequence:
        sequence.reserve(16)
        ns.pool[sequence.block_table[2]] = 9
        sequence.write_blocks(0, data[:2])
        sequence.write_blocks(3, data[3:])
        ns.write_kv(1, sequence, 2 * BLOCK - 1, kv, kv)
        ns.write_kv(0, sequence, 3 * BLOCK, kv, kv)
        sequence.append(PROMPT)


def test_blocks_seal_one_by_one_and_in_any_order_of_writing(ns, data, daemon):
    with ns.begin([]) as sequence:
        sequence.reserve(16)
        for block in (3, 1, 0, 2):
            sequence.write_blocks(block, data[block])
        for token in PROMPT:
            sequence.append([token])
    assert [seal.first for seal in seals(daemon)] == [0, 1, 2, 3]


def test_what_is_written_is_forgotten_when_the_slots_may_change(ns, data):
    with ns.begin([]) as sequence:
        sequence.reserve(16)
        sequence.write_blocks(0, data)
        sequence.append(PROMPT[:6])
        with sequence.fork() as child:
            child.reserve(2)
            sequence.reserve(10)
            ns.pool[sequence.block_table[1:]] = 5
            sequence.append(PROMPT[6:])
            ns.pool[child.block_table[1]] = 6
            child.append([1, 2])
        sequence.truncate(9)
        sequence.reserve(7)
        ns.pool[sequence.block_table[2:]] = 7
        sequence.append(PROMPT[9:])


def test_only_reserved_blocks_are_written(ns, data):
    with ns.begin([]) as sequence:
        sequence.reserve(8)
        with pytest.raises(InvalidArgument, match=r"tokens 4 to 11 of .*only 0 to 7: call reserve"):
            sequence.write_blocks(1, data[:2])
        with pytest.raises(InvalidArgument, match="tokens -4 to -1"):
            sequence.write_blocks(-1, data[:1])
        sequence.write_blocks(0, data[:2])
        sequence.append(PROMPT[:4])
        with pytest.raises(InvalidArgument, match=r"tokens 0 to 3 of .* only 4 to 7"):
            sequence.write_blocks(0, data[:1])


def test_only_blocks_with_tokens_are_read(ns, data):
    out = np.zeros_like(data)
    with ns.begin([]) as sequence:
        sequence.reserve(16)
        with pytest.raises(InvalidArgument, match=r"blocks 0 to 3 .*has 0 with tokens"):
            sequence.read_blocks(0, out)
        sequence.write_blocks(0, data)
        sequence.append(PROMPT[:5])
        for first, rows in ((0, 3), (2, 1), (-1, 1)):
            with pytest.raises(InvalidArgument, match="it has 2 with tokens in them"):
                sequence.read_blocks(first, out[:rows])
        assert sequence.read_blocks(0, out[:2]) == 2
        np.testing.assert_array_equal(out[:2], data[:2])
        assert sequence.read_blocks(2, out[:0]) == 0
        sequence.suspend()
        with pytest.raises(InvalidArgument, match="is suspended"):
            sequence.read_blocks(0, out[:1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (b"abc", "has 3 bytes; it must be whole blocks of 512 bytes"),
        ([1, 2, 3], "list, which has no bytes to share"),
        (torch.zeros(512, dtype=torch.bfloat16), r"pass tensor.view\(torch.uint8\).numpy\(\)"),
        (np.zeros((4, 1024), np.uint8)[:, ::2], "is not contiguous"),
        (np.zeros((512, 4), np.uint8).T, "is not contiguous"),
    ],
)
def test_what_is_no_block_is_refused(ns, spec, wrong, message):
    assert spec.block_bytes == 512
    with ns.begin([]) as sequence:
        sequence.reserve(16)
        with pytest.raises(InvalidArgument, match="data .*" + message):
            sequence.write_blocks(0, wrong)
        with pytest.raises(InvalidArgument, match="out .*" + message):
            sequence.read_blocks(0, wrong)


def test_what_is_read_only_is_not_read_into(ns, spec, data):
    with ns.begin([]) as sequence:
        sequence.reserve(16)
        sequence.write_blocks(0, data)
        sequence.append(PROMPT)
        with pytest.raises(InvalidArgument, match="out is read-only"):
            sequence.read_blocks(0, bytes(spec.block_bytes))


def test_a_sequence_that_has_ended_is_neither_written_nor_read(ns, data):
    sequence = ns.begin([])
    sequence.reserve(16)
    sequence.end()
    for call in (sequence.write_blocks, sequence.read_blocks):
        with pytest.raises((InvalidArgument, LeaseLost), match="ended"):
            call(0, data)
