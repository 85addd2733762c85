"""Planes of symbols: quantization on its own, for coders that take the symbols of whole planes.

Symbols are uint8 ``[blocks, tiles * 32, groups * 32]``, contiguous, 0 beyond a block's channels; beyond its tokens they
mean nothing. The kernels are in kernels/cachegen_symbols.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvzip.codecs.base import Batch
from kvzip.codecs.cachegen.tokens import TILE, Tokens, device_levels, element_suffix, tiles_of
from kvzip.coding.rans import LANES, groups_of
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import describe_planes

TOKEN_SECTION = np.dtype(
    [("words", np.uint64), ("rows", np.uint64), ("word_count", np.uint32), ("row_count", np.uint32)]
)
"""The host side of ``struct TokenSection``."""


def symbol_scratch(batch: Batch, device: Device) -> Array:
    """Room for the symbols of a batch, in scratch memory."""
    width = groups_of(batch.blocks[0].plane) * LANES
    return device.scratch("cachegen.planes", (len(batch.blocks), tiles_of(batch.blocks) * TILE, width), np.uint8)


def quantize(batch: Batch, bins: Sequence[int], tokens: Tokens, symbols: Array, device: Device) -> Array:
    """Fill ``symbols`` with LMCache's, in exact tokens too.

    Returns:
        Squared error, energy and largest error, float32 ``[blocks, tiles, 3]`` in scratch memory.
    """
    count, channels = len(batch.blocks), batch.blocks[0].plane.channels
    errors = device.scratch("cachegen.errors", (count, tokens.tiles, 3), np.float32)
    if channels < symbols.shape[2]:
        symbols[..., channels:] = 0
    device.launch(
        f"cachegen_quantize_{element_suffix(batch)}", count * tokens.tiles, tokens.planes, device_levels(bins, device),
        tokens.scales, tokens.exact, symbols, errors, np.uint32(tokens.tiles),
    )  # fmt: skip
    return errors


def read_tokens(batch: Batch, sections: np.ndarray, device: Device) -> tuple[Array, Array, Array]:
    """What token sections (descriptors of :data:`TOKEN_SECTION`) hold; zeros in place of what is damaged.

    Returns:
        Maxima, float32 ``[blocks, tiles * 32]``, and masks of exact tokens, uint32 ``[blocks, tiles]``, in scratch
        memory; a status per block, uint32 ``[blocks, 1]``.
    """
    count, tiles = len(batch.blocks), tiles_of(batch.blocks)
    maxima = device.scratch("cachegen.maxima", (count, tiles * TILE), np.float32)
    exact = device.scratch("cachegen.exact", (count, tiles), np.uint32)
    status = device.xp.empty((count, 1), np.uint32)
    planes = device.to_device(describe_planes(batch.arrays, device))
    device.launch(
        f"cachegen_tokens_{element_suffix(batch)}", count, planes, device.to_device(sections), maxima, exact, status,
        np.uint32(tiles),
    )  # fmt: skip
    return maxima, exact, status


def dequantize(
    batch: Batch, bins: Sequence[int], sections: np.ndarray, maxima: Array, exact: Array, symbols: Array, device: Device
) -> None:
    """Fill the batch's arrays; the values of exact tokens lie in the sections' rows."""
    tiles = tiles_of(batch.blocks)
    planes = device.to_device(describe_planes(batch.arrays, device))
    device.launch(
        f"cachegen_dequantize_{element_suffix(batch)}", len(batch.blocks) * tiles, planes, device.to_device(sections),
        device_levels(bins, device), maxima, exact, symbols, np.uint32(tiles),
    )  # fmt: skip
