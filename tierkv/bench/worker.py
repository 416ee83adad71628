"""What a worker does with blocks, by the worker API: the only place where workloads call it so."""

from __future__ import annotations

from tierkv.client.sync import Namespace, Sequence
from tierkv.core.ids import U8, U32


def begin(namespace: Namespace, tokens: U32) -> Sequence:
    """Begin on all of ``tokens``, which must be cached. Raises RuntimeError if they are not."""
    sequence = namespace.begin(tokens, keep=0)
    if sequence.cached_tokens != len(tokens):
        raise RuntimeError(f"only {sequence.cached_tokens} of {len(tokens)} tokens are cached")
    return sequence


def reserve(namespace: Namespace, tokens: U32) -> Sequence:
    """Begin on ``tokens`` that nobody has cached, with room for all of them."""
    sequence = namespace.begin(tokens, keep=0, reserve=0)
    if sequence.cached_tokens:
        raise RuntimeError(f"{sequence.cached_tokens} of {len(tokens)} tokens are cached already")
    return sequence


def put(namespace: Namespace, tokens: U32, payload: U8) -> None:
    """Cache ``tokens`` with ``payload`` (u8 [blocks, block_bytes]) by copy."""
    written = namespace.write(tokens, payload)
    if written != len(payload):
        raise RuntimeError(f"only {written} of {len(payload)} blocks were cached")


def put_by_sequence(namespace: Namespace, tokens: U32, payload: U8) -> None:
    """The same by a sequence, which holds the blocks from the first one to the last."""
    sequence = reserve(namespace, tokens)
    sequence.write_blocks(0, payload)
    sequence.append(tokens)
    sequence.end()


def get(namespace: Namespace, tokens: U32, out: U8) -> None:
    """Copy the blocks of ``tokens`` into ``out`` (u8 [blocks, block_bytes]), and let go of them."""
    sequence = begin(namespace, tokens)
    sequence.read_blocks(0, out)
    sequence.end()


def read(namespace: Namespace, tokens: U32, out: U8) -> None:
    """The same without a sequence, and without asking: what is copied is checked instead."""
    copied = namespace.read(tokens, out)
    if copied != len(out):
        raise RuntimeError(f"only {copied} of {len(out)} blocks were read")
