"""What card, driver and compiler there are."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys

import torch
from tierkv_kernels.cuda import bindings
from tierkv_kernels.cuda.driver import Driver
from tierkv_kernels.cuda.mapping import granularity
from tierkv_kernels.cuda.nvrtc import Nvrtc

from benchmarks.gpu_check.options import Options
from benchmarks.gpu_check.report import Report

SMI_FIELDS = "name,driver_version,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current"


def run(report: Report, options: Options) -> None:
    """Write down what a reader needs to judge the other parts."""
    report.add("software", python=platform.python_version(), torch=torch.__version__)
    driver = Driver()
    device = driver.device(0)
    report.add(
        "device",
        device=device.name,
        arch=device.arch,
        memory_bytes=device.total_bytes,
        multiprocessors=device.attribute(bindings.MULTIPROCESSORS),
        l2_bytes=device.attribute(bindings.L2_CACHE_BYTES),
        cuda=".".join(map(str, driver.version)),
        devices=driver.device_count(),
    )
    with report.trying("memory that processes can share"):
        report.add("memory that processes can share", granularity_bytes=granularity(device))
    with report.trying("compiler"):
        nvrtc = Nvrtc.find()
        report.add("compiler", nvrtc=".".join(map(str, nvrtc.version)), path=nvrtc.path)
    if shutil.which("nvidia-smi") and options.device == "cuda":
        command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        report.add("nvidia-smi", said=said.stdout.strip() or said.stderr.strip())
    report.add("interpreter", path=sys.executable)
