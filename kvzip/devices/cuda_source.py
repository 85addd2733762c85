"""The kernels as NVRTC takes them: one text per ``.cu`` file, headers put in place.

Compiled kernels are kept on disk under a hash of their source: with the headers inside it a changed header is a changed
hash, and nobody has to find them.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from kvzip.devices import build
from kvzip.errors import UnsupportedError

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""IEEE 754 to the letter. No fused multiply-add: it rounds once where the CPU rounds twice."""

BLOCK_THREADS = 128
"""Threads of a block, ``WARPS_PER_BLOCK`` warps in kernels/warp_cuda.h."""

WARPS_PER_BLOCK = BLOCK_THREADS // 32

_INCLUDE = re.compile(r'[ \t]*#include "(\w+\.h)"[ \t]*')
_KERNEL = re.compile(r"(?<!#define )\bKERNEL\((\w+)")
_OTHER_SIDE = "warp_cpu.h"


@functools.cache
def sources() -> dict[str, str]:
    """The text of each ``.cu`` file by name, sorted; every header stands where it is first included."""
    folder = build.kernel_sources()
    return {path.name: _resolve(path, set()) for path in build.kernel_files(folder) if path.suffix == ".cu"}


def file_of(kernel: str) -> str:
    """The ``.cu`` file that defines ``kernel``.

    A macro that defines one version of a kernel per type pastes suffixes to a literal stem: the longest stem counts.

    Raises:
        UnsupportedError: no file defines it.
    """
    stems = {stem: file for file, found in _stems().items() for stem in found if kernel.startswith(stem)}
    if not stems:
        raise UnsupportedError(f"there is no kernel {kernel!r} in {', '.join(sources())}", code="unknown-kernel")
    return stems[max(stems, key=len)]


@functools.cache
def _stems() -> dict[str, set[str]]:
    return {file: set(_KERNEL.findall(text)) for file, text in sources().items()}


def _resolve(path: Path, seen: set[str]) -> str:
    """``path`` with its headers in place. ``#line`` keeps compilers and memory checkers naming the real file."""
    lines = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        include = _INCLUDE.fullmatch(line)
        if include and include[1] != _OTHER_SIDE:
            if include[1] not in seen:
                seen.add(include[1])
                lines.append(_resolve(path.with_name(include[1]), seen))
            lines.append(f'#line {number + 1} "{path.name}"')
        elif line.strip() != "#pragma once":
            lines.append(line)
        else:
            lines.append("")
    return "\n".join(lines) + "\n"
