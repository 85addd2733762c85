"""Runs of bytes that a kernel puts together: whole, and nothing beside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvzip.devices.base import Device
from kvzip.devices.runs import ALIGNMENT, PIECE, copy_runs, gathered

SIZES = [0, 1, 2, 15, 16, 17, 31, 48, 100, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5]


def _numbers(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes).astype(np.uint8)


@pytest.mark.parametrize(
    ("sizes", "shift"), [(SIZES, 0), ([size // 2 * 2 for size in SIZES], 2)], ids=["aligned alike", "even"]
)
def test_runs_are_copied_on_every_device(device: Device, sizes: Sequence[int], shift: int) -> None:
    """Promise: every byte of a run of any size and place, and no other."""
    starts = np.cumsum([0, *(size + 2 * ALIGNMENT + (1 - shift // 2) for size in sizes)])
    host = _numbers(int(starts[-1]))
    source, target = device.to_device(host), device.to_device(np.full(host.size + shift, 0xEE, np.uint8))
    begin = device.address(source) + starts[:-1]
    copy_runs(begin, device.address(target) + starts[:-1] + shift, np.array(sizes), device)
    expected = np.full(host.size + shift, 0xEE, np.uint8)
    for start, size in zip(starts.tolist(), sizes, strict=False):
        expected[start + shift : start + shift + size] = host[start : start + size]
    np.testing.assert_array_equal(device.to_host(target), expected)


def test_arrays_are_gathered_on_every_device(device: Device) -> None:
    """Promise: arrays of any dtype are found where it is said, aligned for it; one alone is not copied."""
    arrays = [device.to_device(_numbers(size)[size % 7 :]) for size in SIZES]
    arrays.append(device.to_device(np.arange(999, dtype=np.uint32))[3:])
    whole, places = gathered(arrays, device)
    for array, place in zip(arrays, places, strict=True):
        found = whole[place].view(array.dtype).reshape(array.shape)
        assert device.address(found) % array.itemsize == 0
        np.testing.assert_array_equal(device.to_host(found), device.to_host(array))
    (alone, (place,)) = gathered(arrays[-1:], device)
    assert device.address(alone[place]) == device.address(arrays[-1])
    assert gathered([], device)[0].nbytes == 0
