"""TurboQuant's packed rows as LMCache has them: typed calls into kernels/turboquant_slots.cu.

    DATA  indices, a stream of bits per row (a token of one head), least significant first, padded to bytes
    NORM  keys: the rows' norms, fp16
    SCAL  values: the rows' scale and zero, fp16
    EXCT, ROWS  rows that fp16 cannot hold (exact.py)

LMCache's slot of a token and head is its key's DATA and NORM, then its value's DATA and SCAL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvzip.cache import Block
from kvzip.codecs.base import Batch, Encoded, Errors, Sections
from kvzip.codecs.turboquant import exact
from kvzip.codecs.turboquant.codebooks import codebook
from kvzip.codecs.turboquant.rotation import rotation
from kvzip.coding.sections import SectionReader, as_bytes, total_errors
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import ELEMENT_SUFFIX, describe_planes

BLOCK = np.dtype(
    [(name, np.uint64) for name in ("indices", "scalars", "rotation", "codebook")]
    + [("bits", np.uint32), ("reserved", np.uint32)]
)
"""The host side of ``struct SlotBlock``."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Rows of keys (rotated, a codebook) or values (a uniform grid), with ``bits`` (3 or 4) per index."""

    kind: Literal["keys", "values"]
    bits: int

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a row's indices."""
        return -(-head_dim * self.bits // 8)

    @property
    def tag(self) -> str:
        return "NORM" if self.kind == "keys" else "SCAL"

    @property
    def scalars(self) -> int:
        """fp16 numbers that a row has beside its indices."""
        return 1 if self.kind == "keys" else 2

    def row_sections(self, head_dim: int) -> dict[str, int]:
        """The sections that every row has a part of, and how many bytes of each."""
        return {"DATA": self.row_bytes(head_dim), self.tag: 2 * self.scalars}

    def bound(self, block: Block) -> int:
        rows = block.tokens * block.plane.heads
        return rows * sum(self.row_sections(block.plane.head_dim).values()) + exact.bound(block)

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        xp, plane = device.xp, batch.blocks[0].plane
        tiles = max(map(exact.tiles_of, batch.blocks))
        rows = np.array([block.tokens * plane.heads for block in batch.blocks])
        ends, row_bytes = np.cumsum(rows), self.row_bytes(plane.head_dim)
        indices = xp.empty((int(ends[-1]), row_bytes), np.uint8)
        scalars = xp.empty((int(ends[-1]), self.scalars), np.uint16)
        blocks = self._describe(batch, device)
        blocks["indices"] = device.address(indices) + (ends - rows) * row_bytes
        blocks["scalars"] = device.address(scalars) + (ends - rows) * (self.scalars * 2)
        masks = device.scratch("slots.masks", (len(blocks), tiles, plane.heads), np.uint32)
        sums = device.scratch("slots.sums", (len(blocks), tiles * plane.heads, 3), np.float32)
        device.launch(
            f"slots_encode_{self.kind}_{ELEMENT_SUFFIX[plane.dtype]}", len(blocks) * tiles * plane.heads,
            device.to_device(describe_planes(batch.arrays, device)), device.to_device(blocks), masks, sums,
            np.uint32(tiles),
        )  # fmt: skip
        host_masks, host_sums = device.to_host(masks), device.to_host(sums)
        encoded = []
        for i, block in enumerate(batch.blocks):
            run = slice(int(ends[i] - rows[i]), int(ends[i]))
            sections: dict[str, Array] = {"DATA": as_bytes(indices[run]), self.tag: as_bytes(scalars[run])}
            sections |= exact.exact_sections(batch.arrays[i], host_masks[i, : exact.tiles_of(block)], device)
            encoded.append(Encoded(sections, [Errors(*total_errors(host_sums[i]))]))
        return encoded

    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        plane, kept = batch.blocks[0].plane, []
        blocks = self._describe(batch, device)
        for fields, block, parts in zip(blocks, batch.blocks, sections, strict=True):
            rest = dict(parts)
            kept.append(exact.ExactRows.take(block, rest, device))
            reader, rows = SectionReader(block, rest, device), block.tokens * plane.heads
            fields["indices"], _ = reader.array("DATA", 1, exactly=rows * self.row_bytes(plane.head_dim))
            fields["scalars"], _ = reader.array(self.tag, 2, exactly=rows * self.scalars)
            reader.done()
        tiles = max(map(exact.tiles_of, batch.blocks))
        device.launch(
            f"slots_decode_{self.kind}_{ELEMENT_SUFFIX[plane.dtype]}", len(blocks) * tiles * plane.heads,
            device.to_device(describe_planes(batch.arrays, device)), device.to_device(blocks), np.uint32(tiles),
        )  # fmt: skip
        for rows_kept, array in zip(kept, batch.arrays, strict=True):
            if rows_kept is not None:
                rows_kept.put(array, device)

    def _describe(self, batch: Batch, device: Device) -> np.ndarray:
        blocks = np.zeros(len(batch.blocks), BLOCK)
        blocks["bits"] = self.bits
        if self.kind == "keys":
            head_dim = batch.blocks[0].plane.head_dim
            table = device.constant(("codebook", self.bits, head_dim), lambda: codebook(self.bits, head_dim))
            blocks["codebook"] = device.address(table)
            blocks["rotation"] = [
                device.address(rotation(block.plane.layer, head_dim, device)) for block in batch.blocks
            ]
        return blocks
