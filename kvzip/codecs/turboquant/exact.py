"""Rows (a token of one head) that stay exact: those of attention sinks, and what a quantizer cannot hold, rows with NaN
or Inf or beyond its range.

    EXCT  uint32 [tiles of 32 tokens][heads]: a bit per token, set for exact rows; up to the last tile that has one
    ROWS  the rows as stored in the plane, by token, then head

Both are absent where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvzip.cache import Block
from kvzip.coding.sections import as_bytes, corrupt_block
from kvzip.devices.base import Array, Device

TILE = 32


def tiles_of(block: Block) -> int:
    return -(-block.tokens // TILE)


def bound(block: Block) -> int:
    """The most bytes that both sections can have."""
    return tiles_of(block) * block.plane.heads * 4 + block.nbytes


def exact_sections(array: Array, masks: np.ndarray, device: Device) -> dict[str, Array]:
    """The sections of a block ``[tokens, heads, head_dim]`` with ``masks``, uint32 ``[tiles, heads]`` on the host."""
    marked = np.flatnonzero(masks.any(axis=1))
    if not marked.size:
        return {}
    masks = masks[: marked[-1] + 1].copy()
    tokens, heads = (device.to_device(index) for index in _places(masks))
    return {
        "EXCT": device.to_device(as_bytes(masks)),
        "ROWS": as_bytes(device.xp.ascontiguousarray(array[tokens, heads])),
    }


@dataclass(frozen=True, slots=True)
class ExactRows:
    """The exact rows of a block, to be put over what was decoded."""

    tokens: np.ndarray
    heads: np.ndarray
    rows: Array

    @classmethod
    def take(cls, block: Block, sections: dict[str, Array], device: Device) -> ExactRows | None:
        """Takes both sections out of ``sections``. Raises CorruptError if they do not fit each other or the block."""
        masks, rows = sections.pop("EXCT", None), sections.pop("ROWS", None)
        if masks is None and rows is None:
            return None
        heads = block.plane.heads
        if masks is None or rows is None or masks.size % (heads * 4) or masks.size > tiles_of(block) * heads * 4:
            raise corrupt_block(block, "the sections of exact rows do not fit")
        tokens, which = _places(np.asarray(device.to_host(masks)).view(np.uint32).reshape(-1, heads))
        row_bytes = block.plane.head_dim * block.plane.itemsize
        if rows.size != len(tokens) * row_bytes or (len(tokens) and tokens[-1] >= block.tokens):
            raise corrupt_block(block, f"{rows.size} bytes of exact rows where {len(tokens)} rows are marked")
        return cls(tokens, which, rows)

    def put(self, array: Array, device: Device) -> None:
        """Write the rows to ``array``, ``[tokens, heads, head_dim]``."""
        values = self.rows.view(array.dtype).reshape(len(self.tokens), array.shape[2])
        array[device.to_device(self.tokens), device.to_device(self.heads)] = values


def _places(masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and heads of the set bits of uint32 ``[tiles, heads]``, by token, then head."""
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little").reshape(*masks.shape, TILE)
    tokens, heads = np.nonzero(bits.swapaxes(1, 2).reshape(-1, masks.shape[1]))
    return tokens, heads
