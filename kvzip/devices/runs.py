"""Runs of bytes put together on a device: the host side of kernels/runs.cu."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvzip.devices.base import Array, Device

ALIGNMENT = 16
"""Runs whose ends are as far from a multiple of it are copied so many bytes at a time."""

PIECE = 1 << 14
"""What one warp copies of an array: little enough for many warps."""


def copy_runs(sources: np.ndarray, targets: np.ndarray, sizes: np.ndarray, device: Device) -> None:
    """Copy ``sizes[i]`` bytes, below 4 GiB, between addresses ``[n]`` that are even or alike modulo ALIGNMENT."""
    device.launch(
        "copy_runs",
        len(sizes),
        device.to_device(sources.astype(np.uint64)),
        device.to_device(targets.astype(np.uint64)),
        device.to_device(sizes.astype(np.uint32)),
    )


def gathered(arrays: Sequence[Array], device: Device) -> tuple[Array, list[slice]]:
    """C-contiguous arrays of a device as one, uint8, and where in it each is: copies, but of a single one itself."""
    if len(arrays) == 1:
        return arrays[0].reshape(-1).view(np.uint8), [slice(0, arrays[0].nbytes)]
    sources = np.array([device.address(array) for array in arrays], np.int64)
    sizes = np.array([array.nbytes for array in arrays], np.int64)
    # Each as far from a multiple of ALIGNMENT as it was.
    ahead = sources % ALIGNMENT
    rooms = -(-(ahead + sizes) // ALIGNMENT) * ALIGNMENT
    starts = np.cumsum(rooms) - rooms + ahead
    joined = device.xp.empty(int(rooms.sum()), np.uint8)

    pieces = -(-sizes // PIECE)
    of_array = np.repeat(np.arange(len(arrays)), pieces)
    done = (np.arange(len(of_array)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * PIECE
    copy_runs(
        sources[of_array] + done,
        device.address(joined) + starts[of_array] + done,
        np.minimum(sizes[of_array] - done, PIECE),
        device,
    )
    return joined, [slice(start, start + size) for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
