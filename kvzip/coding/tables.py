"""The table family: 64 deviations x 64 means of a discretized normal distribution, for one alphabet size.

A channel's symbols are coded with one of 4096 tables, so that it costs 12 bits to tell which, where an exact table of
33 counts costs 528. On real caches the family is within 0.02 bits a symbol of exact adaptive coding. Everything is
made of integers: the tables are the same on every machine, as the format needs.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from kvzip.coding.normal import CDF, CDF_BITS, CDF_STEPS, DEVIATIONS

SIDE = 64
"""Deviations and means of the family: a table's index is ``deviation * SIDE + mean``."""

TABLES = SIDE * SIDE
TABLE_BITS = 12
SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
"""What a table's frequencies sum to."""

MAX_SYMBOLS = 32


@cache
def family(symbols: int) -> np.ndarray:
    """Cumulative counts, uint16 ``[4096, 33]``, of the tables for an alphabet of ``symbols`` (1 to 32).

    Every symbol of the alphabet has a frequency of at least 1; the entries after the last symbol are 4096. Mean ``i``
    stands at ``i * (symbols - 1) / 63``; the outermost symbols take the tails.
    """
    if not 1 <= symbols <= MAX_SYMBOLS:
        raise ValueError(f"an alphabet has 1 to {MAX_SYMBOLS} symbols, not {symbols}")
    deviation = np.array(DEVIATIONS, np.int64)[:, None, None]
    mean = np.arange(SIDE, dtype=np.int64)[None, :, None]
    edge = np.arange(symbols - 1, dtype=np.int64)[None, None, :]
    # The upper edge of a symbol in deviations from the mean, in 1/65536 of a step of the CDF's grid.
    twice_distance = (2 * edge + 1) * (SIDE - 1) - 2 * mean * (symbols - 1)
    z = twice_distance * (CDF_STEPS << 32) // (2 * (SIDE - 1) * deviation)
    below = normal_cdf(z)
    ends = (
        np.broadcast_to(np.int64(0), (*below.shape[:2], 1)),
        np.broadcast_to(np.int64(1 << CDF_BITS), (*below.shape[:2], 1)),
    )
    mass = np.diff(np.concatenate([ends[0], below, ends[1]], axis=2), axis=2)
    return cumulative(mass.reshape(TABLES, symbols))


@cache
def costs(symbols: int) -> np.ndarray:
    """What each symbol costs under each table, in 1/256 bits: uint16 ``[4096, 32]``; 0 beyond the alphabet."""
    return costs_of(family(symbols))


def cumulative(mass: np.ndarray) -> np.ndarray:
    """Tables ``[n, 33]`` from the masses of symbols ``[n, symbols]``, int64 in 2^-CDF_BITS, which sum to 1."""
    symbols = mass.shape[1]
    frequency = (mass * (SCALE - symbols) >> CDF_BITS) + 1
    # What rounding left over goes to the likeliest symbol, the first of equals.
    likeliest = np.argmax(frequency, axis=1)[:, None]
    rest = SCALE - frequency.sum(axis=1, keepdims=True)
    np.put_along_axis(frequency, likeliest, np.take_along_axis(frequency, likeliest, 1) + rest, 1)
    tables = np.full((len(mass), MAX_SYMBOLS + 1), SCALE, np.uint16)
    tables[:, 0] = 0
    tables[:, 1 : symbols + 1] = np.cumsum(frequency, axis=1)
    tables.flags.writeable = False
    return tables


def costs_of(tables: np.ndarray) -> np.ndarray:
    """What each symbol costs under each of ``tables`` ``[n, 33]``, in 1/256 bits: uint16 ``[n, 32]``."""
    of_frequency = np.zeros(SCALE + 1, np.uint16)
    of_frequency[1:] = SCALE_BITS * 256 - log2(np.arange(1, SCALE + 1))
    cost: np.ndarray = of_frequency[np.diff(tables, axis=1)]
    cost.flags.writeable = False
    return cost


@cache
def variance_thresholds() -> np.ndarray:
    """Where one deviation gives way to the next: uint32 ``[63]``, variances of symbols in 1/4096.

    Rounding to symbols adds 1/12 to a variance (Sheppard's correction); the product of neighbours is the geometric
    mean.
    """
    deviation = np.array(DEVIATIONS, np.int64)
    return (deviation[:-1] * deviation[1:] // 2**20 + 4096 // 12).astype(np.uint32)


def normal_cdf(z: np.ndarray) -> np.ndarray:
    """The normal distribution by linear interpolation of the committed table; z in 1/65536 steps, result in
    2^-CDF_BITS.
    """
    table = np.array(CDF, np.int64)
    limit = (len(CDF) - 1) << 16
    magnitude = np.minimum(np.abs(z), limit - 1)
    step, part = magnitude >> 16, magnitude & 0xFFFF
    upper: np.ndarray = table[step] + ((table[step + 1] - table[step]) * part >> 16)
    return np.asarray(np.where(z < 0, (1 << CDF_BITS) - upper, upper))


def log2(x: np.ndarray) -> np.ndarray:
    """log2 of positive integers below 2^31, in 1/256, rounded down: the bit length, then one squaring per binary
    place.
    """
    whole = np.zeros_like(x)
    for shift in (16, 8, 4, 2, 1):
        whole += np.where(x >> (whole + shift), shift, 0)
    mantissa = x << 30 - whole
    result = whole
    for _ in range(8):
        mantissa = mantissa * mantissa >> 30
        carry = mantissa >> 31
        mantissa >>= carry
        result = result * 2 + carry
    return result
