"""CacheGen: LMCache's quantization, bit for bit, with a better entropy coder behind it.

A token's channels are divided by the largest magnitude among them and rounded to ``bins - 1`` symbols (Liu et al.,
SIGCOMM 2024, arXiv:2310.07240, as LMCache 0.5.6 does it): the symbols are LMCache's own. They are coded by rANS with a
12-bit table index per channel in place of a table. Each block holds

    TOKN  per tile of 32 tokens: entries of the max tensor, packed to their spread, and the mask of exact tokens
    TABL  per channel: index of its table in the family
    STAT  per 32 channels: length of their stream, final states
    STRM  the streams
    RAWB  the low bits of symbols beyond the coder's 32, if any
    ROWS  exact tokens but the first (16-bit types), which rides in the streams' start states

The layout is normative in docs/format.md, the kernels are in kernels/cachegen.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch, Codec, Encoded, Errors, Sections
from kvzip.coding import bins as schedule
from kvzip.coding import rans
from kvzip.coding.sections import SectionReader, as_bytes, total_errors
from kvzip.coding.tables import MAX_SYMBOLS, TABLE_BITS
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import ELEMENT_SUFFIX, describe_planes
from kvzip.errors import UsageError

TILE = 32
TILE_WORDS = 35

BLOCK = np.dtype(
    [(name, np.uint64) for name in ("token_words", "tables", "states", "words", "raw", "rows")]
    + [(name, np.uint32) for name in ("token_word_count", "word_count", "raw_rows", "row_count")]
    + [(name, np.uint32) for name in ("levels", "raw_bits", "family", "symbols")]
)
"""The host side of ``struct CacheGenBlock``."""


class CacheGen(Codec):
    """LMCache's symbols, entropy-coded.

    Args:
        k_bins, v_bins: bins per layer, such as ``"0-9:32,10-:16"``; LMCache's schedule for the layer count if None.
        level: 1 to 9, scales the bins by ``2 ** ((level - 5) / 2)``; 5 leaves them.
        sinks: how many of the oldest tokens of the file to keep exact; 0 for a chunk from the middle of a prompt.

    Raises:
        UsageError: a schedule that cannot be read or leaves layers out, a level or a number of sinks out of range.
    """

    name = "cachegen"

    def __init__(self, *, k_bins: str | None = None, v_bins: str | None = None, level: int = 5, sinks: int = 1) -> None:
        if not 1 <= level <= 9:
            raise UsageError(f"level must be 1 to 9, got {level}")
        if sinks < 0:
            raise UsageError(f"sinks must be 0 or more, got {sinks}")
        self.bins = {
            "key": schedule.parse(k_bins, "k_bins") if k_bins is not None else None,
            "value": schedule.parse(v_bins, "v_bins") if v_bins is not None else None,
        }
        self.level = level
        self.sinks = sinks

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"sinks": self.sinks}
        if self.level != 5:
            config["level"] = self.level
        for option, kind in (("k_bins", "key"), ("v_bins", "value")):
            if (runs := self.bins[kind]) is not None:
                config[option] = schedule.render(runs)
        return config

    def bind(self, planes: Sequence[Plane]) -> Self:
        layers = max((plane.layer for plane in planes), default=-1) + 1
        given_k = self.bins["key"] or schedule.lmcache(layers, "key")
        given_v = self.bins["value"] or schedule.lmcache(layers, "value")
        scale = 2 ** ((self.level - 5) / 2)
        return type(self)(
            k_bins=schedule.render(schedule.resolve(given_k, layers, scale, "k_bins")),
            v_bins=schedule.render(schedule.resolve(given_v, layers, scale, "v_bins")),
            sinks=self.sinks,
        )

    def supports(self, plane: Plane) -> bool:
        return plane.dtype in ELEMENT_SUFFIX and plane.kind != "bytes"

    def describe(self, plane: Plane) -> dict[str, Any]:
        return {"bins": self._bins(plane)}

    def bound(self, block: Block) -> int:
        plane, groups = block.plane, rans.groups_of(block.plane)
        tiles = -(-block.tokens // TILE)
        streams = groups * (rans.word_capacity(block.tokens) * 2 + rans.STATE_WORDS * 4 + TABLE_BITS * 4)
        raw = block.tokens * groups * _symbols(self._bins(plane))[0] * 4
        return tiles * TILE_WORDS * 4 + streams + raw + block.nbytes + 64

    def _bins(self, plane: Plane) -> int:
        runs = self.bins["value" if plane.kind == "value" else "key"]
        if runs is None:
            raise ValueError("bind() the codec to a cache first")
        return schedule.lookup(runs, plane.layer)

    # ------------------------------------------------------------------------------------------------------- encoding

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        xp, count = device.xp, len(batch.blocks)
        groups, suffix = rans.groups_of(batch.blocks[0].plane), ELEMENT_SUFFIX[batch.blocks[0].plane.dtype]
        tiles = max(-(-block.tokens // TILE) for block in batch.blocks)
        planes = device.to_device(describe_planes(batch.arrays, device))
        blocks, tables = self._describe(batch, device)

        slots = device.scratch("cachegen.slots", (count, tiles, TILE_WORDS), np.uint32)
        slot_words = device.scratch("cachegen.slot_words", (count, tiles), np.uint32)
        maxima = device.scratch("cachegen.maxima", (count, tiles * TILE), np.float32)
        exact = device.scratch("cachegen.exact", (count, tiles), np.uint32)
        sinks = np.array([max(0, self.sinks - block.start) for block in batch.blocks], np.uint32)
        device.launch(
            f"cachegen_tiles_{suffix}", count * tiles, planes, device.to_device(sinks), slots, slot_words, maxima,
            exact, np.uint32(tiles),
        )  # fmt: skip

        index = xp.empty((count, groups, TABLE_BITS), np.uint32)
        states = xp.empty((count, groups, rans.STATE_WORDS), np.uint32)
        raw = xp.empty(
            sum(_raw_words(block, groups, fields) for block, fields in zip(batch.blocks, blocks, strict=True)),
            np.uint32,
        )
        errors = device.scratch("cachegen.errors", (count, groups, 3), np.float32)
        blocks["tables"] = device.address(index) + np.arange(count) * (groups * TABLE_BITS * 4)
        blocks["states"] = device.address(states) + np.arange(count) * (groups * rans.STATE_WORDS * 4)
        raw_starts = _starts(
            [_raw_words(block, groups, fields) for block, fields in zip(batch.blocks, blocks, strict=True)]
        )
        blocks["raw"] = device.address(raw) + raw_starts[:-1] * 4
        capacity = rans.word_capacity(tiles * TILE)
        words = device.scratch("cachegen.words", (count * groups, capacity), np.uint16)
        device.launch(
            f"cachegen_encode_{suffix}", count * groups, planes, device.to_device(blocks), maxima, exact,
            tables.families, tables.costs, tables.variances,
            device.scratch("cachegen.symbols", (count * groups, tiles * TILE, 32), np.uint8), words, errors,
            np.uint32(groups), np.uint32(tiles), np.uint32(capacity),
        )  # fmt: skip

        lengths = device.to_host(states[:, :, 0]).astype(np.int64)
        streams, stream_starts = rans.gather_runs(words, lengths.reshape(-1), capacity, groups, device, from_end=True)
        slot_counts = device.to_host(slot_words).astype(np.int64) * 2
        tokens, token_starts = rans.gather_runs(slots, slot_counts.reshape(-1), TILE_WORDS * 2, tiles, device)
        exact_masks, sums = device.to_host(exact), device.to_host(errors)

        encoded = []
        for i, block in enumerate(batch.blocks):
            kept = _exact_tokens(exact_masks[i])
            sections: dict[str, Array] = {
                "TOKN": tokens[token_starts[i] : token_starts[i + 1]],
                "TABL": as_bytes(index[i]),
                "STAT": as_bytes(states[i]),
                "STRM": streams[stream_starts[i] : stream_starts[i + 1]],
            }
            if blocks["raw_bits"][i]:
                rows = (block.tokens - len(kept)) * groups * int(blocks["raw_bits"][i])
                sections["RAWB"] = as_bytes(raw[raw_starts[i] : raw_starts[i] + rows])
            if len(kept) > _riders(block.plane):
                array = batch.arrays[i]
                sections["ROWS"] = as_bytes(xp.ascontiguousarray(array[device.to_device(kept[_riders(block.plane) :])]))
            encoded.append(Encoded(sections, [Errors(*total_errors(sums[i]))]))
        return encoded

    # ------------------------------------------------------------------------------------------------------- decoding

    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        count = len(batch.blocks)
        groups, suffix = rans.groups_of(batch.blocks[0].plane), ELEMENT_SUFFIX[batch.blocks[0].plane.dtype]
        blocks, tables = self._describe(batch, device)
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
            f"cachegen_decode_{suffix}", count * groups, planes, device.to_device(blocks), tables.families, status,
            np.uint32(groups),
        )  # fmt: skip
        rans.check_status(device.to_host(status), batch)

    def _describe(self, batch: Batch, device: Device) -> tuple[np.ndarray, rans.DeviceTables]:
        """Descriptors with what follows from the bins filled in, and the table families that they name."""
        bins = [self._bins(block.plane) for block in batch.blocks]
        parameters = [_symbols(b) for b in bins]
        alphabets = sorted({symbols for _, symbols in parameters})
        blocks = np.zeros(len(bins), BLOCK)
        blocks["levels"] = [b // 2 - 1 for b in bins]
        blocks["raw_bits"] = [raw_bits for raw_bits, _ in parameters]
        blocks["symbols"] = [symbols for _, symbols in parameters]
        blocks["family"] = [alphabets.index(symbols) for _, symbols in parameters]
        return blocks, rans.DeviceTables.of(alphabets, device)


def _symbols(bins: int) -> tuple[int, int]:
    """Raw low bits and coded alphabet of ``bins - 1`` symbols: the coder takes 32 at most."""
    symbols, raw_bits = 2 * (bins // 2 - 1) + 1, 0
    while -(-symbols >> raw_bits) > MAX_SYMBOLS or (symbols - 1 >> raw_bits) >= MAX_SYMBOLS:
        raw_bits += 1
    return raw_bits, (symbols - 1 >> raw_bits) + 1


def _riders(plane: Plane) -> int:
    """How many exact tokens ride in the start states: one, if a value fits in 16 bits."""
    return 1 if plane.itemsize == 2 else 0


def _raw_words(block: Block, groups: int, fields: np.void) -> int:
    return block.tokens * groups * int(fields["raw_bits"])


def _starts(sizes: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _exact_tokens(masks: np.ndarray) -> np.ndarray:
    """Indexes of the tokens whose bits are set in ``masks``, uint32 ``[tiles]``."""
    return np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
