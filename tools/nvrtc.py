"""NVRTC from the wheel nvidia-cuda-nvrtc alone: kernels to PTX and machine code, no driver and no GPU needed."""

from __future__ import annotations

import ctypes
import functools
import re
import site
import sys
from dataclasses import dataclass
from pathlib import Path

from kvzip.devices import cuda_source

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
"""A100, H100 and H200, B200, RTX 50."""

# 161: a pragma for clang. 177: a function that this file does not use.
OPTIONS = (*cuda_source.OPTIONS, "--ptxas-options=-v", "--diag-suppress=161,177")

_ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """What ptxas says a kernel takes: registers a thread, bytes of shared memory a block, of local memory a thread."""

    registers: int
    shared: int
    local: int
    spilled: int


@dataclass(frozen=True)
class Compiled:
    """One ``.cu`` file for one architecture."""

    ptx: str
    cubin: bytes
    resources: dict[str, Resources]


class NvrtcError(RuntimeError):
    """NVRTC is not installed, or refuses a source; its words are quoted."""


def compile_kernels(file: str, architecture: str) -> Compiled:
    """The kernels of a ``.cu`` file, compiled as the cuda device does, for ``sm_90`` or the like. Thread-safe."""
    return compile_source(cuda_source.sources()[file], file, architecture)


def compile_source(source: str, file: str, architecture: str) -> Compiled:
    """The same for any source without headers; ``compute_90`` and the like give PTX alone, sooner."""
    library = _library()
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), file.encode(), 0, None, None)
    try:
        options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS)]
        status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _result(program, "ProgramLog").decode()
        if status != 0:
            raise NvrtcError(f"{file} does not compile for {architecture}:\n{log}")
        return Compiled(_result(program, "PTX").decode(), _result(program, "CUBIN"), _resources(log))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _resources(log: str) -> dict[str, Resources]:
    return {
        entry["kernel"]: Resources(
            registers=int(entry["registers"]),
            shared=int(entry["shared"] or 0),
            local=int(entry["stack"]),
            spilled=int(entry["stores"]) + int(entry["loads"]),
        )
        for entry in _ENTRY.finditer(log)
    }


def _result(program: ctypes.c_void_p, kind: str) -> bytes:
    library, size = _library(), ctypes.c_size_t()
    getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{kind}")(program, buffer)
    return buffer.raw if kind == "CUBIN" else buffer.value


@functools.cache
def _library() -> ctypes.CDLL:
    folders = [*site.getsitepackages(), *sys.path]
    names = [path for folder in folders for path in sorted(Path(folder).glob("nvidia/**/libnvrtc.so.1[23]"))]
    if not names:
        raise NvrtcError("NVRTC is not here: pip install nvidia-cuda-nvrtc")
    return ctypes.CDLL(str(names[0]))
