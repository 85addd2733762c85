"""The window family: tables for integers of any size, coded by their place in a window around a channel's mean.

Three alphabets (8, 16, 32 symbols), each with 64 deviations of 12 an octave up to 3.8 symbols, and means in
sixteenths of a symbol. The outermost two symbols are escapes, behind which 8 raw bits follow. Wider channels have raw
low bits besides. Everything is made of integers, as in :mod:`kvzip.coding.tables`.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from kvzip.coding.normal import CDF_BITS, CDF_STEPS
from kvzip.coding.tables import SIDE, costs_of, cumulative, normal_cdf

ALPHABETS = (8, 16, 32)
MEANS = 16
"""Means of a table within a symbol. A table's index is ``(alphabet * SIDE + deviation) * MEANS + mean % MEANS``."""

ESCAPE_BITS = 8
WIDEST = (131923, 139767, 148078, 156883, 166212, 176096, 186567, 197661, 209414, 221867, 235059, 249037)
"""The last octave of deviations in 1/65536 of a symbol: 3.8 * 2 ** ((i - 11) / 12)."""


@cache
def deviations() -> np.ndarray:
    """Standard deviations in 1/65536 of a symbol, int64 ``[64]``: 0.1 to 3.8."""
    return np.array([WIDEST[i % 12] >> (5 - i // 12) for i in range(8, 72)], np.int64)


def masses(alphabet: int) -> np.ndarray:
    """Probability of each symbol in 2^-30: int64 ``[64, 16, alphabet]``.

    Mean j stands at ``alphabet / 2 - 1 + j / 16``; the outermost symbols take the tails.
    """
    mean = (alphabet // 2 - 1) * MEANS + np.arange(MEANS, dtype=np.int64)[None, :, None]
    edge = np.arange(alphabet - 1, dtype=np.int64)[None, None, :]
    # The upper edge of a symbol in deviations from the mean, in 1/65536 of a step of the CDF's grid.
    z = ((2 * edge + 1) * MEANS - 2 * mean) * (CDF_STEPS << 32) // (2 * MEANS * deviations()[:, None, None])
    mass: np.ndarray = np.diff(normal_cdf(z), axis=2, prepend=0, append=1 << CDF_BITS)
    return mass


@cache
def families() -> np.ndarray:
    """Cumulative counts of all tables: uint16 ``[3 * 1024, 33]``."""
    return np.concatenate([cumulative(masses(size).reshape(SIDE * MEANS, size)) for size in ALPHABETS])


@cache
def costs() -> np.ndarray:
    """What each symbol costs in 1/256 bits, escapes' raw bits included: uint16 ``[3 * 1024, 32]``."""
    cost: np.ndarray = costs_of(families()).copy()
    for i, size in enumerate(ALPHABETS):
        cost[i * SIDE * MEANS : (i + 1) * SIDE * MEANS, [0, size - 1]] += ESCAPE_BITS * 256
    return cost


@cache
def variance_thresholds() -> np.ndarray:
    """Where one deviation gives way to the next, as variances of symbols: float32 ``[63]``, geometric means."""
    variance = (masses(32)[:, 0] * (np.arange(32) - 15) ** 2).sum(axis=1) / (1 << CDF_BITS)
    thresholds: np.ndarray = np.sqrt(variance[:-1] * variance[1:]).astype(np.float32)
    return thresholds
