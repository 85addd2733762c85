"""Compiled kernels of one source, ready to be launched, and what is said when a launch goes wrong."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvzip.errors import UnsupportedError


class EmulatorError(RuntimeError):
    """A kernel did what CUDA leaves undefined; the message says which thread did what."""


@dataclass(frozen=True)
class Buffer:
    """Memory that a launch may touch."""

    start: int
    end: int
    writable: bool


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("start", ctypes.c_uint64), ("end", ctypes.c_uint64),
        ("writable", ctypes.c_uint32), ("reserved", ctypes.c_uint32),
    )  # fmt: skip


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p), ("shared", ctypes.c_void_p), ("shared_bytes", ctypes.c_uint64),
        ("parameters", ctypes.c_uint32), ("sizes", ctypes.c_uint32 * 32),
    )  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.POINTER(_Kernel)), ("arguments", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(_Buffer)), ("buffer_count", ctypes.c_uint64),
        ("blocks", ctypes.c_uint32), ("threads", ctypes.c_uint32), ("seed", ctypes.c_uint32),
    )  # fmt: skip


class _Fault(ctypes.Structure):
    _fields_ = (
        ("what", ctypes.c_char_p), ("doing", ctypes.c_char_p), ("other", ctypes.c_char_p),
        ("address", ctypes.c_uint64), ("size", ctypes.c_uint64),
        ("block", ctypes.c_uint32), ("thread", ctypes.c_uint32),
        ("other_block", ctypes.c_uint32), ("other_thread", ctypes.c_uint32),
    )  # fmt: skip


class Module:
    """The kernels in a library that ``building`` made."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._launch = self._library.emulator_launch
        self._launch.restype = None
        # The fibers of a library are one set.
        self._lock = threading.Lock()

    def launch(
        self,
        kernel: str,
        blocks: int,
        threads: int,
        arguments: Sequence[np.generic],
        buffers: Sequence[Buffer],
        seed: int = 0,
    ) -> None:
        """Run ``kernel`` on ``blocks`` blocks of ``threads`` threads.

        Args:
            arguments: numpy scalars in the order of the kernel's parameters; addresses are ``np.uint64``.
            buffers: all memory that the kernel may touch besides its own.
            seed: chooses the order in which threads run; 0 is the natural one.

        Raises:
            UnsupportedError: there is no such kernel.
            TypeError: the arguments are not as many or as wide as the parameters.
            EmulatorError: the kernel did what CUDA leaves undefined.
        """
        found = self._describe(kernel)
        expected = list(found.sizes[: found.parameters])
        if [value.nbytes for value in arguments] != expected:
            given = [value.nbytes for value in arguments]
            raise TypeError(f"{kernel} takes parameters of {expected} bytes, got {given}")
        cells = (ctypes.c_uint64 * len(arguments))(*[int.from_bytes(x.tobytes(), "little") for x in arguments])
        pointers = (ctypes.c_void_p * len(cells))(*[ctypes.addressof(cells) + 8 * i for i in range(len(cells))])
        table = _table(buffers)
        launch = _Launch(
            ctypes.pointer(found), ctypes.addressof(pointers), table, len(table), blocks, threads, seed
        )  # fmt: skip
        fault = _Fault()
        with self._lock:
            self._launch(ctypes.byref(launch), ctypes.byref(fault))
        if fault.what:
            raise EmulatorError(f"{kernel}: {_words(fault, buffers)} (order of threads: seed {seed})")

    def _describe(self, kernel: str) -> _Kernel:
        try:
            describe = getattr(self._library, f"describe_{kernel}")
        except AttributeError:
            raise UnsupportedError(f"there is no kernel {kernel!r}", code="unknown-kernel") from None
        found = _Kernel()
        describe(ctypes.byref(found))
        return found


def _table(buffers: Sequence[Buffer]) -> Any:
    """The buffers sorted, those that overlap joined."""
    joined: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda buffer: buffer.start):
        if joined and buffer.start < joined[-1].end:
            last = joined[-1]
            joined[-1] = Buffer(last.start, max(last.end, buffer.end), last.writable and buffer.writable)
        else:
            joined.append(buffer)
    return (_Buffer * len(joined))(*[(buffer.start, buffer.end, buffer.writable, 0) for buffer in joined])


def _words(fault: _Fault, buffers: Sequence[Buffer]) -> str:
    what, doing, other = (text.decode() for text in (fault.what, fault.doing or b"", fault.other or b""))
    who = f"thread {fault.thread} of block {fault.block} (warp {fault.thread // 32}, lane {fault.thread % 32})"
    whom = f"thread {fault.other_thread} of block {fault.other_block}"
    if not fault.size:
        apart = f", {whom} at {other}" if fault.other_thread != fault.thread else ""
        return f"{what}: {who}" + (f" is at {doing}{apart}" if doing else "")
    place = f"{who} {doing} {fault.size} bytes at {fault.address:#x}"
    if what == "races":
        return f"race: {place}, {whom} {other} the same, with no barrier between"
    return f"an access {what}: {place}, {_nearest(fault.address, buffers)}"


def _nearest(address: int, buffers: Sequence[Buffer]) -> str:
    if not buffers:
        return "there are no buffers"
    nearest = min(buffers, key=lambda buffer: max(buffer.start - address, address - buffer.end, 0))
    return f"byte {address - nearest.start} of the nearest buffer, which has {nearest.end - nearest.start}"
