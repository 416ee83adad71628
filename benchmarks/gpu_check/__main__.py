"""``python -m benchmarks.gpu_check``: all parts, each in a process of its own.

Exit status: 0 all checks hold, 1 one does not or a part died, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.report import Finding, Report, read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LIMIT_S = 350.0
LOOK_S = 100.0
"""How long torch may look for a GPU: on a new machine it is read from a disk first."""

PARTS = {
    "machine": ("what there is", 40),
    "memory": ("memory that processes share", 60),
    "kernels": ("are the kernels right", 100),
    "decode": ("how fast is decode", 110),
    "peers": ("and others", 60),
    "daemon": ("a whole daemon", 60),
}
"""What each is for, and its longest time, seconds."""

EXIT_NO_GPU = 2


def main() -> int:
    """Run what was asked for."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; repeatable")
    parser.add_argument("--out", type=Path, help="result file; by default in benchmarks/results")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test this program")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: the driver is the stand-in of kernels/sim",
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        return _part(options)
    if options.device == "cuda" and (missing := _no_gpu()):
        print(f"gpu-check needs a GPU: {missing}", file=sys.stderr)
        return EXIT_NO_GPU
    return _all(options, began)


def _no_gpu() -> str:
    """Why nothing can run; empty if it can. In a process of its own: torch may hang or crash."""
    command = "import torch; print(torch.cuda.is_available(), torch.version.cuda)"
    try:
        said = subprocess.run(
            [sys.executable, "-c", command],
            capture_output=True,
            text=True,
            timeout=LOOK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"torch did not find one in {LOOK_S:.0f} s"
    if said.returncode:
        return f"torch cannot be imported: {said.stderr.strip()[-300:]}"
    available, cuda = said.stdout.split()
    if available == "True":
        return ""
    return "torch was built without CUDA" if cuda == "None" else "torch sees no CUDA device"


def _all(options: argparse.Namespace, began: float) -> int:
    parts: dict[str, list[Finding]] = {}
    for name in options.only or PARTS:
        what, longest_s = PARTS[name]
        print(f"\n{name}: {what}", flush=True)
        left_s = LIMIT_S - (time.monotonic() - began)
        parts[name] = _run_part(name, min(longest_s, max(left_s, 1.0)), options)
    took_s = time.monotonic() - began
    findings = [finding for part in parts.values() for finding in part]
    bad = [one["name"] for one in findings if "failed" in one or one.get("ok") is False]
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "took_s": round(took_s, 1),
        "tiny": options.tiny,
        "device": options.device,
        "parts": parts,
        "not_held": bad,
    }
    path = options.out or RESULTS / f"gpu-{_device_word(parts)}-{result['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{path}, {took_s:.0f} s, " + (f"not held: {', '.join(bad)}" if bad else "all hold"))
    return int(bool(bad))


def _run_part(name: str, longest_s: float, options: argparse.Namespace) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", name]
        command += ["--lines", str(lines), "--device", options.device]
        command += ["--tiny"] if options.tiny else []
        paths = [str(ROOT / part) for part in ("", "wal", "kernels")]
        given = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        began = time.monotonic()
        part = subprocess.Popen(command, cwd=ROOT, env=given, start_new_session=True)
        try:
            status = part.wait(longest_s)
            died = f"the part ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            died = f"the part took more than {longest_s:.0f} s"
        finally:
            # With all that it has started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(part.pid, signal.SIGKILL)
            part.wait()
        report = Report(lines)
        if died:
            report.add(f"{name}: to its end", failed=died)
        report.add(f"{name}: took", took_s=round(time.monotonic() - began, 1))
        return read(lines)


def _part(options: argparse.Namespace) -> int:
    """In the child: one part, whatever becomes of the others."""
    from benchmarks.gpu_check.options import Options  # imports torch, which the parent must not

    part: Any = importlib.import_module(f"benchmarks.gpu_check.{options.part}")
    report = Report(options.lines)
    with report.trying(f"{options.part}: to its end"):
        part.run(report, Options(options.device, options.tiny))
    return 0


def _device_word(parts: dict[str, list[Finding]]) -> str:
    names = [one["device"] for one in parts.get("machine", []) if one["name"] == "device"]
    return re.sub(r"[^a-z0-9]+", "-", (names or ["unknown"])[0].lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
