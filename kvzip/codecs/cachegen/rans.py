"""rANS with a 12-bit table index per channel in place of a table. Each block holds, beside ``TOKN`` and ``ROWS``,

    TABL  per channel: index of its table in the family
    STAT  per 32 channels: length of their stream, final states
    STRM  the streams
    RAWB  the low bits of symbols beyond the coder's 32, if any

The first exact token of 16-bit types rides in the streams' start states. The kernels are in kernels/cachegen.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch, Encoded, Errors, Sections
from kvzip.codecs.cachegen.coder import Coder, levels_of
from kvzip.codecs.cachegen.tokens import TILE, TILE_WORDS, Tokens, element_suffix, rows_section
from kvzip.coding import rans
from kvzip.coding.bins import MOST
from kvzip.coding.sections import SectionReader, as_bytes, total_errors
from kvzip.coding.tables import MAX_SYMBOLS, TABLE_BITS
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import describe_planes

BLOCK = np.dtype(
    [(name, np.uint64) for name in ("token_words", "tables", "states", "words", "raw", "rows")]
    + [(name, np.uint32) for name in ("token_word_count", "word_count", "raw_rows", "row_count")]
    + [(name, np.uint32) for name in ("levels", "raw_bits", "family", "symbols")]
)
"""The host side of ``struct CacheGenBlock``."""


class RansCoder(Coder):
    """Interleaved rANS on the table family of :mod:`kvzip.coding.tables`."""

    most_bins = MOST

    def bound(self, block: Block, bins: int) -> int:
        groups = rans.groups_of(block.plane)
        tiles = -(-block.tokens // TILE)
        streams = groups * (rans.word_capacity(block.tokens) * 2 + rans.STATE_WORDS * 4 + TABLE_BITS * 4)
        raw = block.tokens * groups * _symbols(bins)[0] * 4
        return tiles * TILE_WORDS * 4 + streams + raw + block.nbytes + 64

    def encode(self, batch: Batch, bins: Sequence[int], sinks: int, device: Device) -> list[Encoded]:
        xp, count = device.xp, len(batch.blocks)
        groups = rans.groups_of(batch.blocks[0].plane)
        tokens = Tokens.of(batch, bins, sinks, device)
        blocks, tables = _describe(bins, device)

        index = xp.empty((count, groups, TABLE_BITS), np.uint32)
        states = xp.empty((count, groups, rans.STATE_WORDS), np.uint32)
        raw_starts = _starts(
            [block.tokens * groups * _symbols(b)[0] for block, b in zip(batch.blocks, bins, strict=True)]
        )
        raw = xp.empty(int(raw_starts[-1]), np.uint32)
        errors = device.scratch("cachegen.errors", (count, groups, 3), np.float32)
        blocks["tables"] = device.address(index) + np.arange(count) * (groups * TABLE_BITS * 4)
        blocks["states"] = device.address(states) + np.arange(count) * (groups * rans.STATE_WORDS * 4)
        blocks["raw"] = device.address(raw) + raw_starts[:-1] * 4
        capacity = rans.word_capacity(tokens.tiles * TILE)
        words = device.scratch("cachegen.words", (count * groups, capacity), np.uint16)
        device.launch(
            f"cachegen_encode_{element_suffix(batch)}", count * groups, tokens.planes, device.to_device(blocks),
            tokens.scales, tokens.exact,
            tables.families, tables.costs, tables.variances,
            device.scratch("cachegen.symbols", (count * groups, tokens.tiles * TILE, 32), np.uint8), words, errors,
            np.uint32(groups), np.uint32(tokens.tiles), np.uint32(capacity),
        )  # fmt: skip

        lengths = device.to_host(states[:, :, 0]).astype(np.int64)
        streams, stream_starts = rans.gather_runs(words, lengths.reshape(-1), capacity, groups, device, from_end=True)
        token_sections, exact, sums = tokens.sections(device), tokens.exact_tokens(device), device.to_host(errors)

        encoded = []
        for i, block in enumerate(batch.blocks):
            sections: dict[str, Array] = {
                "TOKN": token_sections[i],
                "TABL": as_bytes(index[i]),
                "STAT": as_bytes(states[i]),
                "STRM": streams[stream_starts[i] : stream_starts[i + 1]],
            }
            if blocks["raw_bits"][i]:
                rows = (block.tokens - len(exact[i])) * groups * int(blocks["raw_bits"][i])
                sections["RAWB"] = as_bytes(raw[raw_starts[i] : raw_starts[i] + rows])
            kept = exact[i][_riders(block.plane) :]
            if len(kept):
                sections["ROWS"] = rows_section(batch.arrays[i], kept, device)
            encoded.append(Encoded(sections, [Errors(*total_errors(sums[i]))]))
        return encoded

    def decode(self, batch: Batch, bins: Sequence[int], sections: Sequence[Sections], device: Device) -> None:
        count = len(batch.blocks)
        groups = rans.groups_of(batch.blocks[0].plane)
        blocks, tables = _describe(bins, device)
        for fields, block, parts in zip(blocks, batch.blocks, sections, strict=True):
            reader = SectionReader(block, parts, device)
            fields["token_words"], fields["token_word_count"] = reader.array("TOKN", 4)
            fields["tables"], _ = reader.array("TABL", 4, exactly=groups * TABLE_BITS)
            fields["states"], _ = reader.array("STAT", 4, exactly=groups * rans.STATE_WORDS)
            fields["words"], fields["word_count"] = reader.array("STRM", 2)
            if fields["raw_bits"]:
                fields["raw"], words = reader.array("RAWB", 4)
                fields["raw_rows"] = words // (groups * int(fields["raw_bits"]))
            fields["rows"], values = reader.array("ROWS", block.plane.itemsize, optional=True)
            fields["row_count"] = values // block.plane.channels
            reader.done()
        planes = device.to_device(describe_planes(batch.arrays, device))
        status = device.scratch("cachegen.status", (count, groups), np.uint32)
        device.launch(
            f"cachegen_decode_{element_suffix(batch)}", count * groups, planes, device.to_device(blocks),
            tables.families, status, np.uint32(groups),
        )  # fmt: skip
        rans.check_status(device.to_host(status), batch)


def _describe(bins: Sequence[int], device: Device) -> tuple[np.ndarray, rans.DeviceTables]:
    """Descriptors with what follows from the bins filled in, and the table families that they name."""
    parameters = [_symbols(b) for b in bins]
    alphabets = sorted({symbols for _, symbols in parameters})
    blocks = np.zeros(len(bins), BLOCK)
    blocks["levels"] = [levels_of(b) for b in bins]
    blocks["raw_bits"] = [raw_bits for raw_bits, _ in parameters]
    blocks["symbols"] = [symbols for _, symbols in parameters]
    blocks["family"] = [alphabets.index(symbols) for _, symbols in parameters]
    return blocks, rans.DeviceTables(tuple(alphabets), device)


def _symbols(bins: int) -> tuple[int, int]:
    """Raw low bits and coded alphabet of ``bins - 1`` symbols: the coder takes 32 at most."""
    symbols, raw_bits = 2 * levels_of(bins) + 1, 0
    while -(-symbols >> raw_bits) > MAX_SYMBOLS or (symbols - 1 >> raw_bits) >= MAX_SYMBOLS:
        raw_bits += 1
    return raw_bits, (symbols - 1 >> raw_bits) + 1


def _riders(plane: Plane) -> int:
    """How many exact tokens ride in the start states: one, if a value fits in 16 bits."""
    return 1 if plane.itemsize == 2 else 0


def _starts(sizes: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
