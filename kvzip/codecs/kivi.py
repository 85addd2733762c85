"""KIVI: keys quantized per channel in groups of tokens, values per token in groups of channels.

"KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (Liu et al., ICML 2024, arXiv:2402.02750), with words
as the authors' code packs them. The newest tokens of a plane stay as they are. Where the original divides 0 by 0, in
groups of equal numbers, kvzip gives back the number; tokens with NaN, infinities or numbers beyond float16 stay as they
are, too. Each block holds

    WORD  codes, packed: keys along tokens, values along channels
    SCAL  float16 scales, MINS float16 minima, one a group
    MASK, ROWS  tokens that stay as they are, if any (:mod:`kvzip.coding.exact`)

and with ``tuned`` the codes entropy-coded, ``TABL``, ``STAT`` and ``STRM``, in place of ``WORD``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from kvzip.cache import BLOCK_TOKENS, Block, Plane
from kvzip.codecs.base import Batch, Codec, Encoded, Errors, Read, Sections
from kvzip.coding import exact, rans, symbols
from kvzip.coding.sections import SectionReader, as_bytes, total_errors
from kvzip.devices.base import Device
from kvzip.devices.descriptors import ELEMENT_SUFFIX, describe_planes, has_numbers
from kvzip.errors import UsageError

GROUP = 32

FIRST_UNFIT = {"bfloat16": 0x4780, "float16": 0x7C00, "float32": 0x477FE001}
"""The bits of the smallest magnitude beyond float16's 65504."""

BLOCK = np.dtype(
    exact.FIELDS
    + [(name, np.uint64) for name in ("words", "symbols", "scales", "minima")]
    + [("symbol_tokens", np.uint32), ("reserved", np.uint32)]
)
"""The host side of ``struct KiviBlock``."""


class Kivi(Codec):
    """Keys per channel, values per token, in groups of 32. MLA latents are treated as keys.

    Groups of values are 32 consecutive channels of ``heads * head_dim``: where head_dim is no multiple of 32 they
    go across heads.

    Args:
        bits: 2 or 4.
        residual: how many of a plane's newest tokens stay as they are.
        tuned: entropy-code the codes.

    Raises:
        UsageError: another number of bits, or a negative residual.
    """

    name = "kivi"

    def __init__(self, *, bits: int = 4, residual: int = 128, tuned: bool = False) -> None:
        if bits not in (2, 4):
            raise UsageError(f"kivi: bits must be 2 or 4, got {bits}")
        if residual < 0:
            raise UsageError(f"kivi: residual must be 0 or more, got {residual}")
        self.bits = bits
        self.residual = residual
        self.tuned = tuned

    def config(self) -> dict[str, Any]:
        return {"bits": self.bits, "residual": self.residual, "tuned": self.tuned}

    @classmethod
    def ladder(cls) -> list[str]:
        return ["", "tuned=true", "bits=2", "bits=2,tuned=true"]

    def study(
        self, planes: Sequence[Plane], read: Read, notice: Callable[[str], None], block_tokens: int = BLOCK_TOKENS
    ) -> Self:
        longest = max((plane.tokens for plane in planes), default=0)
        if 0 < longest <= self.residual:
            notice(f"kivi: all {longest} tokens are within residual={self.residual}: nothing was quantized")
        return self

    def supports(self, plane: Plane) -> bool:
        return has_numbers(plane)

    def describe(self, plane: Plane) -> dict[str, Any]:
        """``bits`` of a code, and without entropy coding ``stored_bits`` of a number: scales and residual included."""
        if self.tuned:
            return {"bits": self.bits}
        coded = max(0, plane.tokens - self.residual)
        groups = self._groups(plane, coded)
        bits = (
            coded * plane.channels * self.bits
            + groups * 32
            + (plane.tokens - coded) * plane.channels * plane.itemsize * 8
        )
        return {"bits": self.bits, "stored_bits": round(bits / max(plane.tokens * plane.channels, 1), 3)}

    def bound(self, block: Block) -> int:
        plane, coded = block.plane, self._coded(block)
        codes = symbols.bound(coded, rans.groups_of(plane)) if self.tuned else self._words(plane, coded) * 4
        return codes + self._groups(plane, coded) * 4 + exact.bound(block)

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        found: dict[int, Encoded] = {}
        for which, kind in _by_kind(batch):
            found.update(zip(which, self._encode(_part(batch, which), kind, device), strict=True))
        return [found[i] for i in range(len(batch.blocks))]

    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        for which, kind in _by_kind(batch):
            self._decode(_part(batch, which), kind, [sections[i] for i in which], device)

    def _encode(self, batch: Batch, kind: str, device: Device) -> list[Encoded]:
        xp, plane, count = device.xp, batch.blocks[0].plane, len(batch.blocks)
        coded = np.array([self._coded(block) for block in batch.blocks])
        words = [xp.empty(0 if self.tuned else self._words(plane, tokens), np.uint32) for tokens in coded.tolist()]
        scales, minima = (
            [
                xp.empty(self._groups(block.plane, tokens), np.uint16)
                for block, tokens in zip(batch.blocks, coded.tolist(), strict=True)
            ]
            for _ in range(2)
        )
        tiles = exact.most_tiles(batch)
        masks = device.scratch("kivi.masks", (count, tiles), np.uint32)
        codes = symbols.room(batch, device, packed=not self.tuned)
        blocks = symbols.quantizer_blocks(BLOCK, codes, coded, device)
        blocks["masks"] = device.address(masks) + np.arange(count) * (tiles * 4)
        for field, arrays in (("words", words), ("scales", scales), ("minima", minima)):
            blocks[field] = [device.address(array) for array in arrays]
        errors = device.scratch("kivi.errors", (count, tiles, 3), np.float32)
        device.launch(
            self._kernel("encode", kind, plane), count * tiles,
            device.to_device(describe_planes(batch.arrays, device)), device.to_device(blocks), errors,
            *map(np.uint32, (tiles, FIRST_UNFIT[plane.dtype], not self.tuned)),
        )  # fmt: skip
        streams: Sequence[Sections] = [{"WORD": as_bytes(array)} for array in words]
        if self.tuned:
            streams = symbols.encode(codes, coded, plane.channels, 1 << self.bits, device)
        kept = exact.sections_of(batch, device.to_host(masks), coded.tolist(), device)
        sums = device.to_host(errors)
        return [
            Encoded(
                {**streams[i], "SCAL": as_bytes(scales[i]), "MINS": as_bytes(minima[i]), **kept[i]},
                [Errors(*total_errors(sums[i]))],
            )
            for i in range(count)
        ]

    def _decode(self, batch: Batch, kind: str, sections: Sequence[Sections], device: Device) -> None:
        plane, count, tiles = batch.blocks[0].plane, len(batch.blocks), exact.most_tiles(batch)
        coded = np.array([self._coded(block) for block in batch.blocks])
        codes = symbols.room(batch, device, packed=not self.tuned)
        blocks = symbols.quantizer_blocks(BLOCK, codes, coded, device)
        readers = [SectionReader(block, parts, device) for block, parts in zip(batch.blocks, sections, strict=True)]
        if self.tuned:
            symbols.decode(codes, coded, plane.channels, 1 << self.bits, batch, readers, device)
        for fields, block, parts, reader in zip(blocks, batch.blocks, sections, readers, strict=True):
            tokens = self._coded(block)
            if not self.tuned:
                fields["words"], _ = reader.array("WORD", 4, exactly=self._words(block.plane, tokens))
            fields["scales"], _ = reader.array("SCAL", 2, exactly=self._groups(block.plane, tokens))
            fields["minima"], _ = reader.array("MINS", 2, exactly=self._groups(block.plane, tokens))
            exact.read(fields, block, tokens, parts, reader)
            reader.done()
        status = device.scratch("kivi.status", (count, tiles), np.uint32)
        device.launch(
            self._kernel("decode", kind, plane), count * tiles,
            device.to_device(describe_planes(batch.arrays, device)), device.to_device(blocks), status,
            np.uint32(tiles), np.uint32(not self.tuned),
        )  # fmt: skip
        rans.check_status(device.to_host(status), batch)

    def _kernel(self, verb: str, kind: str, plane: Plane) -> str:
        return f"kivi_{verb}_{kind}{self.bits}_{ELEMENT_SUFFIX[plane.dtype]}"

    def _coded(self, block: Block) -> int:
        """How many tokens of a block are quantized: those before the plane's residual."""
        return min(max(0, block.plane.tokens - self.residual - block.start), block.tokens)

    def _words(self, plane: Plane, tokens: int) -> int:
        if _kind(plane) == "keys":
            return -(-tokens * self.bits // 32) * plane.channels
        return tokens * -(-plane.channels * self.bits // 32)

    @staticmethod
    def _groups(plane: Plane, tokens: int) -> int:
        return exact.tiles_of(tokens) * plane.channels if _kind(plane) == "keys" else tokens * rans.groups_of(plane)


def _kind(plane: Plane) -> str:
    return "values" if plane.kind == "value" else "keys"


def _by_kind(batch: Batch) -> list[tuple[list[int], str]]:
    """Which blocks are keys and which values: kernels take one kind at a time."""
    kinds = [_kind(block.plane) for block in batch.blocks]
    return [([i for i, kind in enumerate(kinds) if kind == one], one) for one in sorted(set(kinds))]


def _part(batch: Batch, which: list[int]) -> Batch:
    return Batch([batch.blocks[i] for i in which], [batch.arrays[i] for i in which])
