"""The launcher end to end: plans, real cubins, the stand-in driver, kernels in the simulator."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import CASES, FP8, Batch, Shape, check_output, make_batch
from tierkv_kernels import InvalidInput, Plan, backends, plan, write_kv
from tierkv_kernels.call import Call, check_call
from tierkv_kernels.cuda import bindings, variants
from tierkv_kernels.cuda.backend import CudaBackend
from tierkv_kernels.cuda.cache import KernelCache
from tierkv_kernels.cuda.driver import Context, Device, Driver
from tierkv_kernels.cuda.images import Images
from tierkv_kernels.cuda.nvrtc import Nvrtc
from tierkv_kernels.errors import BackendUnavailable, CompileError, DriverError

from tests.kernels.sim.build import library

DECODE = Shape(
    lengths=((70, 1), (33, 1), (0, 1), (129, 1)), head_dim=64, group=4, dtype=torch.bfloat16
)
MIXED = Shape(
    lengths=((70, 1), (33, 9), (0, 0), (12, 12), (2, 5), (129, 40)),
    head_dim=64,
    dtype=torch.bfloat16,
)
FLOAT8 = dataclasses.replace(MIXED, head_dim=80, dtype=torch.float16, kv_dtype=FP8)
VARIANTS = [
    variant
    for bf16, kv_fp8, head_dim in ((True, False, 64), (False, True, 80))
    for variant in (
        variants.merge(bf16=bf16, head_dim=head_dim),
        *(
            variants.attention(bf16=bf16, kv_fp8=kv_fp8, head_dim=head_dim, row_warps=row_warps)
            for row_warps in (1, 4)
        ),
        variants.write_kv(bf16=bf16, kv_fp8=kv_fp8, head_dim=head_dim),
    )
]


@pytest.fixture(scope="module")
def simulated(standin_driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of simulated kernels that the stand-in runs; it needs the same compiler."""
    assert standin_driver.exists()
    directory = tmp_path_factory.mktemp("simulated")
    for variant in VARIANTS:
        (directory / f"{variant.name}.so").symlink_to(library(variant))
    return directory


@pytest.fixture(scope="module")
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def images(cache_directory: Path) -> Images:
    return Images(Nvrtc.find(), KernelCache(cache_directory))


@pytest.fixture
def backend(
    driver: Driver, simulated: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CudaBackend]:
    monkeypatch.setenv("TIERKV_STANDIN_KERNELS", str(simulated))
    backend = CudaBackend(driver, images)
    yield backend
    backend.close()


def call_of(batch: Batch, work: Plan | None = None, **changes: Any) -> Call:
    options = {
        "scale": None,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "out": None,
        "return_lse": True,
        **batch.options,
        **changes,
    }
    return check_call(*batch.tensors, plan=work, **options)


def run(backend: CudaBackend, batch: Batch, work: Plan | None = None, **changes: Any) -> Call:
    call = call_of(batch, work, **changes)
    backend.run(call)
    check_output(batch, call.out, call.lse)
    return call


@pytest.mark.parametrize("case", CASES)
def test_each_case(case: str, backend: CudaBackend) -> None:
    shape = dataclasses.replace(MIXED, **CASES[case])
    work = plan(shape.seq_lens, shape.q_lens, **shape.geometry, **shape.mask, split=32)
    run(backend, make_batch(shape), work)


@pytest.mark.parametrize("split", [0, 32])
@pytest.mark.parametrize("shape", [DECODE, MIXED, FLOAT8])
def test_two_layers_with_one_plan(shape: Shape, split: int, backend: CudaBackend) -> None:
    work = plan(shape.seq_lens, shape.q_lens, **shape.geometry, split=split)
    for layer, return_lse in enumerate((True, False)):
        batch = make_batch(dataclasses.replace(shape, seed=layer))
        run(backend, batch, work, return_lse=return_lse)


def test_a_shared_prefix(backend: CudaBackend) -> None:
    shape = dataclasses.replace(MIXED, lengths=((70, 1), (95, 3), (64, 2)), shared_tokens=48)
    batch = make_batch(shape)
    work = plan(shape.seq_lens, shape.q_lens, **shape.geometry, shared_prefix=[(0, 3, 48)])
    run(backend, batch, work)


def test_a_plan_serves_tensors_that_lie_differently(backend: CudaBackend) -> None:
    work = plan(MIXED.seq_lens, MIXED.q_lens, **MIXED.geometry, split=64)
    for layout in ("nhd", "pool hnd", "hnd", "nhd"):
        batch = make_batch(dataclasses.replace(MIXED, layout=layout))
        run(backend, batch, work)
        strided = torch.cat((batch.q, batch.q), dim=1)[:, 4:]
        room = torch.full((len(batch.q), 6, 64), torch.nan, dtype=batch.q.dtype)
        run(backend, dataclasses.replace(batch, q=strided), work, out=room[:, 1:5])
        assert room[:, 0].isnan().all()
        assert room[:, 5].isnan().all()


def test_strides_count_only_where_there_are_several(backend: CudaBackend) -> None:
    shape = dataclasses.replace(DECODE, lengths=((8, 1),))
    batch = make_batch(shape)
    work = plan(shape.seq_lens, shape.q_lens, **shape.geometry)
    used = int(batch.block_table[0, 0])
    k_cache = torch.zeros(3 * 1025, dtype=batch.q.dtype).as_strided(
        (3, 8, 2, 64), (1025, 128, 64, 1)
    )
    k_cache[0] = batch.k_cache[used]
    v_cache = torch.zeros_like(batch.v_cache)
    v_cache[0] = batch.v_cache[used]
    table = torch.zeros_like(batch.block_table)
    one = dataclasses.replace(batch, k_cache=k_cache[:1], v_cache=v_cache[:1], block_table=table)
    run(backend, one, work)
    with pytest.raises(InvalidInput, match=r"k_cache: got strides \(1025, "):
        backend.run(
            call_of(dataclasses.replace(one, k_cache=k_cache[:2], v_cache=v_cache[:2]), work)
        )


def test_a_plan_with_nothing_to_do(backend: CudaBackend) -> None:
    batch = make_batch(dataclasses.replace(DECODE, lengths=((9, 0), (0, 0))))
    assert run(backend, batch).out.shape == (0, 8, 64)


def test_a_thread_that_never_saw_the_device(backend: CudaBackend) -> None:
    batch, done = make_batch(DECODE), []
    thread = threading.Thread(target=lambda: done.append(run(backend, batch)))
    thread.start()
    thread.join()
    assert done


def test_threads_share_a_backend(backend: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    load = Context.module

    def counting(context: Context, image: bytes) -> Any:
        loaded.append(image)
        return load(context, image)

    monkeypatch.setattr(Context, "module", counting)
    batches = [make_batch(dataclasses.replace(DECODE, seed=seed)) for seed in range(4)]
    with ThreadPoolExecutor(len(batches)) as pool:
        calls = list(pool.map(lambda batch: run(backend, batch), batches))
    assert len(calls) == len(batches)
    assert len(loaded) == 1


def padded(cache: torch.Tensor) -> torch.Tensor:
    """The same numbers in rows that are two bytes too long."""
    room = torch.empty(*cache.shape[:-1], cache.shape[-1] + 1, dtype=cache.dtype)
    room[..., :-1] = cache
    return room[..., :-1]


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers two bytes after a multiple of 16."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    room[1:] = tensor.flatten()
    return room[1:].view(tensor.shape)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("q: got address 0x", lambda batch: {"q": shifted(batch.q)}),
        ("q: got strides (260, 65, 1) of 2 bytes", lambda batch: {"q": padded(batch.q)}),
        ("k_cache: got address 0x", lambda batch: {"k_cache": shifted(batch.k_cache)}),
        ("k_cache: got strides", lambda batch: {"k_cache": padded(batch.k_cache)}),
        ("v_cache: got address 0x", lambda batch: {"v_cache": shifted(batch.v_cache)}),
        ("v_cache: got strides", lambda batch: {"v_cache": padded(batch.v_cache)}),
        (
            "block_table: got strides (1, 6), the CUDA kernel wants a contiguous last",
            lambda batch: {"block_table": batch.block_table.T.contiguous().T},
        ),
    ],
)
def test_bad_tensors_are_named_before_any_launch(
    message: str, change: Any, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(MIXED)
    work = plan(MIXED.seq_lens, MIXED.q_lens, **MIXED.geometry)
    run(backend, batch, work)
    monkeypatch.setenv("TIERKV_STANDIN_FAIL", "cuLaunchKernel=700")
    bad = dataclasses.replace(batch, **change(batch))
    for with_plan in (work, None):  # checked before, and for the first time
        with pytest.raises(InvalidInput) as caught:
            backend.run(call_of(bad, with_plan))
        assert message in str(caught.value)
    with pytest.raises(InvalidInput, match=r"out: got address 0x.* wants a multiple of 16"):
        backend.run(call_of(batch, work, out=shifted(batch.q)))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("q: got torch.float32, the CUDA kernel wants", {"dtype": torch.float32}),
        ("q: got head_dim 72, the CUDA kernel wants one of 16, 32, 48,", {"head_dim": 72}),
        ("q: got head_dim 144", {"head_dim": 144}),
        ("q: got head_dim 288", {"head_dim": 288}),
    ],
)
def test_what_the_kernel_does_not_do_is_named(
    message: str, change: dict[str, Any], backend: CudaBackend
) -> None:
    batch = make_batch(dataclasses.replace(DECODE, **change))
    with pytest.raises(InvalidInput) as caught:
        backend.run(call_of(batch))
    assert message in str(caught.value)


def test_a_block_table_on_the_host_is_checked(backend: CudaBackend) -> None:
    batch = make_batch(MIXED)
    batch.block_table[1, 2] = 1_000_000
    with pytest.raises(InvalidInput, match=r"block_table: got 1000000 at \[1, 2\], want a block"):
        backend.run(call_of(batch))


def test_cpu_tensors_are_refused_where_the_device_cannot_read_them(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    attribute = Device.attribute

    def lacking(device: Device, which: int) -> int:
        return 0 if which == bindings.PAGEABLE_MEMORY_ACCESS else attribute(device, which)

    monkeypatch.setattr(Device, "attribute", lacking)
    with pytest.raises(InvalidInput, match="q: got device cpu, want cuda"):
        backend.run(call_of(make_batch(DECODE)))


@pytest.mark.parametrize(
    "call", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel"]
)
def test_failures_of_the_driver_are_named(
    call: str, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_STANDIN_FAIL", f"{call}=2")
    batch = make_batch(FLOAT8)
    with pytest.raises(DriverError, match=f"{call}: CUDA_ERROR_OUT_OF_MEMORY"):
        backend.run(call_of(batch))
    monkeypatch.delenv("TIERKV_STANDIN_FAIL")
    run(backend, batch)


@pytest.mark.parametrize("arch", ["8.0", "9.0", "12.0", "99.0"])
def test_kernels_are_made_for_the_device(
    arch: str, backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_STANDIN_ARCH", arch)  # no compiler knows the last one: PTX
    run(backend, make_batch(DECODE))


def test_what_is_in_the_cache_is_not_compiled(
    backend: CudaBackend, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    compile_source = Nvrtc.compile

    def counting(nvrtc: Nvrtc, *arguments: Any) -> Any:
        compiled.append(arguments)
        return compile_source(nvrtc, *arguments)

    run(backend, make_batch(DECODE))
    backend.close()
    monkeypatch.setattr(Nvrtc, "compile", counting)
    run(backend, make_batch(DECODE))
    assert not compiled
    backend.close()
    for path in images.cache.sizes():
        path.write_bytes(path.read_bytes()[:-1])
    run(backend, make_batch(DECODE))
    assert len(compiled) == 1


def test_a_cache_that_cannot_be_written_is_no_failure(
    driver: Driver,
    simulated: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TIERKV_STANDIN_KERNELS", str(simulated))
    (tmp_path / "file").touch()
    backend = CudaBackend(driver, Images(Nvrtc.find(), KernelCache(tmp_path / "file")))
    run(backend, make_batch(DECODE))
    backend.close()
    assert "compiled kernels are not kept" in caplog.text


def test_another_source_is_another_kernel(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = VARIANTS[1]
    keys = {images.key(variant, "sm_90"), images.key(variant, "sm_80")}
    keys.add(images.key(VARIANTS[2], "sm_90"))
    monkeypatch.setattr(Nvrtc, "version", (13, 99))
    keys.add(images.key(variant, "sm_90"))
    texts = {"paged_attention.cu": "a", "dev.cuh": "b"}
    for name in ("paged_attention.cu", "dev.cuh"):
        monkeypatch.setattr("tierkv_kernels.cuda.images._texts", lambda: texts)
        keys.add(images.key(variant, "sm_90"))
        texts[name] += "c"
    keys.add(images.key(variant, "sm_90"))
    assert len(keys) == 7


def test_a_kernel_that_does_not_compile_says_so(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"paged_attention.cu": "nonsense"}
    monkeypatch.setattr("tierkv_kernels.cuda.images._texts", lambda: texts)
    with pytest.raises(CompileError, match=r"(?s)paged_attention\.cu for sm_90 .*nonsense"):
        images.get(VARIANTS[1], "sm_90")


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim"),
    [(torch.bfloat16, torch.bfloat16, 64), (torch.float16, FP8, 80)],
)
def test_new_tokens_are_stored_as_torch_stores_them(
    backend: CudaBackend,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
) -> None:
    monkeypatch.setattr("tierkv_kernels.writing.cuda_backend", lambda: backend)
    caches = {}
    for name in ("torch", "cuda"):
        generator = torch.Generator().manual_seed(3)
        k, v = (torch.randn(5, 2, head_dim, generator=generator).to(dtype) for _ in range(2))
        pool = torch.zeros(4, 2, 2, 3, head_dim).to(kv_dtype)  # HND
        k_cache, v_cache = pool[:, 0].transpose(1, 2), pool[:, 1].transpose(1, 2)
        slots = torch.tensor([11, 0, -1, 4, 5])
        options = {"k_scale": 2.0, "v_scale": 0.25} if kv_dtype == FP8 else {}
        write_kv(k, v, slots, k_cache, v_cache, **options, backend=name)
        caches[name] = pool.view(torch.uint8)
    assert torch.equal(caches["cuda"], caches["torch"])
    with pytest.raises(InvalidInput, match=r"k: got torch\.float32, the CUDA"):
        write_kv(*[t.float() for t in (k, v)], slots, *[k_cache.float()] * 2, backend="cuda")


def test_a_process_without_cuda_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_LIBCUDA", "/nowhere/libcuda.so.1")
    find = backends.cuda_backend_if_there
    find.cache_clear()
    with pytest.warns(UserWarning, match="attention on CUDA runs on torch, slower: no CUDA driver"):
        assert find(torch.device("cuda:0")) is None
    assert find(torch.device("cuda:0")) is None
    find.cache_clear()


def test_a_device_that_is_too_old_is_left_to_torch(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "cuda_backend", lambda: backend)
    monkeypatch.setenv("TIERKV_STANDIN_ARCH", "7.5")
    here, find = torch.device("cpu"), backends.cuda_backend_if_there
    find.cache_clear()
    with pytest.warns(UserWarning, match=r"on torch, slower: .* is sm_75, the kernels need sm_80"):
        assert find(here) is None
    with pytest.raises(BackendUnavailable, match="sm_75"):
        run(backend, make_batch(DECODE))
    find.cache_clear()
    monkeypatch.setenv("TIERKV_STANDIN_ARCH", "8.0")
    assert find(here) is backend
    find.cache_clear()


def test_workers_of_a_device(backend: CudaBackend) -> None:
    workers = backend.num_workers(torch.device("cpu"), 64)
    assert workers % 132 == 0
    assert 132 <= workers <= 132 * 16


def test_a_process_of_its_own_picks_all_by_itself(
    standin_driver: Path, simulated: Path, cache_directory: Path
) -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import torch\n"
        "from attention_cases import Shape, check_output, make_batch\n"
        "from tierkv_kernels import paged_attention\n"
        "shape = Shape(lengths=((70, 1), (33, 9)), head_dim=64, dtype=torch.bfloat16)\n"
        "batch = make_batch(shape)\n"
        "out, lse = paged_attention(\n"
        "    *batch.tensors, **batch.options, return_lse=True, backend='cuda')\n"
        "check_output(batch, out, lse)\n"
    )
    environment = {
        "PATH": "/usr/bin:/bin",
        "TIERKV_LIBCUDA": str(standin_driver),
        "TIERKV_STANDIN_KERNELS": str(simulated),
        "TIERKV_KERNEL_CACHE": str(cache_directory),
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
