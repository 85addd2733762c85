"""Lossless: a slow decoder of the codec's two coded forms, written from docs/format.md."""

from __future__ import annotations

import numpy as np

from tests.reference import rans

FIELDS = {"bfloat16": (7, 8), "float16": (10, 5), "float32": (23, 8), "float8_e4m3fn": (3, 4), "float8_e5m2": (2, 5)}
"""Bits of mantissa and exponent."""


def _by_word(words: np.ndarray) -> np.ndarray:
    """Numbers of ``w`` bits, one per lane, from ``w`` words: bit ``l`` of word ``j`` is bit ``j`` of lane ``l``."""
    return sum(((words[j] >> np.arange(32, dtype=np.uint32)) & 1).astype(np.int64) << j for j in range(len(words)))


def decode_floats(
    sections: dict[str, np.ndarray], tokens: int, channels: int, dtype: str, family: np.ndarray
) -> np.ndarray:
    """The bits of a block, uint64 ``[tokens, channels]``; ``family``: the octave tables' cumulative counts."""
    mantissa_bits, exponent_bits = FIELDS[dtype]
    head = sections["HEAD"].view(np.uint32)
    kept, groups = int(head[0]), -(-channels // 32)
    left_out = np.zeros(tokens, bool)
    if len(head) > 1:
        left_out = np.unpackbits(head[1:].view(np.uint8), bitorder="little")[:tokens].astype(bool)
    coded = np.flatnonzero(~left_out)
    numbers = np.zeros((tokens, groups * 32), np.int64)
    if len(coded) == 0:
        return numbers[:, :channels].astype(np.uint64)
    rides = mantissa_bits + exponent_bits < 16
    rows = len(coded) - rides
    tables = sections["TABL"].view(np.uint32).reshape(groups, 16)
    states = sections["STAT"].view(np.uint32).reshape(groups, 33)
    words = np.split(sections["STRM"].view(np.uint16), np.cumsum(states[:, 0])[:-1])
    mantissas = sections["MANT"].view(np.uint32).reshape(rows, groups, kept)
    counts, escapes = np.zeros(groups, int), np.zeros(0, np.uint8)
    if "ESCP" in sections:
        counts = sections["ESCP"][: groups * 4].view(np.uint32).astype(int)
        escapes = sections["ESCP"][groups * 4 :]
    ends = np.cumsum(counts + counts % 2)
    for g in range(groups):
        active = min(32, channels - g * 32)
        frequencies = np.diff(family.astype(int), axis=1)[_by_word(tables[g, :8])]
        tops = _by_word(tables[g, 8:])
        symbols, riders = _decode(states[g, 1:], words[g], frequencies[:active], rows)
        listed = iter(escapes[ends[g] - counts[g] : ends[g]].tolist())
        for row in range(rows):
            mantissa = _by_word(mantissas[row, g]) << (mantissa_bits - kept) if kept else np.zeros(32, np.int64)
            for lane in range(active):
                sign, level = divmod(int(symbols[row, lane]), 16)
                exponent = next(listed) if level == 15 else int(tops[lane]) - level
                bits = (sign << exponent_bits | exponent) << mantissa_bits | int(mantissa[lane])
                numbers[coded[row + rides], g * 32 + lane] = bits
        if rides:
            numbers[coded[0], g * 32 : g * 32 + active] = riders[:active]
        assert next(listed, None) is None
    return numbers[:, :channels].astype(np.uint64)


def decode_bytes(sections: dict[str, np.ndarray], nbytes: int) -> bytes:
    """The bytes of a block."""
    packed = sections["FREQ"]
    classes, at = int(packed[:4].view(np.uint32)[0]), 4
    frequencies = np.zeros((classes, 256), int)
    for row in frequencies:
        occurs = np.unpackbits(packed[at : at + 32], bitorder="little").astype(bool)
        at += 32 + 2 * occurs.sum()
        row[occurs] = packed[at - 2 * occurs.sum() : at].view(np.uint16)
    states = sections["STAT"].view(np.uint32).reshape(-1, 33)
    words = np.split(sections["STRM"].view(np.uint16), np.cumsum(states[:, 0])[:-1])
    out = b""
    for strip, start in enumerate(range(0, nbytes, 1 << 16)):
        count = min(1 << 16, nbytes - start)
        rows, rest = divmod(count, 32)
        tables = frequencies[np.arange(32) % classes]
        # In a last row that is not full the lanes beyond the end code nothing.
        stream, riders = _decode(states[strip, 1:], words[strip], tables, rows, rest)
        assert (riders == 0).all()
        out += stream.reshape(-1)[:count].astype(np.uint8).tobytes()
    return out


def _decode(
    states: np.ndarray, words: np.ndarray, frequencies: np.ndarray, rows: int, rest: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Symbols ``[rows (+ 1), lanes]`` and the riders; the last row has ``rest`` lanes, if any."""
    lower = np.cumsum(frequencies, axis=1) - frequencies
    x, at = states.astype(np.int64), 0
    symbols = np.zeros((rows + (rest > 0), len(frequencies)), int)
    for row in range(len(symbols)):
        for lane in range(rest if row == rows else len(frequencies)):
            slot = int(x[lane]) % (1 << rans.PRECISION)
            s = int(np.flatnonzero((lower[lane] <= slot) & (frequencies[lane] > 0))[-1])
            x[lane] = frequencies[lane, s] * (x[lane] >> rans.PRECISION) + slot - lower[lane, s]
            symbols[row, lane] = s
        for lane in range(len(x)):
            if x[lane] < rans.START:
                x[lane], at = x[lane] << 16 | int(words[at]), at + 1
    assert at == len(words) and (x >> 16 == 1).all()
    return symbols, x & 0xFFFF
