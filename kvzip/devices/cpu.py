"""The CPU as a device: a native library by ctypes, a launch split over threads, numpy arrays."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from kvzip.devices import build
from kvzip.devices.base import Array, Device
from kvzip.devices.levels import runnable_levels
from kvzip.errors import UnsupportedError, UsageError

PIECES_PER_THREAD = 4
"""Warps differ in work and cores in speed: with a few pieces each, the threads end at about the same time."""

_SCALARS: dict[type, Callable[[Any], Any]] = {
    np.int32: ctypes.c_int32,
    np.uint32: ctypes.c_uint32,
    np.int64: ctypes.c_int64,
    np.uint64: ctypes.c_uint64,
    np.float32: ctypes.c_float,
}


class Cpu(Device):
    """All cores, or ``threads`` of them.

    Any number of threads may launch at once, and a launch releases the GIL.

    Args:
        threads: how many threads a launch may use, the calling one included; all that this process may run on if None.
        level: an instruction-set level such as ``x86_64_v3``; if None, ``KVZIP_CPU`` of the environment, else the best.

    Raises:
        UsageError: ``threads`` is below 1, or there is no such level.
        UnsupportedError: this processor cannot run that level, or the library is missing and cannot be built.
    """

    name = "cpu"
    xp = np

    def __init__(self, threads: int | None = None, level: str | None = None) -> None:
        if threads is not None and threads < 1:
            raise UsageError(f"threads must be at least 1, got {threads}", code="bad-threads")
        self.threads = threads or available_cores()
        self.level = _choose_level(level or os.environ.get("KVZIP_CPU") or None)
        self._library = _load(self.level)
        self._kernels: dict[str, Any] = {}

    def __str__(self) -> str:
        return f"cpu, {self.level}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def launch(self, kernel: str, warps: int, *arguments: Array | int | float) -> None:
        """Run ``kernel`` for warps ``0..warps-1``; returns when all are done.

        Raises:
            UnsupportedError: the library has no such kernel.
            TypeError: an argument is neither an array nor a numpy scalar of a type that kernels take.
            ValueError: an array is not C-contiguous.
        """
        function = self._kernels.get(kernel) or self._find(kernel)
        values = [_convert(argument, kernel, at) for at, argument in enumerate(arguments)]
        # Kernels keep two warps in flight: an odd piece would end with one alone.
        step = 2 * -(-warps // (2 * PIECES_PER_THREAD * self.threads)) if self.threads > 1 else warps
        if warps <= step:
            function(0, warps, *values)
            return
        pieces = iter(range(0, warps, step))

        def work() -> None:
            for first in pieces:
                function(first, min(first + step, warps), *values)

        helpers = min(self.threads, -(-warps // step)) - 1
        futures = [_pool(self.threads - 1).submit(work) for _ in range(helpers)]
        try:
            work()
        finally:
            # Even an interrupt waits: the helpers write to the caller's arrays. One that has not begun has nothing
            # left to do, and may stand behind another thread's launch.
            wait([future for future in futures if not future.cancel()])

    def address(self, array: Array) -> int:
        return int(array.__array_interface__["data"][0])

    def to_device(self, array: Any) -> Array:
        return np.asarray(array)

    def to_host(self, array: Array, out: np.ndarray | None = None) -> Any:
        if out is None:
            return array
        out.reshape(-1).view(np.uint8)[...] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return out

    def _find(self, kernel: str) -> Any:
        try:
            function = self._library[kernel]
        except AttributeError:
            raise UnsupportedError(
                f"there is no kernel {kernel!r} in {self._library._name}", code="unknown-kernel"
            ) from None
        function.restype = None
        self._kernels[kernel] = function
        return function


def available_cores() -> int:
    """How many cores this process may run on: fewer than the machine has, in a container or under taskset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _convert(argument: Any, kernel: str, at: int) -> Any:
    if isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise ValueError(
                f"argument {at} of kernel {kernel!r} is not C-contiguous: shape {argument.shape}, "
                f"strides {argument.strides}; pass its address and strides in a descriptor, or a copy"
            )
        return ctypes.c_void_p(argument.__array_interface__["data"][0])
    scalar = _SCALARS.get(type(argument))
    if scalar is None:
        raise TypeError(
            f"argument {at} of kernel {kernel!r} is a {type(argument).__name__}: expected a numpy array or one of "
            + ", ".join(f"np.{known.__name__}" for known in _SCALARS)
        )
    return scalar(argument)


def _choose_level(wanted: str | None) -> str:
    try:
        target = build.Target.host()
    except build.BuildError as error:
        raise UnsupportedError(f"kvzip has no kernels for this machine: {error}", code="unsupported-cpu") from error
    runnable = runnable_levels(target)
    if wanted is None:
        return runnable[-1]
    if wanted not in target.levels:
        raise UsageError(
            f"there is no CPU level {wanted!r} (KVZIP_CPU): expected one of {', '.join(target.levels)}",
            code="unknown-cpu-level",
        )
    if wanted not in runnable:
        raise UnsupportedError(
            f"this processor cannot run CPU level {wanted} (KVZIP_CPU): its best is {runnable[-1]}",
            code="unsupported-cpu",
        )
    return wanted


@functools.cache
def _load(level: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(build.ensure_library(level)))
    except (build.BuildError, OSError) as error:
        raise UnsupportedError(f"cannot load the CPU kernels: {error}", code="no-cpu-library") from error


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kvzip")


if hasattr(os, "register_at_fork"):
    # A forked child has none of its parent's threads: it would wait for them for ever.
    os.register_at_fork(after_in_child=_pool.cache_clear)
