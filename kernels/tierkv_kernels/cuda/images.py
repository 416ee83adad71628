"""Compiled kernels: from the cache on disk, else from the compiler."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tierkv_kernels.cuda.cache import KernelCache, key_of
from tierkv_kernels.cuda.nvrtc import OPTIONS, Compiled, Nvrtc, Source
from tierkv_kernels.cuda.variants import Variant
from tierkv_kernels.errors import CompileError

SOURCES = Path(__file__).parent / "src"

FILE_OF = {
    "paged_attention": "paged_attention.cu",
    "merge_partials": "merge.cu",
    "move_pieces": "move.cu",
    "write_kv": "write_kv.cu",
}
"""Of each kernel."""

OLDEST = 80
"""Compute capability with the asynchronous copies and bfloat16 products that they are made of."""

_log = logging.getLogger(__name__)


def source_of(variant: Variant) -> Source:
    """Its file and the headers beside it."""
    texts = _texts()
    name = FILE_OF[variant.kernel]
    headers = {header: text for header, text in texts.items() if not header.endswith(".cu")}
    return Source(name, texts[name], headers)


def options_of(variant: Variant) -> list[str]:
    """Of the compiler, beside the arch."""
    macros = list(variant.macros)
    options = [f"--define-macro={name}={value}" for name, value in macros]
    if variant.name != variant.kernel:
        options.append(f"--define-macro={variant.kernel}={variant.name}")
    return options


def compile_variant(variant: Variant, arch: str, nvrtc: Nvrtc) -> Compiled:
    """Compile it, whatever the cache has. Raises CompileError."""
    number = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if number and int(number[1]) < OLDEST:
        raise CompileError(f"{arch} is too old: the kernels need sm_{OLDEST} or newer")
    return nvrtc.compile(source_of(variant), arch, options_of(variant))


class Images:
    """What a compiler makes, kept in a cache."""

    def __init__(self, nvrtc: Nvrtc, cache: KernelCache) -> None:
        self.nvrtc, self.cache = nvrtc, cache

    def key(self, variant: Variant, arch: str) -> str:
        """Of the image in the cache: another source, option, arch or compiler, another key."""
        source = source_of(variant)
        major, minor = self.nvrtc.version
        return key_of(
            (
                source.name,
                source.text,
                *(part for header in sorted(source.headers.items()) for part in header),
                variant.name,
                *OPTIONS,
                *options_of(variant),
                arch,
                f"{major}.{minor}",
            )
        )

    def fill(self, variants: Iterable[Variant], arch: str, workers: int) -> Iterator[bool]:
        """Put into the cache what it lacks; for each variant, in order, whether it was compiled.

        workers: how many compile at once. Raises CompileError, and OSError for the cache.
        """

        def fill_one(variant: Variant) -> bool:
            key = self.key(variant, arch)
            if self.cache.get(key) is not None:
                return False
            self.cache.put(key, compile_variant(variant, arch, self.nvrtc).image)
            return True

        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(fill_one, variants)

    def get(self, variant: Variant, arch: str) -> bytes:
        """The image for an arch, compiled if need be. Raises CompileError.

        A cache that cannot be written costs time in each process, and a warning.
        """
        key = self.key(variant, arch)
        image = self.cache.get(key)
        if image is None:
            image = compile_variant(variant, arch, self.nvrtc).image
            try:
                self.cache.put(key, image)
            except OSError as error:
                _log.warning("compiled kernels are not kept: %s", error)
        return image


@functools.cache
def _texts() -> dict[str, str]:
    return {
        path.name: path.read_text()
        for path in sorted(SOURCES.iterdir())
        if path.suffix in (".cu", ".cuh", ".h")
    }
