"""The engine's KV memory as pieces of blocks, wherever it lies, without knowing what is in it.

A page is what one layer holds of one block. Its bytes are the engine's own affair (packed for an
instruction set, heads first or tokens first): they are copied as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tierkv.core.ids import I32
from tierkv.errors import InvalidArgument
from tierkv.integrations.vllm.geometry import Geometry
from tierkv.native.pages import Pages


@dataclass(frozen=True)
class Piece:
    """``memory``: u8 [blocks, bytes], a row for each of the engine's block ids of ``column``."""

    memory: torch.Tensor
    column: int
    offset: int
    """Where these bytes lie in a block of tierkv."""

    @property
    def size_bytes(self) -> int:
        """Of one row."""
        return self.memory.shape[1]


class EnginePages:
    """All pieces of a block of tierkv: ``block_bytes`` in all, one after another."""

    def __init__(self, geometry: Geometry, caches: Mapping[str, torch.Tensor], blocks: int) -> None:
        self.pieces: list[Piece] = []
        self.block_bytes = 0
        for column, layers in enumerate(geometry.layers):
            for layer in layers:
                for memory in rows_of_cache(layer, caches[layer], blocks):
                    self.pieces.append(Piece(memory, column, self.block_bytes))
                    self.block_bytes += memory.shape[1]
        self.device = self.pieces[0].memory.device
        if any(piece.memory.device != self.device for piece in self.pieces):
            raise InvalidArgument("the KV cache lies on several devices; tierkv copies from one")

    def as_client_pages(self) -> Pages | None:
        """For copies without staging: of host memory, when one block id tells all pieces."""
        if self.device.type != "cpu" or any(piece.column for piece in self.pieces):
            return None
        return Pages(piece.memory.numpy() for piece in self.pieces)

    def gather(self, rows: I32, out: torch.Tensor) -> None:
        """Copy blocks out of the engine: ``rows`` [n, columns] of ids, ``out`` u8 [n, bytes]."""
        ids = torch.from_numpy(rows).to(self.device, torch.int64)
        for piece in self.pieces:
            target = out[:, piece.offset : piece.offset + piece.size_bytes]
            if self.device == out.device:
                torch.index_select(piece.memory, 0, ids[:, piece.column], out=target)
            else:
                target.copy_(piece.memory.index_select(0, ids[:, piece.column]), non_blocking=True)

    def scatter(self, rows: I32, blocks: torch.Tensor) -> None:
        """Copy blocks into the engine, but for the parts whose id is negative."""
        ids = torch.from_numpy(rows)
        for piece in self.pieces:
            wanted = ids[:, piece.column]
            source = blocks[:, piece.offset : piece.offset + piece.size_bytes]
            if bool((wanted < 0).any()):
                source, wanted = source[wanted >= 0], wanted[wanted >= 0]
            target_ids = wanted.to(self.device, torch.int64)
            piece.memory.index_copy_(0, target_ids, source.to(self.device, non_blocking=True))

    def describe(self) -> str:
        """What a block is made of, for its identity: the pieces' sizes."""
        sizes = [(piece.column, piece.size_bytes) for piece in self.pieces]
        return ",".join(f"{column}:{size}" for column, size in sizes)


def rows_of_cache(layer: str, cache: torch.Tensor, blocks: int) -> list[torch.Tensor]:
    """A layer's memory as one or more u8 [blocks, bytes], whose rows are contiguous.

    The first axis of ``cache`` counts the engine's blocks, each one or several times (when the
    kernel's blocks are smaller). A page that is not contiguous gives several pieces. The order of
    the other axes, and what they are, does not matter. Raises InvalidArgument.
    """
    if not blocks or cache.shape[0] % blocks or cache.ndim < 2:
        raise InvalidArgument(
            f"layer {layer}: its KV cache is {list(cache.shape)}; the first axis should count the "
            f"{blocks} blocks"
        )
    item, parts = cache.element_size(), cache.shape[0] // blocks
    inner = zip(cache.stride(), (parts, *cache.shape[1:]), strict=True)
    axes = sorted((stride * item, size) for stride, size in inner if size > 1)
    run = item
    outer: list[range] = []
    for stride, size in axes:
        if stride == run and not outer:
            run *= size
        else:
            outer.append(range(0, stride * size, stride))
    row_stride = cache.stride(0) * parts * item
    extent = run + sum(axis[-1] for axis in outer)
    if blocks > 1 and row_stride < extent and not _interleaved(row_stride, run, outer):
        raise InvalidArgument(f"layer {layer}: the blocks of its KV cache overlap")
    storage = torch.empty(0, dtype=torch.uint8, device=cache.device)
    storage.set_(cache.untyped_storage())
    start = cache.storage_offset() * item
    return [
        torch.as_strided(storage, (blocks, run), (row_stride, 1), start + sum(offsets))
        for offsets in itertools.product(*outer)
    ]


def _interleaved(row_stride: int, run: int, outer: list[range]) -> bool:
    """Whether blocks lie between the outer axes' steps, as in a layout with heads outermost."""
    return row_stride >= run and all(axis.step >= row_stride for axis in outer)
