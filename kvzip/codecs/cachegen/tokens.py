"""What belongs to tokens: their largest magnitudes (LMCache's max tensors) and which of them stay exact.

    TOKN  per tile of 32 tokens: entries of the max tensor, packed to their spread, and the mask of exact tokens
    ROWS  the exact tokens' values (but for those that a coder has room for elsewhere)

Exact are the oldest tokens of the file (attention sinks), those with NaN or Inf, and those too small to scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from kvzip.cache import Block
from kvzip.codecs.base import Batch
from kvzip.codecs.cachegen.coder import levels_of
from kvzip.coding.rans import gather_runs
from kvzip.coding.sections import as_bytes
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import ELEMENT_SUFFIX, describe_planes

TILE = 32
TILE_WORDS = 35


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a batch, on the device. They live in scratch memory: until the next batch."""

    planes: Array
    """Descriptors of the batch's arrays."""
    scales: Array
    """What quantizes each token, float32 ``[blocks, tiles * 32, 4]``: ``struct TokenScale`` of kernels/cachegen.h."""
    exact: Array
    """Masks, uint32 ``[blocks, tiles]``"""
    slots: Array
    slot_words: Array
    tiles: int

    @classmethod
    def of(cls, batch: Batch, bins: Sequence[int], sinks: int, device: Device) -> Self:
        count, tiles = len(batch.blocks), tiles_of(batch.blocks)
        tokens = cls(
            device.to_device(describe_planes(batch.arrays, device)),
            device.scratch("cachegen.scales", (count, tiles * TILE, 4), np.float32),
            device.scratch("cachegen.exact", (count, tiles), np.uint32),
            device.scratch("cachegen.slots", (count, tiles, TILE_WORDS), np.uint32),
            device.scratch("cachegen.slot_words", (count, tiles), np.uint32),
            tiles,
        )
        exact_from_start = np.array(
            [min(max(0, sinks - block.start), block.tokens) for block in batch.blocks], np.uint32
        )
        device.launch(
            f"cachegen_tiles_{element_suffix(batch)}", count * tiles, tokens.planes,
            device.to_device(exact_from_start), device_levels(bins, device), tokens.slots, tokens.slot_words,
            tokens.scales, tokens.exact, np.uint32(tiles),
        )  # fmt: skip
        return tokens

    @property
    def maxima(self) -> Array:
        """The max tensors, float32 ``[blocks, tiles * 32]``."""
        return self.scales[..., 3]

    def sections(self, device: Device) -> list[Array]:
        """``TOKN`` of every block."""
        halves = device.to_host(self.slot_words).astype(np.int64) * 2
        joined, starts = gather_runs(self.slots, halves.reshape(-1), TILE_WORDS * 2, self.tiles, device)
        return [joined[start:stop] for start, stop in pairwise(starts)]

    def exact_tokens(self, device: Device) -> list[np.ndarray]:
        """The exact tokens of every block, counted from its start."""
        masks = device.to_host(self.exact)
        return [np.flatnonzero(np.unpackbits(block.view(np.uint8), bitorder="little")) for block in masks]


def rows_section(array: Array, kept: np.ndarray, device: Device) -> Array:
    """``ROWS`` of the tokens ``kept`` of one block."""
    return as_bytes(device.xp.ascontiguousarray(array[device.to_device(kept)]))


def tiles_of(blocks: Sequence[Block]) -> int:
    """Tiles of the longest block."""
    return max(-(-block.tokens // TILE) for block in blocks)


def device_levels(bins: Sequence[int], device: Device) -> Array:
    """``M`` of every block, uint32, on the device."""
    return device.to_device(np.array([levels_of(b) for b in bins], np.uint32))


def element_suffix(batch: Batch) -> str:
    """What the batch's element type adds to a kernel's name."""
    return ELEMENT_SUFFIX[batch.blocks[0].plane.dtype]
