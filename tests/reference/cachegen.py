"""CacheGen as LMCache 0.5.6 implements it: bins, vectorwise quantization, CDFs and the arithmetic coder.

Source: "CacheGen" (arXiv 2310.07240) for the idea; for the bytes, the published behaviour of LMCache's ``cachegen``.
The coder is the carry-less arithmetic coder of Witten, Neal and Cleary ("Arithmetic coding for data compression", CACM
1987) with 32-bit registers and 16-bit frequencies. The file around it is in ``cachegen_blob``.

Shapes: ``L`` layers, ``T`` tokens, ``C`` channels. Symbols and CDFs hold K's layers first, then V's: ``[2L, ...]``.
"""

from __future__ import annotations

import numpy as np

TABLE_BINS = 32
"""Entries of every CDF, whatever the bins of its layer."""

CHUNK_TOKENS = 256
"""Tokens that one stream codes."""

_TOP, _HALF, _QUARTER = 0xFFFFFFFF, 1 << 31, 1 << 30


def bin_schedule(layers: int) -> tuple[list[int], list[int]]:
    """Bins per layer for K and for V: LMCache has one rule for all models."""
    return [32 if i < 10 else 16 for i in range(layers)], [32 if i < 2 else 16 for i in range(layers)]


def max_tensor(x: np.ndarray) -> np.ndarray:
    """The largest magnitude of each token of ``x`` ``[T, C]``, in the dtype of ``x``: ``[T, 1]``."""
    return np.abs(x).max(axis=1, keepdims=True)


def quantize(x: np.ndarray, bins: int) -> np.ndarray:
    """Symbols ``round_half_even(x * (M / m) + M)`` of one plane ``[T, C]``, uint8; ``M = bins // 2 - 1``.

    Every step is rounded to float32. What is no number there, as in a token of zeros, gets the symbol 0: such a token
    decodes to -0.0.
    """
    maximum = np.float32(bins // 2 - 1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = maximum / max_tensor(x).astype(np.float32)
        levels = np.rint(x.astype(np.float32) * scale + maximum)
    return np.where(np.isfinite(levels), levels, 0).astype(np.uint8)


def dequantize(symbols: np.ndarray, maxima: np.ndarray, bins: int) -> np.ndarray:
    """``(symbol - M) / M * m`` in float32, cast to the dtype of ``maxima`` ``[T, 1]``: ``[T, C]``."""
    maximum = np.float32(bins // 2 - 1)
    return ((symbols.astype(np.float32) - maximum) / maximum * maxima.astype(np.float32)).astype(maxima.dtype)


def quantize_cache(kv: np.ndarray, k_bins: list[int], v_bins: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Symbols ``[2L, T, C]`` and max tensors ``[2L, T, 1]`` of a blob ``[L, 2, T, H, D]``."""
    planes = [kv[layer, which].reshape(kv.shape[2], -1) for which in (0, 1) for layer in range(kv.shape[0])]
    symbols = np.stack([quantize(x, bins) for x, bins in zip(planes, k_bins + v_bins, strict=True)])
    return symbols, np.stack([max_tensor(x) for x in planes])


def dequantize_cache(
    symbols: np.ndarray, maxima: np.ndarray, k_bins: list[int], v_bins: list[int], heads: int
) -> np.ndarray:
    """The inverse of :func:`quantize_cache`: ``[L, 2, T, H, D]`` in the dtype of ``maxima``."""
    planes = [dequantize(s, m, bins) for s, m, bins in zip(symbols, maxima, k_bins + v_bins, strict=True)]
    planes_count, tokens, channels = symbols.shape
    return np.stack(planes).reshape(2, planes_count // 2, tokens, heads, channels // heads).swapaxes(0, 1)


def cdf(symbols: np.ndarray) -> np.ndarray:
    """Cumulative frequencies ``[..., C, 33]`` (uint16) of symbols ``[..., T, C]``, counted over all tokens.

    The last entry is 65535, which the coder takes as 65536; every symbol keeps a frequency of at least one.
    """
    tokens = symbols.shape[-2]
    counts = np.stack([(symbols == s).sum(axis=-2) for s in range(TABLE_BINS)], axis=-1).astype(np.int64)
    cumulative = np.concatenate([np.zeros_like(counts[..., :1]), np.cumsum(counts, axis=-1)], axis=-1)
    return ((65535 - TABLE_BINS) * cumulative // tokens + np.arange(TABLE_BINS + 1)).astype(np.uint16)


def _interval(table: list[int], symbol: int) -> tuple[int, int]:
    return table[symbol], 1 << 16 if symbol == TABLE_BINS - 1 else table[symbol + 1]


def encode_stream(symbols: np.ndarray, table: np.ndarray) -> bytes:
    """One channel's symbols ``[T]`` under its CDF ``[33]``; the end is not marked."""
    frequencies = [int(entry) for entry in table]
    low, high, pending = 0, _TOP, 0
    bits: list[int] = []
    for symbol in symbols:
        lower, upper = _interval(frequencies, int(symbol))
        span = high - low + 1
        high = low + (span * upper >> 16) - 1
        low = low + (span * lower >> 16)
        while True:
            if high < _HALF or low >= _HALF:
                bit = int(low >= _HALF)
                bits += [bit] + [1 - bit] * pending
                pending = 0
            elif low >= _QUARTER and high < 3 * _QUARTER:
                pending += 1
                low -= _QUARTER
                high -= _QUARTER
            else:
                break
            low = low << 1 & _TOP
            high = high << 1 & _TOP | 1
    bit = int(low >= _QUARTER)
    bits += [bit] + [1 - bit] * (pending + 1)
    return np.packbits(np.array(bits, np.uint8)).tobytes()


def decode_stream(stream: bytes, table: np.ndarray, tokens: int) -> np.ndarray:
    """The ``tokens`` symbols of a stream (uint8); bits past its end are read as zeros."""
    frequencies = [int(entry) for entry in table]
    low, high = 0, _TOP
    value = int.from_bytes(stream[:4].ljust(4, b"\0"), "big")
    bits = iter(np.unpackbits(np.frombuffer(stream[4:], np.uint8)).tolist())
    symbols = np.empty(tokens, np.uint8)
    for t in range(tokens):
        span = high - low + 1
        count = (((value - low + 1) << 16) - 1) // span & 0xFFFF
        symbol = max(s for s in range(TABLE_BINS) if frequencies[s] <= count)
        symbols[t] = symbol
        lower, upper = _interval(frequencies, symbol)
        high = low + (span * upper >> 16) - 1
        low = low + (span * lower >> 16)
        while True:
            if low >= _QUARTER and high < 3 * _QUARTER:
                low, high, value = low - _QUARTER, high - _QUARTER, value - _QUARTER
            elif not (high < _HALF or low >= _HALF):
                break
            low = low << 1 & _TOP
            high = high << 1 & _TOP | 1
            value = value << 1 & _TOP | next(bits, 0)
    return symbols


def encode_streams(symbols: np.ndarray, tables: np.ndarray) -> list[tuple[bytes, np.ndarray, int]]:
    """Each 256 tokens of ``symbols`` ``[2L, T, C]`` as (streams end to end, lengths int32 ``[2L, C]``, tokens)."""
    planes, tokens, channels = symbols.shape
    chunks = []
    for start in range(0, tokens, CHUNK_TOKENS):
        run = symbols[:, start : start + CHUNK_TOKENS]
        streams = [encode_stream(run[p, :, c], tables[p, c]) for p in range(planes) for c in range(channels)]
        lengths = np.array([len(stream) for stream in streams], np.int32).reshape(planes, channels)
        chunks.append((b"".join(streams), lengths, run.shape[1]))
    return chunks


def decode_streams(chunks: list[tuple[bytes, np.ndarray, int]], tables: np.ndarray) -> np.ndarray:
    """The inverse of :func:`encode_streams`: symbols ``[2L, T, C]``."""
    planes, channels, _ = tables.shape
    runs = []
    for payload, lengths, tokens in chunks:
        ends = np.cumsum(lengths.ravel())
        run = np.empty((planes, tokens, channels), np.uint8)
        for i, (end, length) in enumerate(zip(ends, lengths.ravel(), strict=True)):
            p, c = divmod(i, channels)
            run[p, :, c] = decode_stream(payload[end - length : end], tables[p, c], tokens)
        runs.append(run)
    return np.concatenate(runs, axis=1)
