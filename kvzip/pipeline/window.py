"""A run of units in memory: one buffer on the host, its image on the device, and the planes' views into that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvzip.devices.base import Array, Device
from kvzip.layouts.maps import Slab
from kvzip.pipeline.plan import Unit

ALIGNMENT = 64
"""Slabs start at multiples of a cache line, so that every view is aligned to its dtype."""


class Piece(NamedTuple):
    """Tokens ``start:stop`` of a plane as a device array ``[tokens, heads, head_dim]``."""

    start: int
    stop: int
    array: Array


@dataclass
class Window:
    """Units that are read, coded and written together.

    ``buffer`` is uint8 host memory of at least :func:`window_bytes`. :meth:`upload` or :meth:`allot` must come before
    :meth:`pieces`, and :meth:`download` after the last decoder.
    """

    units: Sequence[Unit]
    buffer: np.ndarray
    _image: Array = None
    _arrays: list[tuple[Slab, Array, list[Array]]] = field(default_factory=list)
    _pieces: dict[int, list[Piece]] = field(default_factory=dict)

    def parts(self) -> Iterator[tuple[Slab, np.ndarray]]:
        """Each slab and its bytes on the host, in file order."""
        for slab, start in _places(self.units):
            yield slab, self.buffer[start : start + slab.nbytes]

    def upload(self, device: Device) -> None:
        """Make what was read into the buffer available as device arrays. On the CPU nothing is copied."""
        if not self._pieces:
            self._open(device.to_device(self._used), device)

    def allot(self, device: Device) -> None:
        """Make room for decoders to fill: on the CPU the buffer itself, else as much memory on the device."""
        if not self._pieces:
            self._open(self._used if device.xp is np else device.xp.empty(self._used.size, np.uint8), device)

    def download(self, device: Device) -> None:
        """Bring what decoders filled into the buffer."""
        for slab, array, views in self._arrays:
            slab.scatter(array, views)
        if device.xp is not np:
            self._used[...] = device.to_host(self._image)

    def pieces(self, plane: int, start: int, stop: int) -> list[Piece]:
        """What the window holds of tokens ``start:stop`` of the plane of index ``plane``, cut to that range."""
        found = []
        for piece in self._pieces.get(plane, ()):
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                found.append(Piece(low, high, piece.array[low - piece.start : high - piece.start]))
        return found

    @property
    def _used(self) -> np.ndarray:
        return self.buffer[: window_bytes(self.units)]

    def _open(self, image: Array, device: Device) -> None:
        self._image = image
        for slab, start in _places(self.units):
            array = image[start : start + slab.nbytes].view(stored_dtype(slab.dtype, device)).reshape(slab.shape)
            views = slab.gather(array)
            self._arrays.append((slab, array, views))
            for plane, view in zip(slab.planes, views, strict=True):
                self._pieces.setdefault(plane.index, []).append(Piece(slab.start, slab.stop, view))


def window_bytes(units: Sequence[Unit]) -> int:
    """How large the buffer of a window of ``units`` has to be."""
    return sum(_aligned(slab.nbytes) for unit in units for slab in unit.slabs)


def stored_dtype(dtype: str, device: Device) -> np.dtype:
    """``dtype`` as this device's arrays can have it: cupy has no ml_dtypes, so integers carry their bits."""
    found = np.dtype(dtype)
    return found if device.xp is np or found.isbuiltin == 1 else np.dtype(f"u{found.itemsize}")


def _places(units: Sequence[Unit]) -> Iterator[tuple[Slab, int]]:
    start = 0
    for unit in units:
        for slab in unit.slabs:
            yield slab, start
            start += _aligned(slab.nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
