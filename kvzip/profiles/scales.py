"""Scales and steps in whole 1/256 octaves: an integer in the file, the same float on every machine."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

OCTAVE = 256
KEY_UNIT = -221
"""Keys are quantized 0.55 times as finely as values, in units of their own spread."""

FLOOR = 2.0**-60
"""Below this a mean square counts as zero."""


@cache
def powers() -> np.ndarray:
    """``2 ** (i / 256)`` for i = 0..255, float64: square roots and products, whose every bit IEEE 754 fixes."""
    root = math.sqrt(2.0)
    table = np.ones(OCTAVE)
    for bit in range(7, -1, -1):
        table[np.arange(OCTAVE) >> bit & 1 == 1] *= root
        root = math.sqrt(root)
    table.flags.writeable = False
    return table


def power(index: np.ndarray | int) -> np.ndarray:
    """``2 ** (index / 256)`` as float32."""
    whole = np.asarray(index, np.int64)
    scaled: np.ndarray = np.ldexp(powers()[whole % OCTAVE], (whole // OCTAVE).astype(np.int32)).astype(np.float32)
    return scaled


def log2_index(x: np.ndarray) -> np.ndarray:
    """``floor(256 * log2 x)`` of positive numbers, int64."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    part = np.searchsorted(powers(), mantissa * 2, side="right") - 1
    return (exponent.astype(np.int64) - 1) * OCTAVE + part


def step_index(step: float) -> int:
    """The nearest index of a step given as a number."""
    return round(OCTAVE * math.log2(step))


def token_exponents(values: np.ndarray) -> np.ndarray:
    """The rms of each token of ``[T, channels]`` in 1/256 octaves, to the nearest quarter octave: int64 ``[T]``."""
    square = np.square(values, dtype=np.float64).mean(axis=1)
    return (log2_index(np.maximum(square, FLOOR)) // 2 + OCTAVE // 8) // (OCTAVE // 4) * (OCTAVE // 4)


def spread_exponent(variance: np.ndarray) -> int:
    """The geometric mean of channels' deviations in 1/256 octaves, from variances ``[channels]``.

    The rms would follow the few channels of largest spread. Channels that do not vary have no say.
    """
    live = variance[variance > FLOOR]
    return int(log2_index(live).sum() // (2 * live.size)) if live.size else 0
