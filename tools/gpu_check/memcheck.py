"""Damaged sections once more, under compute-sanitizer, which sees what is read or written beyond an allocation."""

from __future__ import annotations

from typing import Any

from kvzip.devices.cuda import Cuda
from tools.gpu_check import equality
from tools.gpu_check.check import Check


def memcheck(check: Check) -> None:
    """Fewer trials, on a GPU whose every array is an allocation of its own."""
    check.quick = True
    unpool(check.gpu)
    equality.hostile(check)


def unpool(gpu: Cuda) -> None:
    """Let a device allocate without its pool from now on, and each array by itself."""
    memory = gpu.xp.cuda.memory

    def take(nbytes: int) -> Any:
        return memory.MemoryPointer(memory.Memory(nbytes), 0)

    gpu._take = take  # type: ignore[method-assign]
    gpu.to_device_all = lambda arrays: [gpu.to_device(array) for array in arrays]  # type: ignore[method-assign]
