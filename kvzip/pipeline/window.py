"""A run of units in memory: one buffer on the host, its image on the device, and the planes' views into that."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvzip.devices.base import Array, Arrival, Device
from kvzip.layouts.maps import Slab
from kvzip.pipeline.plan import Unit

ALIGNMENT = 64
"""Slabs start at multiples of a cache line, so that every view is aligned to its dtype."""


class Piece(NamedTuple):
    """Tokens ``start:stop`` of a plane as a device array ``[tokens, heads, head_dim]``."""

    start: int
    stop: int
    array: Array


class Window:
    """Units that are read, coded and written together.

    :meth:`upload` or :meth:`allot` must come before :meth:`pieces`, and :meth:`download` after the last decoder.
    :meth:`prefetch` begins an upload and :meth:`parts` ends a download: kernels of other windows run meanwhile.

    Args:
        units: what it holds, in file order.
        take: gives uint8 host memory of at least so many bytes. It is kept as ``buffer``, to be given back.
    """

    def __init__(self, units: Sequence[Unit], take: Callable[[int], np.ndarray]) -> None:
        self.units = list(units)
        self._places: list[tuple[Slab, slice]] = []
        end = 0
        for unit in units:
            for slab in unit.slabs:
                start = -(-end // ALIGNMENT) * ALIGNMENT
                end = start + slab.nbytes
                self._places.append((slab, slice(start, end)))
        self.buffer = take(end)
        self._host = self.buffer[:end]
        self._image: Array = None
        self._upload: Arrival | None = None
        self._downloads: list[Arrival] = []
        self._arrays: list[tuple[Slab, Array, list[Array]]] = []
        self._pieces: dict[int, list[Piece]] = {}

    def parts(self) -> Iterator[tuple[Slab, np.ndarray]]:
        """Each slab and its bytes on the host, in file order."""
        while self._downloads:
            self._downloads.pop()()
        return ((slab, self._host[place]) for slab, place in self._places)

    def prefetch(self, device: Device) -> None:
        """Begin to bring what was read into the buffer to the device. On the CPU nothing is copied."""
        if self._image is None and self._upload is None:
            self._upload = device.begin_upload([self._host])

    def upload(self, device: Device) -> None:
        """Make what was read into the buffer available as device arrays."""
        self.prefetch(device)
        if self._upload is not None:
            (image,) = self._upload()
            self._upload = None
            self._open(image, device)

    def allot(self, device: Device) -> None:
        """Make room for decoders to fill: on the CPU the buffer itself, else as much memory on the device."""
        if self._image is None:
            self._open(self._host if device.xp is np else device.xp.empty(self._host.size, np.uint8), device)

    def download(self, device: Device) -> None:
        """Begin to bring what decoders filled into the buffer."""
        for slab, array, views in self._arrays:
            slab.scatter(array, views)
        if device.xp is not np:
            self._downloads.append(device.begin_download([self._image], [self._host]))

    def release(self) -> None:
        """Give up what it has on the device; the buffer stays, and a download goes on."""
        self._image = self._upload = None
        self._arrays, self._pieces = [], {}

    def halves(self) -> list[Window]:
        """Its units as two windows, which share its buffer: :meth:`parts` waits for their downloads, too."""
        middle = len(self.units) // 2
        start = self._places[sum(len(unit.slabs) for unit in self.units[:middle])][1].start
        one = Window(self.units[:middle], lambda nbytes: self._host[:nbytes])
        other = Window(self.units[middle:], lambda nbytes: self._host[start : start + nbytes])
        one._downloads = other._downloads = self._downloads
        return [one, other]

    def pieces(self, plane: int, start: int, stop: int) -> list[Piece]:
        """What the window holds of tokens ``start:stop`` of the plane of index ``plane``, cut to that range."""
        found = []
        pieces = self._pieces.get(plane, [])
        # Oldest tokens first: a file of many tiny blocks must not cost their square.
        first = max(bisect_right(pieces, start, key=lambda piece: piece.start) - 1, 0)
        for piece in islice(pieces, first, None):
            low, high = max(start, piece.start), min(stop, piece.stop)
            if piece.start >= stop:
                break
            if low < high:
                found.append(Piece(low, high, piece.array[low - piece.start : high - piece.start]))
        return found

    def _open(self, image: Array, device: Device) -> None:
        self._image = image
        for slab, place in self._places:
            array = image[place].view(stored_dtype(slab.dtype, device)).reshape(slab.shape)
            views = slab.gather(array)
            self._arrays.append((slab, array, views))
            for plane, view in zip(slab.planes, views, strict=True):
                self._pieces.setdefault(plane.index, []).append(Piece(slab.start, slab.stop, view))


def stored_dtype(dtype: str, device: Device) -> np.dtype:
    """``dtype`` as this device's arrays can have it: cupy has no ml_dtypes, so integers carry their bits."""
    found = np.dtype(dtype)
    return found if device.xp is np or found.isbuiltin == 1 else np.dtype(f"u{found.itemsize}")
