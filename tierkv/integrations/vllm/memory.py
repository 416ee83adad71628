"""Copies between the engine's pages and tierkv, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tierkv.client.sync import Namespace
from tierkv.core.ids import I32, U8
from tierkv.integrations.vllm.chain import Chain
from tierkv.integrations.vllm.geometry import Geometry
from tierkv.integrations.vllm.pages import EnginePages
from tierkv.native.pages import Pages

STAGED_BYTES = 64 << 20
"""What is copied at once by way of staging memory: one of this size for loads, one for saves."""

LOADED_BYTES = 256 << 20
"""What one call loads: the time that the daemon may take is for so much."""


class EngineMemory:
    """One thread loads and one saves; each has its own staging memory (pinned beside a GPU)."""

    def __init__(self, geometry: Geometry, caches: Mapping[str, torch.Tensor], blocks: int) -> None:
        self.pages = EnginePages(geometry, caches, blocks)
        self.blocks = blocks
        self.block_bytes = self.pages.block_bytes
        self.staged_blocks = max(1, STAGED_BYTES // self.block_bytes)
        self._on_gpu = self.pages.device.type == "cuda"
        self._direct = self.pages.as_client_pages()
        self._saving = self._staging()
        self._loading = self._staging() if self._direct is None else None
        self._streams: dict[str, Any] = {}

    def mark(self) -> Any:
        """A point in the device's work, for ``wait``; None where work is done when it is given."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch types it not
        event.record(torch.cuda.current_stream(self.pages.device))
        return event

    def wait(self, point: Any) -> None:
        """Return when the device has got to ``point``."""
        if point is not None:
            point.synchronize()

    def copy_out(self, rows: I32) -> U8:
        """The blocks that lie in ``rows`` [n, columns] (u8 [n, bytes]); valid until the next call.

        At most ``staged_blocks``.
        """
        staged = self._saving[: len(rows)]
        with self._stream("save"):
            self.pages.gather(rows, staged)
        copied: U8 = staged.numpy()
        return copied

    def load(self, namespace: Namespace, chain: Chain, first: int, rows: I32) -> int:
        """Copy blocks of ``chain`` from ``first`` on into ``rows``; how many, from the first on."""
        if self._direct is not None and not (rows < 0).any():
            return self._load_direct(namespace, chain, first, rows, self._direct)
        return self._load_staged(namespace, chain, first, rows)

    def _load_direct(
        self, namespace: Namespace, chain: Chain, first: int, rows: I32, pages: Pages
    ) -> int:
        at_once, loaded = max(1, LOADED_BYTES // self.block_bytes), 0
        while loaded < len(rows):
            piece = rows[loaded : loaded + at_once, 0]
            at = first + loaded
            part = chain.first(at + len(piece), namespace.spec.block_tokens)
            copied = namespace.read_pages(
                part.tokens, pages, piece, first=at, extra_keys=part.extra_keys
            )
            loaded += copied
            if copied < len(piece):
                break
        return loaded

    def _load_staged(self, namespace: Namespace, chain: Chain, first: int, rows: I32) -> int:
        """The same where a block comes from several tables, has parts that are not wanted, or goes
        to a GPU.
        """
        staging = self._loading = self._staging() if self._loading is None else self._loading
        with namespace.begin(chain.tokens, keep=0, extra_keys=chain.extra_keys) as sequence:
            held = min(sequence.cached_tokens // namespace.spec.block_tokens - first, len(rows))
            for at in range(0, held, self.staged_blocks):
                piece = rows[at : min(at + self.staged_blocks, held)]
                staged = staging[: len(piece)]
                sequence.read_blocks(first + at, staged.numpy())
                with self._stream("load"):
                    self.pages.scatter(piece, staged)
        return max(held, 0)

    def _staging(self) -> torch.Tensor:
        size = (self.staged_blocks, self.block_bytes)
        # Zeroes: its pages are there before the first request, which need not wait for them.
        return torch.zeros(size, dtype=torch.uint8, pin_memory=self._on_gpu).fill_(0)

    @contextmanager
    def _stream(self, name: str) -> Iterator[None]:
        """Work on a stream of its own, done when the block ends; on a CPU it is done anyway."""
        if not self._on_gpu:
            yield
            return
        if name not in self._streams:
            stream = torch.cuda.Stream(self.pages.device)  # type: ignore[no-untyped-call]  # so
            self._streams[name] = stream
        try:
            with torch.cuda.stream(self._streams[name]):
                yield
        finally:
            self._streams[name].synchronize()
