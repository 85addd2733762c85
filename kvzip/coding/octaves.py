"""The octave family: tables for the sign and exponent of normally distributed numbers.

A channel's exponents are few and near each other, and how often each occurs follows from the channel's deviation and
mean. A table is named by the root mean square, in eighths of an octave below the window's top, and by the ratio of mean
and deviation: 8 bits in place of 32 counts. Everything is made of integers, as in :mod:`kvzip.coding.tables`.

The alphabet: 16 symbols for positive numbers, then 16 for negative ones. Symbol 0 is the highest octave of the window,
two octaves above that of the root mean square; symbol 14 the lowest; symbol 15 is everything outside.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from kvzip.coding.normal import CDF_BITS, CDF_STEPS
from kvzip.coding.tables import costs_of, cumulative, normal_cdf

STEPS = 8
"""Tables per octave of the root mean square."""

RATIO_COUNT = 32
"""Ratios of mean and deviation: index 15 is none, each side has those of RATIOS."""

LEVELS = 16
ESCAPE_BITS = 8
"""What an exponent outside the window costs beside its symbol."""

ROOTS = (62757, 57549, 52773, 48393, 44376, 40693, 37316, 34219)
"""2 ** (-(2 p + 1) / 16), p = 0 .. 7, in 1/65536."""

RATIOS = (0, 193, 393, 606, 841, 1106, 1410, 1763, 2178, 2670, 3256, 3957, 4797, 5806, 7020, 8481, 10240)
"""Mean over deviation in 1/1024: sinh(k asinh(10) / 16)."""


@cache
def family() -> np.ndarray:
    """Cumulative counts, uint16 ``[256, 33]``: table ``32 p + i`` for a rms of ``2 ** ((p + 1/2) / 8)``."""
    ratio = np.array([-r for r in RATIOS[15:0:-1]] + list(RATIOS), np.int64)[None, :, None]
    # What follows is in deviations, 2^-16 of a step of the CDF's grid: the octaves' edges 2^3 .. 2^-12, and the mean.
    norm = np.array([[math.isqrt(r * r + 2**20 << 12)] for r in ratio.reshape(-1).tolist()], np.int64)[None]
    edge = np.array(ROOTS, np.int64)[:, None, None] * norm * CDF_STEPS >> 13 + np.arange(LEVELS)
    mean = ratio * (CDF_STEPS << 6)
    halves = [_masses(edge, mean), _masses(edge, -mean)]
    return cumulative(np.concatenate(halves, axis=2).reshape(STEPS * RATIO_COUNT, 2 * LEVELS))


@cache
def costs() -> np.ndarray:
    """What each symbol costs under each table, escaped exponents included, in 1/256 bits: uint16 ``[256, 32]``."""
    cost = costs_of(family()).copy()
    cost[:, LEVELS - 1 :: LEVELS] += ESCAPE_BITS * 256
    cost.flags.writeable = False
    return cost


def _masses(edge: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Of the symbols of one sign, in 2^-CDF_BITS."""
    below = normal_cdf(edge - mean)
    outside = (1 << CDF_BITS) - below[..., :1] + below[..., -1:] - normal_cdf(-mean)
    return np.concatenate([below[..., :-1] - below[..., 1:], outside], axis=2)
