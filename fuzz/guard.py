"""Memory between two pages that nobody may touch, so that a kernel that leaves its buffers ends the process at once."""

from __future__ import annotations

import ctypes
import mmap
from math import prod
from typing import Any

import numpy as np

from kvzip.devices.cpu import Cpu

_protect = ctypes.CDLL(None, use_errno=True).mprotect
_protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Region:
    """``size`` bytes of memory, rounded up to pages, with a forbidden page on either side."""

    def __init__(self, size: int) -> None:
        self.size = max(-(-size // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        whole = np.frombuffer(mmap.mmap(-1, self.size + 2 * mmap.PAGESIZE), np.uint8)
        address = whole.__array_interface__["data"][0]
        for page in (address, address + mmap.PAGESIZE + self.size):
            if _protect(page, mmap.PAGESIZE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._inside = whole[mmap.PAGESIZE : mmap.PAGESIZE + self.size]

    def place(self, nbytes: int, *, readable: int = 0, align: int = 8, at_end: bool = True) -> np.ndarray:
        """``nbytes`` that begin at a multiple of ``align``: right behind the first forbidden page, or so that
        ``readable`` more bytes (and what ``align`` costs) lie between them and the second one.
        """
        start = (self.size - nbytes - readable) // align * align if at_end else 0
        if start < 0:
            raise ValueError(f"{nbytes} + {readable} bytes in a region of {self.size}")
        return self._inside[start : start + nbytes]


class GuardedCpu(Cpu):
    """The CPU, whose scratch memory lies against a forbidden page, and which counts its launches."""

    def __init__(self, level: str | None = None) -> None:
        super().__init__(threads=1, level=level)
        self.launches = 0
        self._regions: dict[str, Region] = {}

    def launch(self, kernel: str, warps: int, *arguments: Any) -> None:
        self.launches += 1
        super().launch(kernel, warps, *arguments)

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        region = self._regions.get(name)
        if region is None or region.size < nbytes:
            region = self._regions[name] = Region(nbytes)
        return region.place(nbytes, align=dtype.itemsize).view(dtype).reshape(shape)
