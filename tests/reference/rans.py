"""Interleaved rANS: 32 lanes that share one stream of 16-bit words.

Source: Duda, "Asymmetric numeral systems" (arXiv 1311.2540) for rANS; Giesen, "Interleaved entropy coders"
(arXiv 1402.3392) for lanes that share a stream. States are 32 bits wide, frequencies sum to 4096.
"""

from __future__ import annotations

import numpy as np

LANES = 32
PRECISION = 12
START = 1 << 16
"""The state of every lane before the last token is coded, and after the last one is decoded."""


def _tables(frequencies: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
    """Frequencies and lower bounds per lane, with idle lanes (one symbol that fills the range) up to 32."""
    assert (frequencies.sum(axis=1) == 1 << PRECISION).all()
    rows = [[int(f) for f in row] for row in frequencies] + [[1 << PRECISION]] * (LANES - len(frequencies))
    return rows, [[sum(row[:s]) for s in range(len(row))] for row in rows]


def encode(symbols: np.ndarray, frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Code ``symbols`` ``[T, lanes]`` (at most 32 lanes) with the table of each lane, ``frequencies`` ``[lanes, S]``.

    Returns the states that a decoder starts with, uint32 ``[32]``, and its words, uint16 ``[N]``, in reading order.
    """
    table, lower = _tables(frequencies)
    tokens, lanes = symbols.shape
    states = [START] * LANES
    words: list[int] = []
    for t in reversed(range(tokens)):
        row = [int(s) for s in symbols[t]] + [0] * (LANES - lanes)
        for lane in reversed(range(LANES)):
            if states[lane] >= table[lane][row[lane]] << (32 - PRECISION):
                words.append(states[lane] & 0xFFFF)
                states[lane] >>= 16
        for lane, symbol in enumerate(row):
            whole, part = divmod(states[lane], table[lane][symbol])
            states[lane] = (whole << PRECISION) + part + lower[lane][symbol]
    return np.array(states, np.uint32), np.array(words[::-1], np.uint16)


def decode(states: np.ndarray, words: np.ndarray, frequencies: np.ndarray, tokens: int) -> np.ndarray:
    """The symbols uint8 ``[tokens, lanes]``.

    Raises ``ValueError`` unless every word is used and every state ends at its start.
    """
    table, lower = _tables(frequencies)
    x = [int(state) for state in states]
    stream = iter(words.tolist())
    symbols = np.empty((tokens, len(frequencies)), np.uint8)
    for t in range(tokens):
        for lane in range(LANES):
            slot = x[lane] & ((1 << PRECISION) - 1)
            symbol = max(s for s, bound in enumerate(lower[lane]) if bound <= slot and table[lane][s])
            x[lane] = table[lane][symbol] * (x[lane] >> PRECISION) + slot - lower[lane][symbol]
            if lane < len(frequencies):
                symbols[t, lane] = symbol
        for lane in range(LANES):
            if x[lane] < START:
                word = next(stream, None)
                if word is None:
                    raise ValueError(f"the stream ends at token {t}")
                x[lane] = x[lane] << 16 | word
    if next(stream, None) is not None or x != [START] * LANES:
        raise ValueError("the stream does not end where its symbols do")
    return symbols
