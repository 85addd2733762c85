"""Coefficient rows to streams and back: the host side of kernels/kvtc_columns.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvzip.coding import rans, windows
from kvzip.devices.base import Array, Device

BLOCK = np.dtype(
    [(name, np.uint64) for name in ("rows", "exact", "columns", "states", "words", "riders")]
    + [(name, np.uint32) for name in ("tokens", "row_stride", "width", "groups", "column_word_count", "word_count")]
    + [("step", np.float32), ("inverse_step", np.float32)]
)
"""The host side of ``struct KvtcBlock``."""

COLUMN_WORDS = 41
BITS_A_NUMBER = 36
"""The most that a number takes: 12 bits for its symbol, 8 for an escape, 15 raw ones."""


@dataclass(slots=True)
class Streams:
    """What the columns of one block become, uint8 on the device."""

    columns: Array
    states: Array
    words: Array


def word_capacity(tokens: int) -> int:
    """The most 16-bit words that ``tokens`` numbers in 32 lanes can take, and what a write may run over."""
    return tokens * rans.LANES * BITS_A_NUMBER // 16 + 2 * rans.LANES


def bound(tokens: int, groups: int) -> int:
    """The most bytes that the columns of a block can take."""
    return groups * (2 * word_capacity(tokens) + 4 * (rans.STATE_WORDS + COLUMN_WORDS))


def _warps(groups: Sequence[int]) -> np.ndarray:
    """Block and group of every warp: uint32 ``[warps, 2]``."""
    block = np.repeat(np.arange(len(groups)), groups)
    group = np.concatenate([np.arange(count) for count in groups])
    return np.stack([block, group], axis=1).astype(np.uint32)


def encode(blocks: np.ndarray, device: Device) -> list[Streams]:
    """Code the rows of ``blocks`` (:data:`BLOCK`, on the host), which become what decoders make of them."""
    warps = _warps(blocks["groups"].tolist())
    states = device.xp.empty((len(warps), rans.STATE_WORDS), np.uint32)
    firsts = np.concatenate([[0], np.cumsum(blocks["groups"].astype(np.int64))])
    blocks["states"] = device.address(states) + firsts[:-1] * (rans.STATE_WORDS * 4)
    capacity = word_capacity(int(blocks["tokens"].max()))
    words = device.scratch("kvtc.words", (len(warps), capacity), np.uint16)
    slots = device.scratch("kvtc.slots", (len(warps), COLUMN_WORDS), np.uint32)
    counts = device.scratch("kvtc.counts", (len(warps),), np.uint32)
    device.launch(
        "kvtc_encode", len(warps), device.to_device(blocks), device.to_device(warps), *_tables(device, costs=True),
        slots, counts, words, np.uint32(capacity),
    )  # fmt: skip
    lengths = device.to_host(states[:, 0]).astype(np.int64)
    streams, ends = rans.gather_runs(words, lengths, capacity, 1, device, from_end=True)
    columns, column_ends = rans.gather_runs(
        slots, device.to_host(counts).astype(np.int64) * 2, COLUMN_WORDS * 2, 1, device
    )
    return [
        Streams(
            columns[column_ends[a] : column_ends[b]],
            states[a:b].reshape(-1).view(np.uint8),
            streams[ends[a] : ends[b]],
        )
        for a, b in pairwise(firsts)
    ]


def decode(blocks: np.ndarray, device: Device) -> np.ndarray:
    """Fill the rows of ``blocks``; returns the first fault of each block, uint32 ``[blocks]``."""
    warps = _warps(blocks["groups"].tolist())
    status = device.scratch("kvtc.status", (len(warps),), np.uint32)
    device.launch(
        "kvtc_decode", len(warps), device.to_device(blocks), device.to_device(warps), *_tables(device), status
    )
    faults = np.zeros(len(blocks), np.uint32)
    np.maximum.at(faults, warps[:, 0], device.to_host(status))
    return faults


def _tables(device: Device, *, costs: bool = False) -> list[Array]:
    tables = [device.constant("kvtc.families", lambda: np.array(windows.families()))]
    if costs:
        tables.append(device.constant("kvtc.costs", windows.costs))
        tables.append(device.constant("kvtc.thresholds", windows.variance_thresholds))
    return tables
