"""Floats: sign and exponent entropy-coded per channel, mantissas as they are.

The numbers of a channel have few exponents, and how often each occurs follows from the channel's deviation and mean: a
table of the octave family (:mod:`kvzip.coding.octaves`), named by 8 bits, codes sign and exponent in about 3.5 bits in
place of 9. Mantissas are noise, except for low bits that are zero throughout, as in float32 that once was bfloat16:
those are left out, and so are tokens that are zero in all channels. A block holds

    HEAD  mantissa bits stored; then, if tokens are left out, their mask
    TABL  per channel: the table's index and the window's top exponent
    STAT  per 32 channels: length of their stream, final states
    STRM  the streams
    MANT  mantissas, by word
    ESCP  exponents outside their channel's window, if any

and only ``HEAD`` if all tokens are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvzip.cache import Plane
from kvzip.codecs.base import Batch, Sections
from kvzip.coding import octaves, rans
from kvzip.coding.sections import SectionReader, as_bytes, corrupt_block
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import describe_planes

TILE = 32
TABLE_WORDS = 16

BLOCK = np.dtype(
    [(name, np.uint64) for name in ("head", "tables", "states", "words", "mantissas", "escapes")]
    + [(name, np.uint32) for name in ("head_words", "word_count", "mantissa_words", "escape_bytes")]
)
"""The host side of ``struct LosslessBlock``."""


class Format(NamedTuple):
    """Where a type has its mantissa and exponent, and the exponent of its infinities, 0 if it has none."""

    mantissa_bits: int
    exponent_bits: int
    special: int


FORMATS = {
    "bfloat16": Format(7, 8, 255),
    "float16": Format(10, 5, 31),
    "float32": Format(23, 8, 255),
    "float8_e4m3fn": Format(3, 4, 0),
    "float8_e4m3fnuz": Format(3, 4, 0),
    "float8_e5m2": Format(2, 5, 31),
    "float8_e5m2fnuz": Format(2, 5, 0),
}


def encode(batch: Batch, device: Device) -> list[Sections]:
    """The sections of every block of a batch whose dtype is one of FORMATS."""
    xp, plane, count = device.xp, batch.blocks[0].plane, len(batch.blocks)
    layout, groups = FORMATS[plane.dtype], rans.groups_of(plane)
    planes = device.to_device(describe_planes(batch.arrays, device))
    zeros, bits = _survey(batch, planes, device)
    tokens = np.array([block.tokens for block in batch.blocks])
    coded = tokens - np.bitwise_count(zeros).sum(axis=1, dtype=np.int64)

    heads = [_head(zeros[i], int(bits[i]), int(tokens[i])) for i in range(count)]
    head_starts = _starts([head.size for head in heads])
    head = device.to_device(np.concatenate(heads))
    mantissa_words = np.maximum(coded - _riders(plane), 0) * groups * bits
    mantissa_starts = _starts(mantissa_words)
    mantissas = xp.empty(int(mantissa_starts[-1]), np.uint32)
    tables = xp.empty((count, groups, TABLE_WORDS), np.uint32)
    states = xp.empty((count, groups, rans.STATE_WORDS), np.uint32)
    blocks = np.zeros(count, BLOCK)
    blocks["head"] = device.address(head) + head_starts[:-1] * 4
    blocks["head_words"] = np.diff(head_starts)
    blocks["mantissas"] = device.address(mantissas) + mantissa_starts[:-1] * 4
    blocks["tables"] = device.address(tables) + np.arange(count) * (groups * TABLE_WORDS * 4)
    blocks["states"] = device.address(states) + np.arange(count) * (groups * rans.STATE_WORDS * 4)

    capacity, escape_capacity = rans.word_capacity(int(tokens.max())), int(tokens.max()) * rans.LANES + 2
    words = device.scratch("lossless.words", (count * groups, capacity), np.uint16)
    escapes = device.scratch("lossless.escapes", (count * groups, escape_capacity), np.uint8)
    escape_counts = device.scratch("lossless.escape_counts", (count, groups), np.uint32)
    device.launch(
        f"lossless_encode_{_width(plane)}", count * groups, planes, device.to_device(blocks),
        device.to_device(coded.astype(np.uint32)),
        device.constant("octaves.family", octaves.family), device.constant("octaves.costs", octaves.costs),
        words, escapes, escape_counts, np.uint32(groups), np.uint32(capacity), np.uint32(escape_capacity),
        *map(np.uint32, (layout.mantissa_bits, layout.exponent_bits, layout.special or 1 << layout.exponent_bits)),
    )  # fmt: skip

    lengths = np.where(coded[:, None] > 0, device.to_host(states[:, :, 0]), 0).astype(np.int64)
    streams, stream_starts = rans.gather_runs(words, lengths.reshape(-1), capacity, groups, device, from_end=True)
    counts = device.to_host(escape_counts).copy()
    halves = (counts.reshape(-1).astype(np.int64) + 1) // 2
    escaped, escape_starts = rans.gather_runs(escapes, halves, escape_capacity // 2, groups, device, from_end=True)

    encoded: list[Sections] = []
    for i in range(count):
        sections: dict[str, Array] = {"HEAD": as_bytes(head[head_starts[i] : head_starts[i + 1]])}
        if coded[i]:
            sections["TABL"] = as_bytes(tables[i])
            sections["STAT"] = as_bytes(states[i])
            sections["STRM"] = streams[stream_starts[i] : stream_starts[i + 1]]
            sections["MANT"] = as_bytes(mantissas[mantissa_starts[i] : mantissa_starts[i + 1]])
        if counts[i].any():
            listed = escaped[escape_starts[i] : escape_starts[i + 1]]
            sections["ESCP"] = xp.concatenate([as_bytes(device.to_device(counts[i])), listed])
        encoded.append(sections)
    return encoded


def decode(batch: Batch, sections: Sequence[Sections], device: Device) -> None:
    """Fill ``batch.arrays``. Raises CorruptError on anything that does not fit."""
    plane, count = batch.blocks[0].plane, len(batch.blocks)
    layout, groups = FORMATS.get(plane.dtype), rans.groups_of(plane)
    if layout is None or plane.kind == "bytes":
        raise corrupt_block(batch.blocks[0], f"{plane.dtype} of kind {plane.kind} cannot be coded as floats")
    blocks = np.zeros(count, BLOCK)
    for fields, block, parts in zip(blocks, batch.blocks, sections, strict=True):
        reader = SectionReader(block, parts, device)
        fields["head"], head_words = reader.array("HEAD", 4)
        fields["head_words"] = head_words
        if head_words not in (1, 1 + -(-block.tokens // TILE)):
            raise corrupt_block(block, f"section HEAD has {head_words} words")
        if "STAT" in parts:
            fields["tables"], _ = reader.array("TABL", 4, exactly=groups * TABLE_WORDS)
            fields["states"], _ = reader.array("STAT", 4, exactly=groups * rans.STATE_WORDS)
            fields["words"], fields["word_count"] = reader.array("STRM", 2)
            fields["mantissas"], fields["mantissa_words"] = reader.array("MANT", 4)
            address, nbytes = reader.array("ESCP", 1, optional=True)
            if address and nbytes < groups * 4:
                raise corrupt_block(block, f"section ESCP has {nbytes} bytes, expected {groups * 4} or more")
            fields["escapes"], fields["escape_bytes"] = address, max(nbytes - groups * 4, 0)
        reader.done()
    status = device.scratch("lossless.status", (count, groups), np.uint32)
    device.launch(
        f"lossless_decode_{_width(plane)}", count * groups, device.to_device(describe_planes(batch.arrays, device)),
        device.to_device(blocks), device.constant("octaves.family", octaves.family), status,
        *map(np.uint32, (groups, layout.mantissa_bits, layout.exponent_bits)),
    )  # fmt: skip
    rans.check_status(device.to_host(status), batch)


def _survey(batch: Batch, planes: Array, device: Device) -> tuple[np.ndarray, np.ndarray]:
    """Of each block the masks of its zero tokens, uint32 ``[tiles]``, and how many mantissa bits it uses."""
    plane, count = batch.blocks[0].plane, len(batch.blocks)
    mantissa_bits = FORMATS[plane.dtype].mantissa_bits
    tiles = max(-(-block.tokens // TILE) for block in batch.blocks)
    zeros = device.scratch("lossless.zeros", (count, tiles), np.uint32)
    unused = device.scratch("lossless.unused", (count, tiles), np.uint32)
    device.launch(
        f"lossless_tiles_{_width(plane)}", count * tiles, planes, zeros, unused, np.uint32(tiles),
        np.uint32(mantissa_bits),
    )  # fmt: skip
    return device.to_host(zeros).copy(), mantissa_bits - device.to_host(unused).min(axis=1).astype(np.int64)


def _head(zeros: np.ndarray, bits: int, tokens: int) -> np.ndarray:
    masks = zeros[: -(-tokens // TILE)] if zeros.any() else zeros[:0]
    return np.concatenate([[bits], masks]).astype(np.uint32)


def _starts(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _width(plane: Plane) -> int:
    return plane.itemsize * 8


def _riders(plane: Plane) -> int:
    """How many tokens ride in the start states: one, if a number fits in 16 bits."""
    return 1 if plane.itemsize <= 2 else 0
