"""int8 and int4 per token and head, in numpy: a scale in bfloat16 that reaches the largest number, float32 arithmetic.

Planes are ``[T, H, D]``.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np


def scales_up(exact: np.ndarray) -> np.ndarray:
    """The smallest normal bfloat16 that is not below a float32; 0 for 0."""
    bits = ((exact.astype(np.float32).view(np.uint32) + np.uint32(0xFFFF)) >> 16).astype(np.uint16)
    return np.where(bits == 0, bits, np.maximum(bits, np.uint16(0x0080))).view(ml_dtypes.bfloat16)


def levels(x: np.ndarray, minimum: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Whole numbers, float64: float32 ``x`` less the minimum, times the scale's reciprocal, rounded once.

    Difference and reciprocal are float32, of which float64 holds the product. A scale of 0 has levels 0.
    """
    scale = scale.astype(np.float32)
    inverse = np.where(scale == 0, np.float32(0), np.float32(1) / np.where(scale == 0, np.float32(1), scale))
    return np.rint((x - minimum.astype(np.float32)).astype(np.float64) * inverse)


def quantize(x: np.ndarray, bits: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes uint8 ``[T, H, D]``, scales ``[T, H]`` bfloat16, minima ``[T, H]`` of the plane's type (0 if symmetric)."""
    number = x.astype(np.float32)
    if symmetric:
        scales = scales_up(np.abs(number).max(axis=2) / np.float32((1 << (bits - 1)) - 1))
        minima = np.zeros(scales.shape, x.dtype)
    else:
        scales = scales_up((number.max(axis=2) - number.min(axis=2)) / np.float32((1 << bits) - 1))
        minima = x.min(axis=2)
    level = levels(number, minima[:, :, None], scales[:, :, None])
    return (level.astype(int) + (1 << (bits - 1) if symmetric else 0)).astype(np.uint8), scales, minima


def dequantize(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray, bits: int, symmetric: bool) -> np.ndarray:
    """Numbers, float32."""
    level = codes.astype(np.float32) - np.float32(1 << (bits - 1) if symmetric else 0)
    return level * scales.astype(np.float32)[:, :, None] + minima.astype(np.float32)[:, :, None]


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint32 ``[T, ceil(H * D * bits / 32)]``: consecutive channels of a token, the first in the low bits."""
    flat = codes.reshape(len(codes), -1)
    per_word = 32 // bits
    padded = np.zeros((len(flat), -(-flat.shape[1] // per_word) * per_word), np.uint32)
    padded[:, : flat.shape[1]] = flat
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    return np.bitwise_or.reduce(padded.reshape(len(flat), -1, per_word) << shifts, axis=2)
