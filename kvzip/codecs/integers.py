"""int8 and int4: integers with a scale per token and head.

A scale takes 16 bits: with head_dim 128 int8 is 8.125 bits a number, and far better than fp8. Each block holds

    WORD  codes, packed along channels
    SCAL  bfloat16 scales ``[tokens, heads]``
    MINS  minima ``[tokens, heads]`` of the plane's type, unless symmetric
    MASK, ROWS  tokens that stay as they are, if any (:mod:`kvzip.coding.exact`)

and with ``tuned`` the codes entropy-coded, ``TABL``, ``STAT`` and ``STRM``, in place of ``WORD``; then int8's lowest
3 bits, which are noise, are in ``RAWB``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch, Codec, Encoded, Errors, Sections
from kvzip.coding import exact, rans, symbols
from kvzip.coding.sections import SectionReader, as_bytes, total_errors
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import ELEMENT_SUFFIX, describe_planes, has_numbers

FIRST_UNFIT = {"bfloat16": 0x7E80, "float16": 0x7C00, "float32": 0x7E800000}
"""The bits of the smallest magnitude that is kept as it is: 2^126, so that no difference overflows, or infinity."""

SYMBOL_BITS = 5
"""What the entropy coder takes of a code."""

BLOCK = np.dtype(
    exact.FIELDS
    + [(name, np.uint64) for name in ("words", "symbols", "low", "scales", "minima")]
    + [("symbol_tokens", np.uint32), ("reserved", np.uint32)]
)
"""The host side of ``struct IntegerBlock``."""


class Integers(Codec):
    """What int8 and int4 share.

    Args:
        symmetric: codes on both sides of 0; else each token and head also has a minimum, for numbers with an offset.
        tuned: entropy-code the codes.
    """

    bits: ClassVar[int]

    def __init__(self, *, symmetric: bool = True, tuned: bool = False) -> None:
        self.symmetric = symmetric
        self.tuned = tuned

    def config(self) -> dict[str, Any]:
        return {"symmetric": self.symmetric, "tuned": self.tuned}

    @classmethod
    def ladder(cls) -> list[str]:
        return ["", "tuned=true", "symmetric=false", "symmetric=false,tuned=true"]

    def supports(self, plane: Plane) -> bool:
        return has_numbers(plane)

    def describe(self, plane: Plane) -> dict[str, Any]:
        """``bits`` of a code, and without entropy coding ``stored_bits`` of a number, its scale included."""
        if self.tuned:
            return {"bits": self.bits}
        shared = 16 if self.symmetric else 16 + plane.itemsize * 8
        return {"bits": self.bits, "stored_bits": round(self.bits + shared / plane.head_dim, 3)}

    def bound(self, block: Block) -> int:
        plane = block.plane
        shared = block.tokens * plane.heads * (2 if self.symmetric else 2 + plane.itemsize)
        if not self.tuned:
            return self._words(block) * 4 + shared + exact.bound(block)
        groups = rans.groups_of(plane)
        return symbols.bound(block.tokens, groups) + block.tokens * groups * self._low * 4 + shared + exact.bound(block)

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        xp, plane, count, tiles = device.xp, batch.blocks[0].plane, len(batch.blocks), exact.most_tiles(batch)
        coded = np.array([block.tokens for block in batch.blocks])
        codes = symbols.room(batch, device, packed=not self.tuned)
        blocks = symbols.quantizer_blocks(BLOCK, codes, coded, device)
        stored: dict[str, list[Array]] = {"scales": [xp.empty(n * plane.heads, np.uint16) for n in coded.tolist()]}
        if not self.symmetric:
            raw = np.dtype(f"u{plane.itemsize}")
            stored["minima"] = [xp.empty(n * plane.heads, raw) for n in coded.tolist()]
        if self._low:
            stored["low"] = [xp.empty(n * rans.groups_of(plane) * self._low, np.uint32) for n in coded.tolist()]
        if not self.tuned:
            stored["words"] = [xp.empty(self._words(block), np.uint32) for block in batch.blocks]
        for field, arrays in stored.items():
            blocks[field] = [device.address(array) for array in arrays]
        masks = device.scratch("integers.masks", (count, tiles), np.uint32)
        blocks["masks"] = device.address(masks) + np.arange(count) * (tiles * 4)
        errors = device.scratch("integers.errors", (count, tiles, 3), np.float32)
        device.launch(
            self._kernel("encode", plane), count * tiles, device.to_device(describe_planes(batch.arrays, device)),
            device.to_device(blocks), errors,
            *map(np.uint32, (tiles, FIRST_UNFIT[plane.dtype], self.symmetric, not self.tuned)),
        )  # fmt: skip
        streams: Sequence[Sections] = [{}] * count
        if self.tuned:
            streams = symbols.encode(codes, coded, plane.channels, self._alphabet, device)
        kept = exact.sections_of(batch, device.to_host(masks), coded.tolist(), device)
        sums = device.to_host(errors)
        encoded = []
        for i in range(count):
            own = {tag: as_bytes(stored[field][i]) for tag, field in _TAGS.items() if field in stored}
            encoded.append(Encoded({**streams[i], **own, **kept[i]}, [Errors(*total_errors(sums[i]))]))
        return encoded

    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        plane, count, tiles = batch.blocks[0].plane, len(batch.blocks), exact.most_tiles(batch)
        coded = np.array([block.tokens for block in batch.blocks])
        codes = symbols.room(batch, device, packed=not self.tuned)
        blocks = symbols.quantizer_blocks(BLOCK, codes, coded, device)
        readers = [SectionReader(block, parts, device) for block, parts in zip(batch.blocks, sections, strict=True)]
        if self.tuned:
            symbols.decode(codes, coded, plane.channels, self._alphabet, batch, readers, device)
        for fields, block, parts, reader in zip(blocks, batch.blocks, sections, readers, strict=True):
            groups = block.tokens * plane.heads
            fields["scales"], _ = reader.array("SCAL", 2, exactly=groups)
            if not self.symmetric:
                fields["minima"], _ = reader.array("MINS", plane.itemsize, exactly=groups)
            if self._low:
                low = block.tokens * rans.groups_of(plane) * self._low
                fields["low"], _ = reader.array("RAWB", 4, exactly=low)
            if not self.tuned:
                fields["words"], _ = reader.array("WORD", 4, exactly=self._words(block))
            exact.read(fields, block, block.tokens, parts, reader)
            reader.done()
        status = device.scratch("integers.status", (count, tiles), np.uint32)
        device.launch(
            self._kernel("decode", plane), count * tiles, device.to_device(describe_planes(batch.arrays, device)),
            device.to_device(blocks), status,
            *map(np.uint32, (tiles, self.symmetric, not self.tuned)),
        )  # fmt: skip
        rans.check_status(device.to_host(status), batch)

    @property
    def _low(self) -> int:
        """Low bits of a code that are not entropy-coded."""
        return max(0, self.bits - SYMBOL_BITS) if self.tuned else 0

    @property
    def _alphabet(self) -> int:
        return 1 << min(self.bits, SYMBOL_BITS)

    def _kernel(self, verb: str, plane: Plane) -> str:
        return f"integers_{verb}{self.bits}_{ELEMENT_SUFFIX[plane.dtype]}"

    def _words(self, block: Block) -> int:
        return block.tokens * -(-block.plane.channels * self.bits // 32)


_TAGS = {"WORD": "words", "RAWB": "low", "SCAL": "scales", "MINS": "minima"}


class Int8(Integers):
    """8 bits a number."""

    name = "int8"
    bits = 8


class Int4(Integers):
    """4 bits a number."""

    name = "int4"
    bits = 4
