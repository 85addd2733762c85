"""LMCache's own tables and streams: a block is one call of LMCache. Beside ``TOKN`` and ``ROWS`` each block holds

    CNTS  per channel: how often each symbol occurs, from which its table follows
    LENS  per 256 tokens and channel: bytes of the stream, uint16, channels filled up to a multiple of 32
    STRM  the streams: those of the same 256 tokens side by side, channel after channel

Exact tokens are coded too, as LMCache would, so that streams and tables are LMCache's for any input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvzip.cache import Block
from kvzip.codecs.base import Batch, Encoded, Errors, Sections
from kvzip.codecs.cachegen import symbols as planes_of_symbols
from kvzip.codecs.cachegen.coder import Coder, levels_of
from kvzip.codecs.cachegen.tokens import TILE, TILE_WORDS, Tokens, rows_section
from kvzip.coding import range_coder, rans
from kvzip.coding.sections import SectionReader, as_bytes, total_errors
from kvzip.devices.base import Array, Device
from kvzip.errors import LimitError


class RangeCoder(Coder):
    """The arithmetic coder of LMCache, bit for bit."""

    most_bins = range_coder.SYMBOLS

    def bound(self, block: Block, bins: int) -> int:
        groups = rans.groups_of(block.plane)
        tiles, streams = -(-block.tokens // TILE), range_coder.streams_of(block.tokens)
        per_group = range_coder.COUNT_WORDS * 4 + streams * range_coder.LANES * (range_coder.STREAM_BYTES + 2)
        return tiles * TILE_WORDS * 4 + groups * per_group + block.nbytes + 64

    def encode(self, batch: Batch, bins: Sequence[int], sinks: int, device: Device) -> list[Encoded]:
        blocks, groups = _describe(batch, device), rans.groups_of(batch.blocks[0].plane)
        tokens = Tokens.of(batch, bins, sinks, device)
        symbols = planes_of_symbols.symbol_scratch(batch, device)
        errors = planes_of_symbols.quantize(batch, bins, tokens, symbols, device)
        counts = range_coder.count_symbols(blocks, groups, device)
        tables = range_coder.make_tables(blocks, counts, groups, device)
        streams, starts, lengths = range_coder.encode_streams(blocks, groups, device)
        del tables  # their addresses are in the descriptors until here
        packed = range_coder.pack_counts(blocks, _alphabets(bins), counts, groups, device)
        token_sections, exact, sums = tokens.sections(device), tokens.exact_tokens(device), device.to_host(errors)
        encoded = []
        for i, block in enumerate(batch.blocks):
            sections: dict[str, Array] = {
                "TOKN": token_sections[i],
                "CNTS": packed[i],
                "LENS": as_bytes(lengths[i, : range_coder.streams_of(block.tokens)]),
                "STRM": streams[starts[i] : starts[i + 1]],
            }
            if len(exact[i]):
                sections["ROWS"] = rows_section(batch.arrays[i], exact[i], device)
            encoded.append(Encoded(sections, [Errors(*total_errors(sums[i]))]))
        return encoded

    def decode(self, batch: Batch, bins: Sequence[int], sections: Sequence[Sections], device: Device) -> None:
        blocks, groups = _describe(batch, device), rans.groups_of(batch.blocks[0].plane)
        packed = np.zeros(len(blocks), range_coder.PACKED)
        packed["alphabet"] = _alphabets(bins)
        tokens = np.zeros(len(blocks), planes_of_symbols.TOKEN_SECTION)
        for i, (block, parts) in enumerate(zip(batch.blocks, sections, strict=True)):
            reader = SectionReader(block, parts, device)
            tokens["words"][i], tokens["word_count"][i] = reader.array("TOKN", 4)
            packed["words"][i], packed["word_count"][i] = reader.array("CNTS", 4)
            lengths = range_coder.streams_of(block.tokens) * groups * range_coder.LANES
            blocks["lengths"][i], _ = reader.array("LENS", 2, exactly=lengths)
            blocks["bytes"][i], blocks["byte_count"][i] = reader.array("STRM", 1)
            tokens["rows"][i], values = reader.array("ROWS", block.plane.itemsize, optional=True)
            tokens["row_count"][i] = values // block.plane.channels
            reader.done()
        counts, of_counts = range_coder.unpack_counts(blocks, packed, groups, device)
        tables = range_coder.make_tables(blocks, counts, groups, device)
        of_streams = range_coder.decode_streams(blocks, groups, device)
        symbols = planes_of_symbols.symbol_scratch(batch, device)
        maxima, exact, of_tokens = planes_of_symbols.read_tokens(batch, tokens, device)
        planes_of_symbols.dequantize(batch, bins, tokens, maxima, exact, symbols, device)
        for status in (of_counts, of_streams, of_tokens):
            rans.check_status(device.to_host(status), batch)
        del tables


def _describe(batch: Batch, device: Device) -> np.ndarray:
    """Descriptors of the blocks' symbols in scratch memory."""
    longest = max(batch.blocks, key=lambda block: block.tokens)
    if longest.tokens > range_coder.MOST_TOKENS:
        raise LimitError(
            f"the range coder takes blocks of at most {range_coder.MOST_TOKENS} tokens, not {longest.tokens}; "
            "use smaller blocks, or coder=rans",
            code="range-block",
        )
    symbols = planes_of_symbols.symbol_scratch(batch, device)
    blocks = np.zeros(len(batch.blocks), range_coder.BLOCK)
    blocks["symbols"] = device.address(symbols) + np.arange(len(blocks)) * symbols[0].size
    blocks["tokens"] = [block.tokens for block in batch.blocks]
    blocks["channels"] = [block.plane.channels for block in batch.blocks]
    return blocks


def _alphabets(bins: Sequence[int]) -> np.ndarray:
    return np.array([2 * levels_of(b) + 1 for b in bins], np.uint32)
