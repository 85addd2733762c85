"""Which instruction sets this processor has, in the x86-64 psABI's levels."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

from kvzip.devices.build import Target

# What a level adds to the one below, as Linux says it ("abm": lzcnt). AVX-512 without "vl" (Knights Landing) is no v4.
_V3 = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def runnable_levels(target: Target) -> tuple[str, ...]:
    """The levels of ``target`` that this processor can run, from the least to the most able.

    A processor that cannot be asked counts as the least able: all of the architecture run that one.
    """
    if target.arch != "x86_64":
        return target.levels
    flags = _linux_flags() if sys.platform == "linux" else _windows_flags()
    return target.levels[: 1 + (flags >= _V3) + (flags >= _V4)]


def _linux_flags() -> frozenset[str]:
    try:
        # Line by line: making the whole file takes milliseconds on a machine with hundreds of processors.
        with Path("/proc/cpuinfo").open() as lines:
            return next((frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset())
    except OSError:
        return frozenset()


def _windows_flags() -> frozenset[str]:
    if sys.platform != "win32":
        return frozenset()
    # PF_AVX2_INSTRUCTIONS_AVAILABLE, PF_AVX512F_INSTRUCTIONS_AVAILABLE. Windows can tell no more, but whatever runs
    # Windows and has these has the rest of the level.
    present = ctypes.windll.kernel32.IsProcessorFeaturePresent
    if not present(40):
        return frozenset()
    return _V4 if present(41) else _V3


def processor_name() -> str:
    """What the processor calls itself, for reports; the architecture where it cannot be asked."""
    if sys.platform == "linux":
        try:
            with Path("/proc/cpuinfo").open() as lines:
                for line in lines:
                    if line.startswith("model name"):
                        return line.partition(":")[2].strip()
        except OSError:
            pass
    return platform.processor() or platform.machine()
