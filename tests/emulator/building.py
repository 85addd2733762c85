"""Compiles emulated kernels with the clang inside ziglang, and keeps what it compiled by the hash of what went in."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvzip.devices import build

HERE = Path(__file__).parent
KEEP_SECONDS = 7 * 24 * 3600
LARGE = 2 << 20
"""Characters of a translation from which on optimizing it takes longer than the tests would."""

_FLAGS = (
    *("-std=c++17", "-O1", "-g0", "-fPIC", "-ffreestanding", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"),
    # As kernels are compiled elsewhere; and no two accesses made one, whose alignment CUDA would not ask for.
    *("-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-fno-vectorize", "-fno-slp-vectorize"),
    *("-fno-sanitize=all", "-fno-stack-protector", f"-I{HERE}", f"-ffile-prefix-map={HERE}=."),
)

_EXPORT = """
UNCHECKED void enter_{0}(void** arguments) {{ emulator::call({0}, arguments); }}
UNCHECKED EXPORTED void describe_{0}(emulator::Kernel* kernel) {{ emulator::describe(kernel, enter_{0}, {0}); }}
""".replace("UNCHECKED", '__attribute__((no_sanitize("coverage")))').replace(
    "EXPORTED", 'extern "C" __attribute__((visibility("default")))'
)

CHECKED = tuple(
    word for flag in ("-type=3", "-trace-loads", "-trace-stores") for word in ("-Xclang", f"-fsanitize-coverage{flag}")
)
"""Every load and store that is left after optimization calls the emulator first."""


def from_cuda(source: str, name: str) -> Path:
    """A library of the kernels in CUDA C++ ``source``, checked at every access."""
    text = _preprocess(f'#define KVZIP_EMULATED 1\n#include "cuda.h"\n{source}', name)
    kernels = re.findall(r'extern "C" __attribute__\(\(noinline\)\)\s+void\s+(\w+)\s*\(', text)
    return _library(text + "".join(map(_EXPORT.format, kernels)), name, CHECKED)


def from_translation(text: str, name: str) -> Path:
    """A library of kernels that are written for the emulator, in C++ on ``ptx.h``."""
    code = _preprocess(text, name)
    return _library(code, name, ("-O0",) if len(code) > LARGE else ())


def _library(text: str, name: str, flags: Sequence[str] = ()) -> Path:
    runtime = _compiled(_preprocess('#include "runtime.cpp"', "runtime"), "runtime", ".o", ("-c",))
    link = ("-shared", "-nostdlib", "-rtlib=compiler-rt", "-Wl,--no-undefined", str(runtime))
    return _compiled(text, name, ".so", (*flags, *link))


def _preprocess(text: str, name: str) -> str:
    """Every macro and header replaced: what is left decides alone whether something must be compiled anew."""
    return _zig(name, "-x", "c++", "-E", "-P", "-", text=text)


def _compiled(text: str, name: str, suffix: str, flags: Sequence[str]) -> Path:
    def compile_to(path: Path) -> None:
        _zig(name, "-x", "c++", "-", "-x", "none", *flags, "-o", str(path), text=text)

    return kept(name, "\0".join((text, *_FLAGS, *flags)), suffix, compile_to)


def kept(name: str, key: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """A file that ``make`` writes unless it is there already: made once for each ``key``, by one process of several."""
    folder = build.NATIVE / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}{suffix}"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _remove_old(folder)
            unfinished = path.with_suffix(".new")
            make(unfinished)
            unfinished.replace(path)
    os.utime(path)
    return path


def _zig(name: str, *arguments: str, text: str) -> str:
    target = f"{build.Target.host().arch}-linux"
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, *_FLAGS, *arguments]
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise build.BuildError(f"{name} does not compile for the emulator:\n{result.stderr[-4000:]}")
    return result.stdout


def _remove_old(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process has finished or removed it
            if time.time() - path.stat().st_mtime > KEEP_SECONDS:
                path.unlink()
