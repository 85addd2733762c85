"""Tokens that a quantizer does not touch: those with NaN, infinities or numbers too large, and all from some token on.

They are stored as rows of the plane's own numbers, in section ``ROWS``. A mask, section ``MASK``, tells which of the
quantized tokens are meant, if any; the kernels' side is kernels/exact.h.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvzip.cache import Block
from kvzip.codecs.base import Batch, Sections
from kvzip.coding.sections import SectionReader, as_bytes
from kvzip.devices.base import Array, Device

TILE = 32

FIELDS = [("masks", np.uint64), ("rows", np.uint64), ("coded", np.uint32), ("row_count", np.uint32)]
"""``struct ExactTokens``, to be put in front of a codec's own fields."""


def tiles_of(tokens: int) -> int:
    return -(-tokens // TILE)


def most_tiles(batch: Batch) -> int:
    """Of any block of the batch: what each has warps for."""
    return max(tiles_of(block.tokens) for block in batch.blocks)


def bound(block: Block) -> int:
    """The largest number of bytes that the two sections can have."""
    return block.nbytes + tiles_of(block.tokens) * 4


def sections_of(batch: Batch, masks: np.ndarray, coded: Sequence[int], device: Device) -> list[dict[str, Array]]:
    """``MASK`` and ``ROWS`` of every block, each only if there is something in it.

    Args:
        masks: uint32 ``[blocks, tiles]``, what the kernels found among the ``coded[i]`` first tokens.
    """
    found: list[dict[str, Array]] = []
    for block, array, mask, count in zip(batch.blocks, batch.arrays, masks, coded, strict=True):
        sections: dict[str, Array] = {}
        # A copy: the kernels' masks are scratch, which the next launch overwrites, and sections are handed on.
        mask = mask[: tiles_of(count)].copy()
        kept = np.arange(count, block.tokens)
        if mask.any():
            sections["MASK"] = as_bytes(device.to_device(mask))
            kept = np.concatenate([np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")), kept])
        if len(kept):
            sections["ROWS"] = as_bytes(device.xp.ascontiguousarray(array[device.to_device(kept)]))
        found.append(sections)
    return found


def read(fields: np.void, block: Block, coded: int, sections: Sections, reader: SectionReader) -> None:
    """Fill a descriptor from the two sections. Raises CorruptError where a length is wrong; kernels check the rest."""
    plane = block.plane
    fields["coded"] = coded
    if "MASK" in sections:
        fields["masks"], _ = reader.array("MASK", 4, exactly=tiles_of(coded))
    fields["rows"], values = reader.array("ROWS", plane.itemsize, optional=True)
    fields["row_count"] = values // plane.channels
