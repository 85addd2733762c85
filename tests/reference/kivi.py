"""KIVI: keys quantized per channel in groups of tokens, values per token in groups of channels.

Source: "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (arXiv 2402.02750) and the packing of its code.

Planes are ``[T, C]``. Scales and minima are stored in float16 and codes are chosen against the stored ones.
A group at the end may be short. A constant group has scale 0 and codes 0, where the original divides 0 by 0.
"""

from __future__ import annotations

import numpy as np

from tests.reference.integers import levels

GROUP = 32
RESIDUAL = 128
"""The newest tokens, which stay as they are."""


def _quantize(x: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups along axis 0: codes uint8 ``[N, M]``, scales and minima float16 ``[ceil(N / group), M]``."""
    top = np.float32((1 << bits) - 1)
    codes = np.empty(x.shape, np.uint8)
    scales, minima = [], []
    for start in range(0, len(x), group):
        run = x[start : start + group].astype(np.float32)
        scale = ((run.max(axis=0) - run.min(axis=0)) / top).astype(np.float16)
        minimum = run.min(axis=0).astype(np.float16)
        codes[start : start + group] = np.clip(levels(run, minimum, scale), 0, top)
        scales.append(scale)
        minima.append(minimum)
    return codes, np.stack(scales), np.stack(minima)


def _dequantize(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray, group: int) -> np.ndarray:
    which = np.arange(len(codes)) // group
    return codes.astype(np.float32) * scales[which].astype(np.float32) + minima[which].astype(np.float32)


def quantize_keys(k: np.ndarray, bits: int, group: int = GROUP) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes ``[T, C]``, scales and minima ``[ceil(T / group), C]``."""
    return _quantize(k, bits, group)


def dequantize_keys(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray, group: int = GROUP) -> np.ndarray:
    """Keys ``[T, C]``, float32."""
    return _dequantize(codes, scales, minima, group)


def quantize_values(v: np.ndarray, bits: int, group: int = GROUP) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes ``[T, C]``, scales and minima ``[T, ceil(C / group)]``."""
    codes, scales, minima = _quantize(v.T, bits, group)
    return codes.T, scales.T, minima.T


def dequantize_values(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray, group: int = GROUP) -> np.ndarray:
    """Values ``[T, C]``, float32."""
    return _dequantize(codes.T, scales.T, minima.T, group).T


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    per_word = 32 // bits
    padded = np.zeros((-(-len(codes) // per_word) * per_word, codes.shape[1]), np.uint32)
    padded[: len(codes)] = codes
    words = np.zeros((len(padded) // per_word, codes.shape[1]), np.uint32)
    for i in range(per_word):
        words |= padded[i::per_word] << np.uint32(bits * i)
    return words.view(np.int32)


def pack_keys(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 ``[ceil(T * bits / 32), C]``: a word holds a channel's consecutive tokens, the oldest in its low bits."""
    return _pack(codes, bits)


def pack_values(codes: np.ndarray, bits: int) -> np.ndarray:
    """int32 ``[T, ceil(C * bits / 32)]``: a word holds a token's consecutive channels, the first in its low bits."""
    return _pack(codes.T, bits).T
