"""A block of tuned TurboQuant, decoded in plain numpy and float64 from what docs/format.md says of it."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from kvzip.coding import tables
from tests.reference import turboquant

LANES, TILE, MAX_SYMBOLS = 32, 32, 32
ALPHABETS = {3: (16, 0), 4: (32, 0), 8: (32, 3)}
"""Coded symbols and raw low bits of 3, 4 and 8 bits."""
STEPS = {3: 0.6275, 4: 0.3225, 8: 0.3225 / 8}


def bits_of(words: np.ndarray) -> np.ndarray:
    """One number per lane, from one word per bit."""
    return sum(
        (((word >> np.arange(LANES, dtype=np.uint32)) & 1).astype(int) << i for i, word in enumerate(words)),
        np.zeros(LANES, int),
    )


def streams(
    sections: Mapping[str, np.ndarray], tokens: int, idle: np.ndarray, alphabet: int
) -> tuple[np.ndarray, np.ndarray]:
    """Symbols ``[groups, tokens, 32]`` and riders ``[groups, 32]``; ``idle`` says which lanes of the groups are."""
    words, states = sections["STRM"].view(np.uint16), sections["STAT"].view(np.uint32).reshape(-1, 1 + LANES)
    own = iter(sections["OWNT"].view(np.uint32).reshape(-1, 12))
    family = tables.family(alphabet).astype(np.int64)
    symbols, riders = np.zeros((len(states), tokens, LANES), int), np.zeros((len(states), LANES), np.uint16)
    end = 0
    for group, table in enumerate(sections["TABL"].view(np.uint32)):
        index = bits_of(next(own)) if table >> 31 else np.full(LANES, table)
        cumulative = np.where(idle[group][:, None], [0] + [4096] * MAX_SYMBOLS, family[index])
        at, end, x = end, end + int(states[group, 0]), states[group, 1:].astype(np.int64)
        for t in range(tokens):
            slot = x & 4095
            symbol = (cumulative[:, 1:] <= slot[:, None]).sum(axis=1)
            low, high = (np.take_along_axis(cumulative, (symbol + i)[:, None], 1)[:, 0] for i in (0, 1))
            x = (high - low) * (x >> 12) + slot - low
            taken = x < 1 << 16
            x[taken] = x[taken] << 16 | words[at : at + taken.sum()]
            at += int(taken.sum())
            symbols[group, t] = symbol
        assert at == end and (x >> 16 == 1).all()
        riders[group] = x & 0xFFFF
    assert end == len(words)
    return symbols, riders


def rotation(layer: int, head_dim: int) -> np.ndarray:
    """Orthogonal ``[D, D]``: a rotated row is ``row @ rotation``; Hadamard blocks are the powers of two in D."""
    matrix = np.zeros((head_dim, head_dim))
    start = 0
    for size in (1 << bit for bit in reversed(range(9)) if head_dim >> bit & 1):
        matrix[start : start + size, start : start + size] = turboquant.hadamard(size)
        start += size
    return turboquant.signs(layer, head_dim)[:, None] * matrix


def steps(sections: Mapping[str, np.ndarray], tokens: int, heads: int) -> np.ndarray:
    """The step of each row: ``[tokens, heads]``."""
    codes, spreads = sections["CODE"].view(np.uint16).reshape(-1, heads), sections["SPRD"].view(np.uint32)
    rows, at = np.zeros((len(codes) * TILE, heads), int), 0
    for tile, head in np.ndindex(codes.shape):
        smallest, width = int(codes[tile, head]) & 0xFFF, int(codes[tile, head]) >> 12
        rows[tile * TILE : (tile + 1) * TILE, head] = smallest + 4 * bits_of(spreads[at : at + width])
        at += width
    assert at == len(spreads)
    return 2.0 ** ((rows[:tokens] - 512) / 8)


def decode(
    sections: Mapping[str, np.ndarray],
    shape: tuple[int, int, int],
    dtype: np.dtype,
    layer: int,
    bits: int,
    keep_norm: bool,
) -> np.ndarray:
    """The block as float64 ``[tokens, heads, head_dim]``, before it is rounded to ``dtype``."""
    tokens, heads, head_dim = shape
    registers, (alphabet, raw_bits) = -(-head_dim // LANES), ALPHABETS[bits]
    idle = np.tile((np.arange(registers * LANES) >= head_dim).reshape(registers, LANES), (heads, 1))
    symbols, riders = streams(sections, tokens, idle, alphabet)
    if raw_bits:
        raw = sections["RAWB"].view(np.uint32).reshape(len(symbols), tokens, raw_bits)
        low = np.array([[bits_of(words) for words in group] for group in raw])
        symbols = symbols << raw_bits | low
    joined = symbols.reshape(heads, registers, tokens, LANES).transpose(2, 0, 1, 3).reshape(tokens, heads, -1)
    noise = STEPS[bits] ** 2 / 12
    gain = 1 / np.sqrt(1 + noise) if keep_norm else 1 / (1 + noise)
    rows = (joined[..., :head_dim] - (alphabet << raw_bits) // 2) * steps(sections, tokens, heads)[..., None] * gain
    means = riders.view(ml_dtypes.bfloat16 if dtype == np.float32 else dtype).astype(np.float64)
    block = rows @ rotation(layer, head_dim).T + means.reshape(heads, -1)[:, :head_dim]
    exact = iter(sections["ROWS"].view(dtype).reshape(-1, head_dim) if "ROWS" in sections else ())
    for tile, masks in enumerate(sections["EXCT"].view(np.uint32).reshape(-1, heads) if "EXCT" in sections else ()):
        for token, head in np.ndindex(TILE, heads):
            if masks[head] >> token & 1:
                block[tile * TILE + token, head] = next(exact)
    return block
