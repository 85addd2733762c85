"""The token section of kvtc's blocks: exact tokens, the scale of each key plane, the scales of each value plane's
tokens.

32-bit words: a word of flags (bit 0: masks follow); the masks, if so, one word per tile of 32 tokens; then per plane,
for keys one exponent, for others a head per tile (``width << 16 | smallest``, 16 bits signed) and behind the heads
``width`` words per tile, bit by bit the tokens' exponents above the smallest. Those are quarter octaves, keys' are
1/256 octaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvzip.profiles.scales import OCTAVE

TILE = 32
QUARTER = OCTAVE // 4


def pack(exact: np.ndarray, keys: Sequence[bool], exponents: np.ndarray) -> np.ndarray:
    """The section, uint32.

    Args:
        exact: bool ``[tokens]``.
        keys: whether each plane holds keys.
        exponents: int ``[planes, tokens]`` in 1/256 octaves; of keys the first one counts.
    """
    parts = [np.array([exact.any()], np.uint32)]
    if exact.any():
        parts.append(_words(exact))
    for key, row in zip(keys, exponents, strict=True):
        if key:
            parts.append(np.array([row[0]], np.int32).view(np.uint32))
            continue
        tiles = _tiles(row // QUARTER, exact)
        smallest = tiles.min(axis=1)
        above = tiles - smallest[:, None]
        width = np.ceil(np.log2(above.max(axis=1) + 1)).astype(np.int64)
        parts.append((width << 16 | smallest & 0xFFFF).astype(np.uint32))
        bits = above[:, None, :] >> np.arange(16)[None, :, None] & 1
        parts.append(_words(bits)[np.arange(16) < width[:, None]])
    return np.concatenate(parts)


def unpack(words: np.ndarray, tokens: int, keys: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    """``exact`` and ``exponents`` as :func:`pack` took them.

    Raises:
        ValueError: the section ends early or runs over, or says what cannot be.
    """
    tiles = -(-tokens // TILE)
    reader = _Reader(words)
    (flags,) = reader.take(1)
    if flags > 1:
        raise ValueError("unknown flags")
    exact = np.zeros(tokens, bool)
    if flags:
        exact = np.unpackbits(reader.take(tiles).view(np.uint8), bitorder="little")[:tokens].astype(bool)
    exponents = np.zeros((len(keys), tokens), np.int64)
    for key, row in zip(keys, exponents, strict=True):
        if key:
            row[:] = reader.take(1).view(np.int32)[0]
            continue
        heads = reader.take(tiles)
        width = heads >> 16
        if (width > 16).any():
            raise ValueError("a width is above 16")
        present = np.arange(16) < width[:, None]
        bits = np.zeros((tiles, 16), np.uint32)
        bits[present] = reader.take(int(width.sum()))
        unpacked = np.unpackbits(bits.view(np.uint8).reshape(tiles, 16, 4), axis=2, bitorder="little").astype(np.int64)
        above = (unpacked << np.arange(16)[None, :, None]).sum(axis=1)
        smallest = (heads & 0xFFFF).astype(np.uint16).view(np.int16).astype(np.int64)
        row[:] = (above + smallest[:, None]).reshape(-1)[:tokens] * QUARTER
    reader.finish()
    # Beyond these no float32 has such a scale.
    if exponents.size and np.abs(exponents).max() > 100 * OCTAVE:
        raise ValueError("a scale is out of range")
    return exact, exponents


def _tiles(row: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """``[tiles, 32]``; exact tokens and what lies behind the last take the number of a neighbour, and so cost
    nothing.
    """
    if exact.all():
        return np.zeros((-(-len(row) // TILE), TILE), np.int64)
    tokens = np.flatnonzero(~exact)
    nearest = tokens[np.clip(np.searchsorted(tokens, np.arange(-(-len(row) // TILE) * TILE)), 0, len(tokens) - 1)]
    return row[nearest].reshape(-1, TILE)


def _words(bits: np.ndarray) -> np.ndarray:
    """Bits in the last axis as 32-bit words, padded with zeros."""
    packed = np.packbits(bits.astype(np.uint8), axis=-1, bitorder="little")
    padded = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, -packed.shape[-1] % 4)])
    words = np.ascontiguousarray(padded).view(np.uint32)
    return words if bits.ndim == 1 else words[..., 0]


class _Reader:
    def __init__(self, words: np.ndarray) -> None:
        self._words, self._at = words, 0

    def take(self, count: int) -> np.ndarray:
        if count > len(self._words) - self._at:
            raise ValueError("it ends early")
        self._at += count
        return self._words[self._at - count : self._at]

    def finish(self) -> None:
        if self._at != len(self._words):
            raise ValueError("it runs over")
