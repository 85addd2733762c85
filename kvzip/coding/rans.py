"""What codecs on interleaved rANS share: sizes, table families on the device, runs put together, faults reported.

The coder itself is kernels/rans.h; its format is normative in docs/format.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvzip.cache import Plane
from kvzip.codecs.base import Batch
from kvzip.coding import tables
from kvzip.coding.sections import corrupt_block
from kvzip.devices.base import Array, Device
from kvzip.devices.runs import copy_runs

LANES = 32
STATE_WORDS = 1 + LANES
"""32-bit words of a warp in a state section: the number of 16-bit words of its stream, then the lanes' final states."""

_FAULTS = {
    1: "the token section ends early or runs over",
    2: "a stream does not end where it must",
    3: "the number of exact tokens is wrong",
    4: "the number of raw low bits is wrong",
    5: "a value is out of range",
    6: "the counts of the symbols are wrong",
    7: "the number of escapes is wrong",
}


def groups_of(plane: Plane) -> int:
    """Warps that a plane's channels take, 32 channels each."""
    return -(-plane.channels // LANES)


def word_capacity(tokens: int) -> int:
    """The most 16-bit words that ``tokens`` symbols in 32 lanes can take, 12 bits each, and what a write may run
    over.
    """
    return tokens * LANES * tables.SCALE_BITS // 16 + 2 * LANES


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """The families of some alphabets, one after the other, on a device; made when they are first asked for."""

    alphabets: tuple[int, ...]
    device: Device

    @property
    def families(self) -> Array:
        """Cumulative counts, uint16 ``[n, 4096, 33]``."""
        return self.device.constant(
            ("rans.families", self.alphabets), lambda: np.stack([tables.family(n) for n in self.alphabets])
        )

    @property
    def costs(self) -> Array:
        """For encoders: what symbols cost, uint16 ``[n, 4096, 32]``."""
        return self.device.constant(
            ("rans.costs", self.alphabets), lambda: np.stack([tables.costs(n) for n in self.alphabets])
        )

    @property
    def variances(self) -> Array:
        """For encoders: thresholds between deviations, uint32 ``[63]``."""
        return self.device.constant("rans.variances", lambda: np.array(tables.variance_thresholds()))


def gather_runs(
    scratch: Array, halves: np.ndarray, capacity: int, per_block: int, device: Device, *, from_end: bool = False
) -> tuple[Array, np.ndarray]:
    """Copy runs of 16-bit words that lie apart in ``scratch`` one after the other.

    Args:
        halves: words of each run; run ``i`` starts (or, ``from_end``, ends) in row ``i`` of ``capacity`` words.
        per_block: runs that make up a block.

    Returns:
        All runs (uint8), and where each block starts in them, with the end.
    """
    ends = np.concatenate([[0], np.cumsum(halves)]) * 2
    joined = device.xp.empty(int(ends[-1]), np.uint8)
    rows = np.arange(len(halves)) * (capacity * 2)
    if from_end:
        rows = rows + (capacity - halves) * 2
    copy_runs(device.address(scratch) + rows, device.address(joined) + ends[:-1], halves * 2, device)
    return joined, ends[::per_block]


def check_status(status: np.ndarray, batch: Batch) -> None:
    """Raises CorruptError for the first block of ``[blocks, warps]`` of which a kernel reported a fault."""
    if status.any():
        i, j = np.argwhere(status)[0]
        fault = int(status[i, j])
        raise corrupt_block(batch.blocks[i], _FAULTS.get(fault, f"fault {fault}"))
