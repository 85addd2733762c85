"""8-bit floats by table and search.

Source: "FP8 Formats for Deep Learning" (arXiv 2209.05433), with the conventions of torch 2.13's cast: e4m3fn saturates
at 448, infinities included; e5m2 overflows to infinity; NaN keeps its sign and sets every other bit.
"""

from __future__ import annotations

import numpy as np

FORMATS = {"float8_e4m3fn": (4, 3, 7), "float8_e5m2": (5, 2, 15)}
"""Exponent bits, mantissa bits and exponent bias by name."""


def value_table(name: str) -> np.ndarray:
    """The number that each of the 256 codes stands for, float64 ``[256]``."""
    _, mantissa_bits, bias = FORMATS[name]
    table = np.empty(256)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        table[code] = sign * (
            fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
        )
    if name == "float8_e4m3fn":
        table[[0x7F, 0xFF]] = np.nan
    else:
        table[[0x7C, 0xFC]] = np.inf, -np.inf
        for sign in (0x00, 0x80):
            table[sign + 0x7D : sign + 0x80] = np.nan
    return table


def encode(x: np.ndarray, name: str, saturate: bool | None = None) -> np.ndarray:
    """Codes of the nearest values, ties to the even code; uint8 in the shape of ``x``.

    Args:
        x: bfloat16, float16 or float32.
        saturate: whether what is too large becomes the largest finite value. The default is torch's habit: yes for
            e4m3fn, no (infinity) for e5m2.
    """
    if saturate is None:
        saturate = name == "float8_e4m3fn"
    table = value_table(name)[:0x80]
    finite = table[np.isfinite(table)]
    # One step past the largest value: rounding that reaches it is overflow, as IEEE 754 has it.
    ladder = np.append(finite, 2 * finite[-1] - finite[-2])
    magnitude = np.minimum(np.abs(x.astype(np.float64)).ravel(), 2 * ladder[-1])
    above = np.clip(np.searchsorted(ladder, magnitude), 1, len(ladder) - 1)
    below = above - 1
    distance_above, distance_below = ladder[above] - magnitude, magnitude - ladder[below]
    take_above = (distance_above < distance_below) | ((distance_above == distance_below) & (above % 2 == 0))
    codes = np.where(take_above, above, below)
    if saturate:
        codes = np.minimum(codes, len(finite) - 1)
    codes[np.isnan(magnitude)] = 0x7F
    signs = np.where(np.signbit(x.astype(np.float64)).ravel(), 0x80, 0)
    return (codes | signs).astype(np.uint8).reshape(x.shape)


def decode(codes: np.ndarray, name: str) -> np.ndarray:
    """The values of ``codes`` (uint8) as float32, exactly."""
    return value_table(name)[codes].astype(np.float32)
