"""NVRTC, the compiler of CUDA C++ that is a library: where it is, and how to use it.

Every CUDA build of torch brings it along; the wheel nvidia-cuda-nvrtc has it alone.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv_kernels.errors import BackendUnavailable, CompileError

VARIABLE = "TIERKV_LIBNVRTC"
"""Environment variable: the path of the library, instead of a search."""

MAJORS = (13, 12)
"""Versions that are known to work, the newest first."""

OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
"""Of every compilation: there is no host code, and the log tells registers and spills."""

_PROGRAM = c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "nvrtcVersion": (POINTER(c_int), POINTER(c_int)),
    "nvrtcGetNumSupportedArchs": (POINTER(c_int),),
    "nvrtcGetSupportedArchs": (POINTER(c_int),),
    "nvrtcCreateProgram": (
        POINTER(_PROGRAM),
        c_char_p,
        c_char_p,
        c_int,
        POINTER(c_char_p),
        POINTER(c_char_p),
    ),
    "nvrtcDestroyProgram": (POINTER(_PROGRAM),),
    "nvrtcCompileProgram": (_PROGRAM, c_int, POINTER(c_char_p)),
    "nvrtcGetProgramLogSize": (_PROGRAM, POINTER(c_size_t)),
    "nvrtcGetProgramLog": (_PROGRAM, c_char_p),
    "nvrtcGetCUBINSize": (_PROGRAM, POINTER(c_size_t)),
    "nvrtcGetCUBIN": (_PROGRAM, c_char_p),
    "nvrtcGetPTXSize": (_PROGRAM, POINTER(c_size_t)),
    "nvrtcGetPTX": (_PROGRAM, c_char_p),
}
"""What each function takes, as in nvrtc.h; all return an nvrtcResult, 0 for success."""


@dataclass(frozen=True, slots=True)
class Source:
    """A translation unit and the files that it includes by name."""

    name: str
    text: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel takes of a multiprocessor, as the assembler tells it."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """image: a cubin, or PTX if the compiler does not know the device. log: the compiler's."""

    image: bytes
    log: str

    def usage(self) -> dict[str, Usage]:
        """By kernel; nothing for PTX."""
        return _usage(self.log)


def candidates(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Where the library may be, best first: what to open, which may not exist.

    $TIERKV_LIBNVRTC alone, if set. Else that of the torch in this process, then the wheels', then
    that of an installed toolkit, then the system's.
    """
    if asked := environ.get(VARIABLE):
        yield asked
        return
    majors = list(MAJORS)
    cuda_of_torch = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    if cuda_of_torch:
        # What a newer one makes may be too new for the driver that goes with this torch.
        majors.insert(0, int(cuda_of_torch.partition(".")[0]))
        yield f"libnvrtc.so.{majors[0]}"
    for major in dict.fromkeys(majors):
        name = f"libnvrtc.so.{major}"
        for folder in sys.path:
            yield from sorted(map(str, Path(folder, "nvidia").glob(f"*/lib/{name}")))
        for variable in ("CUDA_HOME", "CUDA_PATH"):
            if home := environ.get(variable):
                yield str(Path(home, "lib64", name))
        yield name


class Nvrtc:
    """The compiler."""

    def __init__(self, path: str) -> None:
        """Raises BackendUnavailable."""
        self.path = path
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise BackendUnavailable(f"cannot load NVRTC: {error}") from error
        for name, arguments in _SIGNATURES.items():
            if not hasattr(self._library, name):
                raise BackendUnavailable(f"{path} is no NVRTC, or too old: it lacks {name}")
            getattr(self._library, name).argtypes = arguments
        self._library.nvrtcGetErrorString.restype = c_char_p

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> Nvrtc:
        """The first of ``candidates`` that can be loaded. Raises BackendUnavailable."""
        for path in candidates(environ):
            try:
                return cls(path)
            except BackendUnavailable:
                if environ.get(VARIABLE):
                    raise
        raise BackendUnavailable(
            "no NVRTC, the compiler of CUDA kernels: a CUDA build of torch has it, or do "
            "`pip install nvidia-cuda-nvrtc`, or name the library in $" + VARIABLE
        )

    @property
    def version(self) -> tuple[int, int]:
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        return major.value, minor.value

    def archs(self) -> list[int]:
        """Compute capabilities that it has an assembler for, such as 90 for 9.0."""
        count = c_int()
        self._call("nvrtcGetNumSupportedArchs", byref(count))
        archs = (c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        return list(archs)

    def compile(self, source: Source, arch: str, options: Sequence[str] = ()) -> Compiled:
        """Compile for an arch such as "sm_90". Raises CompileError, with the log.

        For one newer than the compiler, PTX of the newest that it knows, for the driver to finish.
        """
        target = self._target(arch)
        program = _PROGRAM()
        names, texts = _strings(source.headers), _strings(source.headers.values())
        self._call(
            "nvrtcCreateProgram",
            byref(program),
            source.text.encode(),
            source.name.encode(),
            len(names),
            texts,
            names,
        )
        try:
            given = _strings((f"--gpu-architecture={target}", *OPTIONS, *options))
            code = self._library.nvrtcCompileProgram(program, len(given), given)
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if code:
                raise CompileError(f"{source.name} for {target} by {self.path}: {log.strip()}")
            is_cubin = target.startswith("sm_")
            return Compiled(self._text(program, "CUBIN" if is_cubin else "PTX"), log)
        finally:
            self._call("nvrtcDestroyProgram", byref(program))

    def _target(self, arch: str) -> str:
        if not re.fullmatch(r"sm_\d+[af]?", arch):
            raise CompileError(f"arch: got {arch!r}, want one such as sm_90")
        wanted, known = int(re.sub(r"\D", "", arch)), self.archs()
        if wanted in known:
            return arch
        older = [number for number in known if number < wanted]
        if not older:
            raise CompileError(f"{arch} is too old for NVRTC {self.version}: it knows {known}")
        return f"compute_{max(older)}"

    def _text(self, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        self._call(f"nvrtcGet{what}Size", program, byref(size))
        room = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, room)
        return room.raw

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise CompileError(f"{name}: {self._library.nvrtcGetErrorString(code).decode()}")


def _strings(texts: Any) -> Any:
    encoded = [text.encode() for text in texts]
    return (c_char_p * len(encoded))(*encoded)


def _usage(log: str) -> dict[str, Usage]:
    found = {}
    for part in log.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]

        def number(pattern: str, text: str = part) -> int:
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        found[name] = Usage(
            registers=number(r"Used (\d+) registers"),
            stack_bytes=number(r"(\d+) bytes stack frame"),
            spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            static_shared_bytes=number(r"(\d+) bytes smem"),
        )
    return found
