"""Raw: the numbers as they are, token-major. Takes what no other codec supports, and tensors that are no KV at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvzip.cache import Block
from kvzip.codecs.base import Batch, Codec, Encoded, Sections
from kvzip.devices.base import Array, Device
from kvzip.errors import CorruptError

# numpy copies strided rows element by element, and bfloat16 by a slow generic path: wide integers are faster.
WORDS = (8, 4, 2, 1)


class Unchanged(Codec):
    """What takes no parameters, keeps every bit, and makes no block longer."""

    lossless = True

    def config(self) -> dict[str, Any]:
        return {}

    def bound(self, block: Block) -> int:
        return block.nbytes


class Raw(Unchanged):
    """Section ``DATA``: each plane of the block as little-endian ``[tokens, heads, head_dim]``, one after the other."""

    name = "raw"

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        arrays = iter(batch.arrays)
        return [Encoded({"DATA": joined([next(arrays) for _ in block.planes], device)}) for block in batch.blocks]

    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        arrays = iter(batch.arrays)
        for block, parts in zip(batch.blocks, sections, strict=True):
            data = parts.get("DATA")
            if data is None or data.size != block.nbytes:
                found = "no DATA section" if data is None else f"{data.size} bytes"
                where = f"{block.planes[0]}, tokens {block.start}:{block.stop}"
                raise CorruptError(
                    f"{where}: expected {block.nbytes} raw bytes, found {found}",
                    code="raw-length",
                )
            start = 0
            for _ in block.planes:
                rows = as_words(next(arrays))
                nbytes = rows.size * rows.itemsize
                rows[...] = data[start : start + nbytes].view(rows.dtype).reshape(rows.shape)
                start += nbytes


def joined(arrays: list[Array], device: Device) -> Array:
    """The numbers of some planes, token-major, one plane after the other: uint8; no copy of a contiguous plane."""
    flat = [device.xp.ascontiguousarray(as_words(array)).reshape(-1).view("u1") for array in arrays]
    return flat[0] if len(flat) == 1 else device.xp.concatenate(flat)


def as_words(array: Array) -> Array:
    """The same memory with its rows (the contiguous last axis) cut into the widest fitting unsigned integers."""
    row = array.shape[-1] * array.itemsize
    return array.view(f"u{next(word for word in WORDS if row % word == 0)}")
