"""Kernels to machine code by NVRTC, kept on disk by the hash of what went in.

CuPy could compile them, too, but always adds ``-ftz=true``: numbers below 2^-126 would be zero on the GPU alone.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

from kvzip.devices import cuda_source

NVRTC = "cupy_backends.cuda.libs.nvrtc"
"""CuPy's binding to the NVRTC that it found."""


class CompileError(RuntimeError):
    """NVRTC refuses a source; its words are quoted."""


def compiled(file: str, capability: int) -> Path:
    """The kernels of a ``.cu`` file for GPUs of a compute capability (90 for 9.0): a cubin, or PTX for the driver.

    PTX is for a GPU that is newer than NVRTC. Any number of processes may call this at once.

    Raises:
        CompileError: the source does not compile, or there is no NVRTC.
    """
    nvrtc = importlib.import_module(NVRTC)
    source = cuda_source.sources()[file]
    known = [each for each in nvrtc.getSupportedArchs() if each <= capability]
    if not known:
        raise CompileError(f"NVRTC {_version(nvrtc)} knows no GPU as old as compute capability {capability / 10:.1f}")
    target, suffix = ("sm", ".cubin") if max(known) == capability else ("compute", ".ptx")
    options = (f"--gpu-architecture={target}_{max(known)}", *cuda_source.OPTIONS)
    digest = hashlib.sha256("\0".join((_version(nvrtc), *options, source)).encode()).hexdigest()[:20]
    path = cache_folder() / f"{Path(file).stem}-{target}_{max(known)}-{digest}{suffix}"
    if not path.exists():
        _write(path, _compile(nvrtc, source, file, options, suffix))
    return path


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``KVZIP_CACHE_DIR``, or kvzip's folder in the user's cache; made if missing.

    A folder for this process alone if nothing can be written there.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "kvzip"
    folder = Path(os.environ.get("KVZIP_CACHE_DIR") or default)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="kvzip-"))


def _compile(nvrtc: Any, source: str, file: str, options: tuple[str, ...], suffix: str) -> bytes:
    program = nvrtc.createProgram(source, file, (), ())
    try:
        nvrtc.compileProgram(program, options)
        code: bytes = nvrtc.getCUBIN(program) if suffix == ".cubin" else nvrtc.getPTX(program)
        return code
    except nvrtc.NVRTCError as error:
        raise CompileError(f"{error}: {nvrtc.getProgramLog(program).strip()}") from error
    finally:
        nvrtc.destroyProgram(program)


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: another process may be about to read it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    Path(name).replace(path)


def _version(nvrtc: Any) -> str:
    return ".".join(map(str, nvrtc.getVersion()))
