"""rANS of symbols that lie one a byte: the entropy coder behind quantizers that do not code by themselves.

A block's symbols are uint8 ``[groups, rows, 32]``, group by group of 32 channels; idle lanes hold 0. Sections:

    TABL  per group the indexes of its channels' tables, 12 words of bits
    STAT  per group the length of its stream, final states
    STRM  the streams

Where the channels of a group may share a table, ``TABL`` is uint32 per group instead: that table's index, or 2**31 if
they have their own, which then are in ``OWNT``, 12 words of bits for each such group.

The format is normative in docs/format.md, the kernels are in kernels/symbols.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvzip.codecs.base import Batch, Sections
from kvzip.coding import rans
from kvzip.coding.sections import SectionReader, as_bytes
from kvzip.coding.tables import TABLE_BITS
from kvzip.devices.base import Array, Device

BLOCK = np.dtype(
    [(name, np.uint64) for name in ("symbols", "tables", "own", "riders", "states", "words")]
    + [(name, np.uint32) for name in ("rows", "row_capacity", "channels", "alphabet")]
    + [(name, np.uint32) for name in ("counted_rows", "word_count", "own_count", "reserved")]
)
"""The host side of ``struct SymbolBlock``."""

COUNTED_ROWS = {False: 512, True: 1024}
"""How many rows are counted at most to choose tables, by whether channels may share them."""


def room(batch: Batch, device: Device, *, packed: bool) -> Array:
    """Where a quantizer puts its symbols, ``[blocks, groups, tokens, 32]``; nothing where it packs them itself."""
    tokens = 0 if packed else max(block.tokens for block in batch.blocks)
    shape = (len(batch.blocks), rans.groups_of(batch.blocks[0].plane), tokens, rans.LANES)
    return device.scratch("symbols.room", shape, np.uint8)


def quantizer_blocks(fields: np.dtype, symbols: Array, coded: np.ndarray, device: Device) -> np.ndarray:
    """A quantizer's descriptors: how many tokens of each block it takes, and its part of :func:`room`."""
    count, groups, tokens, lanes = symbols.shape
    blocks = np.zeros(count, fields)
    blocks["coded"] = coded
    blocks["symbols"] = device.address(symbols) + np.arange(count) * (groups * tokens * lanes)
    blocks["symbol_tokens"] = tokens
    return blocks


def bound(rows: int, groups: int, *, sharing: bool = False) -> int:
    """The largest number of bytes that the sections can have."""
    return groups * (rans.word_capacity(rows) * 2 + (rans.STATE_WORDS + TABLE_BITS + sharing) * 4)


def encode(
    symbols: Array, rows: np.ndarray, channels: int, alphabet: int, device: Device,
    *, sharing: bool = False, riders: Array | None = None,
) -> list[Sections]:  # fmt: skip
    """The sections of ``symbols``, uint8 ``[blocks, groups, capacity, 32]``, of which block ``i`` has ``rows[i]``.

    Args:
        channels: of a plane, or of each of several runs of channels that start a group of their own.
        alphabet: how many symbols there are, 32 at most.
        sharing: whether the channels of a group may share a table.
        riders: 16 bits for each channel to carry in the start state of its stream, uint16 ``[blocks, groups, 32]``.
    """
    xp, (count, groups, row_capacity, _) = device.xp, symbols.shape
    tables = rans.DeviceTables((alphabet,), device)
    shared = xp.empty((count, groups if sharing else 0), np.uint32)
    own = xp.empty((count, groups, TABLE_BITS), np.uint32)
    states = xp.empty((count, groups, rans.STATE_WORDS), np.uint32)
    blocks = _describe(symbols, rows, channels, alphabet, riders, device)
    blocks["counted_rows"] = COUNTED_ROWS[sharing]
    if sharing:
        blocks["tables"] = device.address(shared) + np.arange(count) * (groups * 4)
    blocks["own"] = device.address(own) + np.arange(count) * (groups * TABLE_BITS * 4)
    blocks["states"] = device.address(states) + np.arange(count) * (groups * rans.STATE_WORDS * 4)
    capacity = rans.word_capacity(row_capacity)
    words = device.scratch("symbols.words", (count * groups, capacity), np.uint16)
    device.launch(
        "symbols_encode", count * groups, device.to_device(blocks), tables.families, tables.costs, tables.variances,
        words, np.uint32(groups), np.uint32(capacity),
    )  # fmt: skip
    lengths = device.to_host(states[:, :, 0]).astype(np.int64).reshape(-1)
    streams, starts = rans.gather_runs(words, lengths, capacity, groups, device, from_end=True)
    coded = [{"STAT": as_bytes(states[i]), "STRM": streams[starts[i] : starts[i + 1]]} for i in range(count)]
    if not sharing:
        return [{"TABL": as_bytes(own[i]), **coded[i]} for i in range(count)]
    owners = (device.to_host(shared) >> 31).astype(np.int64).reshape(-1)
    joined, ends = rans.gather_runs(own, owners * (TABLE_BITS * 2), TABLE_BITS * 2, groups, device)
    return [{"TABL": as_bytes(shared[i]), "OWNT": joined[ends[i] : ends[i + 1]], **coded[i]} for i in range(count)]


def decode(
    symbols: Array, rows: np.ndarray, channels: int, alphabet: int,
    batch: Batch, readers: Sequence[SectionReader], device: Device,
    *, sharing: bool = False, riders: Array | None = None,
) -> None:  # fmt: skip
    """Fill ``symbols``, and ``riders`` if given, from the sections of each reader; arguments are :func:`encode`'s.

    Raises:
        CorruptError: a section has the wrong length, or a stream does not end where it must.
    """
    count, groups = symbols.shape[:2]
    blocks = _describe(symbols, rows, channels, alphabet, riders, device)
    for fields, reader in zip(blocks, readers, strict=True):
        if sharing:
            fields["tables"], _ = reader.array("TABL", 4, exactly=groups)
            fields["own"], fields["own_count"] = reader.array("OWNT", 4)
        else:
            fields["own"], fields["own_count"] = reader.array("TABL", 4, exactly=groups * TABLE_BITS)
        fields["states"], _ = reader.array("STAT", 4, exactly=groups * rans.STATE_WORDS)
        fields["words"], fields["word_count"] = reader.array("STRM", 2)
    status = device.scratch("symbols.status", (count, groups), np.uint32)
    tables = rans.DeviceTables((alphabet,), device)
    device.launch(
        "symbols_decode", count * groups, device.to_device(blocks), tables.families, status, np.uint32(groups)
    )
    rans.check_status(device.to_host(status), batch)


def _describe(
    symbols: Array, rows: np.ndarray, channels: int, alphabet: int, riders: Array | None, device: Device
) -> np.ndarray:
    count, groups, row_capacity, lanes = symbols.shape
    blocks = np.zeros(count, BLOCK)
    blocks["symbols"] = device.address(symbols) + np.arange(count) * (groups * row_capacity * lanes)
    if riders is not None:
        blocks["riders"] = device.address(riders) + np.arange(count) * (groups * lanes * 2)
    blocks["rows"] = rows
    blocks["row_capacity"] = row_capacity
    blocks["channels"] = channels
    blocks["alphabet"] = alphabet
    return blocks
