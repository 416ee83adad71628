"""``tierkv kernels``: what attention runs on here, and the compiled CUDA kernels."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from tierkv.cli.render import Row, print_json, print_table
from tierkv.errors import TierkvError
from tierkv.units import about_bytes


@click.group(no_args_is_help=False)
def kernels() -> None:
    """Show what attention runs on, and compile its CUDA kernels ahead.

    \b
    tierkv kernels info
    tierkv kernels build
    tierkv kernels build --arch sm_90 --head-dim 128
    """


@kernels.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON; what is missing says why.")
def info(as_json: bool) -> None:
    """Show the kernel for this CPU, and the CUDA driver, devices, compiler and kernels.

    The compiler and the cache are those that a daemon with this environment would use.
    """
    found = {"cpu": _cpu(), "cuda": _cuda(), "nvrtc": _nvrtc(), "cache": _cache()}
    if as_json:
        print_json(found)
    else:
        print_table(("what", "found"), _rows(found))


def _check_head_dims(_: object, __: object, head_dims: Sequence[int]) -> Sequence[int]:
    from tierkv_kernels.cuda.variants import HEAD_DIMS_TAKEN

    for head_dim in head_dims:
        if head_dim not in HEAD_DIMS_TAKEN:
            known = ", ".join(map(str, HEAD_DIMS_TAKEN))
            raise click.BadParameter(f"{head_dim} is not one of {known}")
    return head_dims


@kernels.command()
@click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="sm_90",
    help="Compile for this architecture; may be given several times. Else for this machine's.",
)
@click.option(
    "--head-dim",
    "head_dims",
    multiple=True,
    type=int,
    metavar="D",
    callback=_check_head_dims,
    help="Only kernels for this head dimension; may be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: {arch: {compiled, kept}}.")
def build(archs: Sequence[str], head_dims: Sequence[int], as_json: bool) -> None:
    """Compile the CUDA kernels into the cache, so that no request waits for it.

    Needs no device if --arch is given, and no compiler but NVRTC. What is in the cache already is
    not compiled again.
    """
    from tierkv_kernels.cuda.cache import KernelCache
    from tierkv_kernels.cuda.images import Images
    from tierkv_kernels.cuda.nvrtc import Nvrtc
    from tierkv_kernels.cuda.variants import HEAD_DIMS, variants_for

    began = time.monotonic()
    counts: dict[str, Counter[str]] = {}
    with _kernel_errors():
        images = Images(Nvrtc.find(), KernelCache())
        wanted = list(variants_for(head_dims or HEAD_DIMS))
        for arch in archs or _archs_of_devices():
            done = images.fill(wanted, arch, workers=os.cpu_count() or 1)
            counts[arch] = Counter("compiled" if compiled else "kept" for compiled in done)
    if as_json:
        print_json(
            {arch: {"compiled": n["compiled"], "kept": n["kept"]} for arch, n in counts.items()}
        )
        return
    rows = [(arch, str(n["compiled"]), str(n["kept"])) for arch, n in counts.items()]
    counted = ("compiled", "in the cache before")
    print_table(("arch", *counted), rows, numbers=counted)
    click.echo(f"{time.monotonic() - began:.1f} s; the cache is {images.cache.directory}")


@contextmanager
def _kernel_errors() -> Iterator[None]:
    from tierkv_kernels import KernelError

    try:
        yield
    except KernelError as error:
        raise TierkvError(str(error)) from error


def _archs_of_devices() -> list[str]:
    from tierkv_kernels import BackendUnavailable
    from tierkv_kernels.cuda.driver import Driver

    try:
        driver = Driver()
    except BackendUnavailable as error:
        raise TierkvError(f"{error}; name an architecture: --arch sm_90") from error
    return sorted({driver.device(ordinal).arch for ordinal in range(driver.device_count())})


def _cpu() -> dict[str, Any]:
    from tierkv_kernels import KernelError
    from tierkv_kernels.cpu.library import Library, choose_level

    try:
        library = Library()
        return {"levels": library.levels(), "level": choose_level(library)}
    except KernelError as error:
        return {"error": str(error)}


def _cuda() -> dict[str, Any]:
    from tierkv_kernels import KernelError
    from tierkv_kernels.cuda.driver import Driver

    try:
        driver = Driver()
        devices = [driver.device(ordinal) for ordinal in range(driver.device_count())]
        return {
            "driver": driver.path,
            "version": _version(driver.version),
            "devices": [
                {"name": device.name, "arch": device.arch, "bytes": device.total_bytes}
                for device in devices
            ],
        }
    except KernelError as error:
        return {"error": str(error)}


def _nvrtc() -> dict[str, Any]:
    from tierkv_kernels import KernelError
    from tierkv_kernels.cuda.nvrtc import Nvrtc

    try:
        nvrtc = Nvrtc.find()
        archs = [f"sm_{arch}" for arch in nvrtc.archs()]
        return {"library": nvrtc.path, "version": _version(nvrtc.version), "archs": archs}
    except KernelError as error:
        return {"error": str(error)}


def _cache() -> dict[str, Any]:
    from tierkv_kernels.cuda.cache import KernelCache

    cache = KernelCache()
    sizes = cache.sizes()
    return {
        "directory": str(cache.directory),
        "kernels": len(sizes),
        "bytes": sum(sizes.values()),
        "limit_bytes": cache.limit_bytes,
    }


def _version(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"


def _rows(found: dict[str, dict[str, Any]]) -> list[Row]:
    cpu, cuda, nvrtc, cache = (found[key] for key in ("cpu", "cuda", "nvrtc", "cache"))
    rows: list[Row] = []
    if "error" in cpu:
        rows.append(("CPU kernel", cpu["error"]))
    else:
        rows.append(("CPU kernel", f"{cpu['level']}, of {', '.join(cpu['levels'])}"))
    if "error" in cuda:
        rows.append(("CUDA driver", cuda["error"]))
    else:
        rows.append(("CUDA driver", f"{cuda['version']}, {cuda['driver']}"))
        for ordinal, device in enumerate(cuda["devices"]):
            text = f"{device['name']}, {device['arch']}, {about_bytes(device['bytes'])}"
            rows.append((f"CUDA device {ordinal}", text))
    if "error" in nvrtc:
        rows.append(("CUDA compiler", nvrtc["error"]))
    else:
        rows.append(("CUDA compiler", f"NVRTC {nvrtc['version']}, {nvrtc['library']}"))
    kept = f"{cache['kernels']} kernels, {about_bytes(cache['bytes'])}"
    rows.append(("CUDA kernels", f"{kept}, {cache['directory']}"))
    return rows
