"""TurboQuant tuned: rotated rows on a uniform grid, entropy-coded: typed calls into kernels/turboquant_tuned.cu.

A channel's mean over the block is removed, the row (a token of one head) is rotated, and rounded to a step that follows
the row's rms; the symbols go through rANS, the means ride in the start states.

    CODE  uint16 [tiles of 32 tokens][heads]: 12 bits of the smallest step's code, 4 bits of width
    SPRD  per tile and head: `width` words of bits, the steps of its rows above the smallest, in half octaves
    TABL, OWNT, STAT, STRM  the symbols (kvzip/coding/symbols.py), groups being 32 channels of a head
    RAWB  8 bits only: the low bits of symbols, by group, then token: words of bits
    EXCT, ROWS  rows of attention sinks, with NaN, Inf, or beyond float32 when squared (exact.py)

A step is ``2 ** ((code - 512) / 8)``. A uniform step with an entropy coder takes 1/4 bit more than the rate-distortion
bound at any rate (Gish and Pierce, IEEE Trans. IT 14(5), 1968), where a codebook takes more and more as bits rise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch, Encoded, Errors, Sections
from kvzip.codecs.turboquant import exact
from kvzip.codecs.turboquant.rotation import rotation
from kvzip.coding import rans
from kvzip.coding import symbols as coder
from kvzip.coding.sections import SectionReader, as_bytes, corrupt_block, total_errors
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import ELEMENT_SUFFIX, describe_planes

BLOCK = np.dtype(
    [(name, np.uint64) for name in ("symbols", "means", "rotation", "codes", "spreads", "starts", "low")]
    + [(name, np.uint32) for name in ("pitch", "alphabet", "sinks")]
    + [(name, np.float32) for name in ("grain", "reach", "gain")]
)
"""The host side of ``struct TunedBlock``."""

WIDTH_SHIFT = 12
MAX_WIDTH = 9
SPREAD_WORDS = 12

STEPS = {3: 0.6275, 4: 0.3225, 8: 0.3225 / 8}
"""Step over rms, by bits: on Gaussian rows the error is that of a Lloyd-Max codebook of 3 and of 4 bits; the 8 bits
reach as far as the 4 do.
"""
ALPHABETS = {3: 16, 4: 32, 8: 256}
LOW_BITS = {3: 0, 4: 0, 8: 3}
"""Of symbols, stored as they are: the coder takes 32 symbols."""

ROUNDING = 1.0905077326652577
"""2 ** (1/8): codes are rounded down, half a quarter octave of a square is added first."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """Rows of keys or values at the fidelity of 3, 4 or 8 ``bits`` a number.

    Args:
        keep_norm: scale what is restored so that rows keep their length, as TurboQuant's norm correction does, which
            leaves scores of keys with queries least biased; else for the least squared error.
        sinks: how many of the oldest tokens of the file to keep exact.
    """

    bits: int
    keep_norm: bool
    sinks: int

    def bound(self, block: Block) -> int:
        tiles, groups = exact.tiles_of(block) * block.plane.heads, groups_of(block.plane)
        streams = coder.bound(block.tokens, groups, sharing=True) + groups * block.tokens * LOW_BITS[self.bits] * 4
        return tiles * (2 + MAX_WIDTH * 4) + streams + exact.bound(block)

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        xp, plane, count = device.xp, batch.blocks[0].plane, len(batch.blocks)
        tiles, groups, suffix = max(map(exact.tiles_of, batch.blocks)), groups_of(plane), _suffix(batch)
        planes = device.to_device(describe_planes(batch.arrays, device))
        symbols, means = self._scratch(batch, device)
        codes = xp.empty((count, tiles, plane.heads), np.uint16)
        spreads = device.scratch("tuned.spreads", (codes.size, SPREAD_WORDS), np.uint32)
        widths = device.scratch("tuned.widths", codes.shape, np.uint32)
        masks = device.scratch("tuned.masks", codes.shape, np.uint32)
        sums = device.scratch("tuned.sums", (count, tiles * plane.heads, 3), np.float32)
        low = [xp.empty(block.tokens * groups * LOW_BITS[self.bits], np.uint32) for block in batch.blocks]
        blocks = self._describe(batch, symbols, means, device)
        if LOW_BITS[self.bits]:
            blocks["low"] = [device.address(words) for words in low]
        blocks["sinks"] = [min(max(0, self.sinks - block.start), block.tokens) for block in batch.blocks]
        described = device.to_device(blocks)
        device.launch(f"tuned_means_{suffix}", count * groups, planes, described, np.uint32(groups))
        device.launch(
            f"tuned_encode_{suffix}", codes.size, planes, described, codes, spreads, widths, masks, sums,
            np.uint32(tiles),
        )  # fmt: skip
        coded = coder.encode(
            symbols, _tokens(batch), plane.head_dim, self._alphabet, device, sharing=True, riders=means
        )
        halves = device.to_host(widths).astype(np.int64).reshape(-1) * 2
        packed, starts = rans.gather_runs(spreads, halves, SPREAD_WORDS * 2, tiles * plane.heads, device)
        host_masks, host_sums = device.to_host(masks), device.to_host(sums)
        encoded = []
        for i, block in enumerate(batch.blocks):
            own = exact.tiles_of(block)
            sections: dict[str, Array] = {"CODE": as_bytes(codes[i, :own]), "SPRD": packed[starts[i] : starts[i + 1]]}
            sections |= coded[i]
            if low[i].size:
                sections["RAWB"] = as_bytes(low[i])
            sections |= exact.exact_sections(batch.arrays[i], host_masks[i, :own], device)
            encoded.append(Encoded(sections, [Errors(*total_errors(host_sums[i]))]))
        return encoded

    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        plane, count = batch.blocks[0].plane, len(batch.blocks)
        heads, groups, low_bits = plane.heads, groups_of(plane), LOW_BITS[self.bits]
        tiles = max(map(exact.tiles_of, batch.blocks))
        symbols, means = self._scratch(batch, device)
        blocks = self._describe(batch, symbols, means, device)
        starts = np.zeros((count, tiles * heads), np.uint32)
        kept, readers = [], []
        for i, (block, parts) in enumerate(zip(batch.blocks, sections, strict=True)):
            rest = dict(parts)
            kept.append(exact.ExactRows.take(block, rest, device))
            reader = SectionReader(block, rest, device)
            blocks["codes"][i], own = reader.array("CODE", 2, exactly=exact.tiles_of(block) * heads)
            blocks["spreads"][i], words = reader.array("SPRD", 4)
            starts[i, :own] = _starts(block, np.asarray(device.to_host(parts["CODE"])), words)
            if low_bits:
                blocks["low"][i], _ = reader.array("RAWB", 4, exactly=block.tokens * groups * low_bits)
            readers.append(reader)
        coder.decode(
            symbols, _tokens(batch), plane.head_dim, self._alphabet, batch, readers, device, sharing=True, riders=means
        )
        for reader in readers:
            reader.done()
        device_starts = device.to_device(starts)
        blocks["starts"] = device.address(device_starts) + np.arange(count) * (tiles * heads * 4)
        device.launch(
            f"tuned_decode_{_suffix(batch)}", count * tiles * heads,
            device.to_device(describe_planes(batch.arrays, device)), device.to_device(blocks), np.uint32(tiles),
        )  # fmt: skip
        for rows, array in zip(kept, batch.arrays, strict=True):
            if rows is not None:
                rows.put(array, device)

    @property
    def _alphabet(self) -> int:
        """Of the symbols that are coded."""
        return ALPHABETS[self.bits] >> LOW_BITS[self.bits]

    def _scratch(self, batch: Batch, device: Device) -> tuple[Array, Array]:
        """Symbols uint8 ``[blocks, groups, tokens, 32]``, means uint16 ``[blocks, groups, 32]``."""
        tokens = max(block.tokens for block in batch.blocks)
        shape = (len(batch.blocks), groups_of(batch.blocks[0].plane), tokens, rans.LANES)
        symbols = device.scratch("tuned.symbols", shape, np.uint8)
        return symbols, device.scratch("tuned.means", (*shape[:2], rans.LANES), np.uint16)

    def _describe(self, batch: Batch, symbols: Array, means: Array, device: Device) -> np.ndarray:
        count, groups, pitch, lanes = symbols.shape
        step, alphabet, head_dim = STEPS[self.bits], ALPHABETS[self.bits], batch.blocks[0].plane.head_dim
        noise = step * step / 12
        blocks = np.zeros(count, BLOCK)
        blocks["symbols"] = device.address(symbols) + np.arange(count) * (groups * pitch * lanes)
        blocks["means"] = device.address(means) + np.arange(count) * (groups * lanes * 2)
        blocks["rotation"] = [device.address(rotation(block.plane.layer, head_dim, device)) for block in batch.blocks]
        blocks["pitch"], blocks["alphabet"] = pitch, alphabet
        blocks["grain"] = step * step / head_dim * ROUNDING
        blocks["reach"] = ROUNDING / (alphabet / 2 - 0.5) ** 2
        blocks["gain"] = 1 / math.sqrt(1 + noise) if self.keep_norm else 1 / (1 + noise)
        return blocks


def groups_of(plane: Plane) -> int:
    """Warps that code a plane's symbols: 32 channels of a head each."""
    return plane.heads * -(-plane.head_dim // rans.LANES)


def _tokens(batch: Batch) -> np.ndarray:
    return np.array([block.tokens for block in batch.blocks])


def _starts(block: Block, codes: np.ndarray, words: int) -> np.ndarray:
    """Where the words of each tile and head begin. Raises CorruptError unless there are exactly so many words."""
    widths = codes.view(np.uint16) >> WIDTH_SHIFT
    ends = np.cumsum(widths, dtype=np.int64)
    if widths.max() > MAX_WIDTH or ends[-1] != words:
        raise corrupt_block(block, f"{words} words of steps do not fit their widths")
    starts: np.ndarray = ends - widths
    return starts


def _suffix(batch: Batch) -> str:
    return ELEMENT_SUFFIX[batch.blocks[0].plane.dtype]
