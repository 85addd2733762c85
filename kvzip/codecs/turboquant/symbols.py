"""Rows of small integers through rANS: typed calls into kernels/turboquant_symbols.cu.

    TABL  uint32 per group: the index of the table that its channels share, or 2**31 if they have their own
    OWNT  for each group of own tables: their indexes, as 12 words of bits
    STAT  per group: length of its stream, final states
    STRM  the streams
    RAWB  the low bits of symbols beyond the coder's 32, if any: words of bits, by group, then token

A group is 32 channels of a head; the last of a head has fewer if head_dim is no multiple of 32.

Each channel carries 16 bits of the caller's, its rider, in the start state of its stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch
from kvzip.coding import rans
from kvzip.coding.sections import SectionReader, as_bytes
from kvzip.coding.tables import TABLE_BITS
from kvzip.devices.base import Array, Device

BLOCK = np.dtype(
    [(name, np.uint64) for name in ("symbols", "riders", "tables", "own", "states", "words", "raw")]
    + [(name, np.uint32) for name in ("tokens", "pitch", "head_dim", "raw_bits")]
    + [(name, np.uint32) for name in ("alphabet", "word_count", "own_count", "reserved")]
)
"""The host side of ``struct TunedSymbols``."""


def groups_of(plane: Plane) -> int:
    """Warps that a plane takes: 32 channels of a head each."""
    return plane.heads * -(-plane.head_dim // rans.LANES)


@dataclass(frozen=True, slots=True)
class SymbolCoder:
    """Symbols below ``alphabet << raw_bits``, of which the ``raw_bits`` lowest bits are stored as they are."""

    alphabet: int
    raw_bits: int = 0

    def bound(self, block: Block) -> int:
        """The most bytes that the sections of a block can have."""
        groups = groups_of(block.plane)
        per_group = rans.word_capacity(block.tokens) * 2 + (rans.STATE_WORDS + 1 + TABLE_BITS) * 4
        return groups * (per_group + block.tokens * self.raw_bits * 4)

    def encode(self, batch: Batch, symbols: Array, riders: Array, device: Device) -> list[dict[str, Array]]:
        """The sections of every block.

        Args:
            symbols: uint8 ``[blocks, groups, tokens, 32]``; blocks may have fewer tokens.
            riders: uint16 ``[blocks, groups, 32]``.
        """
        xp, (count, groups, pitch, _) = device.xp, symbols.shape
        blocks, tables = self._describe(batch, symbols, riders, device), self._tables(device)
        shared = xp.empty((count, groups), np.uint32)
        own = device.scratch("tuned.symbols.own", (count, groups, TABLE_BITS), np.uint32)
        states = xp.empty((count, groups, rans.STATE_WORDS), np.uint32)
        raw_sizes = np.array([block.tokens * groups * self.raw_bits for block in batch.blocks])
        raw_ends = np.cumsum(raw_sizes)
        raw = xp.empty(int(raw_ends[-1]), np.uint32)
        blocks["tables"] = device.address(shared) + np.arange(count) * (groups * 4)
        blocks["own"] = device.address(own) + np.arange(count) * (groups * TABLE_BITS * 4)
        blocks["states"] = device.address(states) + np.arange(count) * (groups * rans.STATE_WORDS * 4)
        blocks["raw"] = device.address(raw) + (raw_ends - raw_sizes) * 4
        capacity = rans.word_capacity(pitch)
        words = device.scratch("tuned.symbols.words", (count * groups, capacity), np.uint16)
        device.launch(
            "tuned_symbols_encode", count * groups, device.to_device(blocks), tables.families, tables.costs,
            tables.variances, words, np.uint32(groups), np.uint32(capacity),
        )  # fmt: skip
        lengths = device.to_host(states[:, :, 0]).astype(np.int64)
        streams, starts = rans.gather_runs(words, lengths.reshape(-1), capacity, groups, device, from_end=True)
        owners = (device.to_host(shared) >> 31).astype(np.int64).reshape(-1)
        own_tables, own_starts = rans.gather_runs(own, owners * (TABLE_BITS * 2), TABLE_BITS * 2, groups, device)
        encoded = []
        for i in range(count):
            sections = {
                "TABL": as_bytes(shared[i]),
                "OWNT": own_tables[own_starts[i] : own_starts[i + 1]],
                "STAT": as_bytes(states[i]),
                "STRM": streams[starts[i] : starts[i + 1]],
            }
            if self.raw_bits:
                sections["RAWB"] = as_bytes(raw[raw_ends[i] - raw_sizes[i] : raw_ends[i]])
            encoded.append(sections)
        return encoded

    def decode(
        self, batch: Batch, readers: Sequence[SectionReader], symbols: Array, riders: Array, device: Device
    ) -> None:
        """Fill ``symbols`` and ``riders``, arrays as :meth:`encode` takes them, from the sections that readers hold.

        Raises CorruptError for sections that do not fit.
        """
        groups = symbols.shape[1]
        blocks = self._describe(batch, symbols, riders, device)
        for fields, block, reader in zip(blocks, batch.blocks, readers, strict=True):
            fields["tables"], _ = reader.array("TABL", 4, exactly=groups)
            fields["own"], fields["own_count"] = reader.array("OWNT", 4)
            fields["states"], _ = reader.array("STAT", 4, exactly=groups * rans.STATE_WORDS)
            fields["words"], fields["word_count"] = reader.array("STRM", 2)
            if self.raw_bits:
                fields["raw"], _ = reader.array("RAWB", 4, exactly=block.tokens * groups * self.raw_bits)
        status = device.scratch("tuned.symbols.status", (len(blocks), groups), np.uint32)
        device.launch(
            "tuned_symbols_decode", len(blocks) * groups, device.to_device(blocks), self._tables(device).families,
            status, np.uint32(groups),
        )  # fmt: skip
        rans.check_status(device.to_host(status), batch)

    def _describe(self, batch: Batch, symbols: Array, riders: Array, device: Device) -> np.ndarray:
        count, groups, pitch, lanes = symbols.shape
        blocks = np.zeros(count, BLOCK)
        blocks["symbols"] = device.address(symbols) + np.arange(count) * (groups * pitch * lanes)
        blocks["riders"] = device.address(riders) + np.arange(count) * (groups * lanes * 2)
        blocks["tokens"], blocks["pitch"] = [block.tokens for block in batch.blocks], pitch
        blocks["head_dim"] = batch.blocks[0].plane.head_dim
        blocks["raw_bits"], blocks["alphabet"] = self.raw_bits, self.alphabet
        return blocks

    def _tables(self, device: Device) -> rans.DeviceTables:
        return rans.DeviceTables((self.alphabet,), device)
