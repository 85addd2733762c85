"""fp8: every number as an 8-bit float, with or without scales.

Without scales the bytes are those of LMCache's fp8 serde, ``tensor.to(float8_e4m3fn)``. Scales cost little and save
caches whose values overflow 448 or sink below 2^-6. Each block holds

    DATA  the codes, token-major ``[tokens, heads, head_dim]``
    SCAL  float32 scales, ``[tokens or 1, heads or 1]``: absent with ``scale="none"``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch, Codec, Encoded, Errors, Sections
from kvzip.coding.sections import SectionReader, as_bytes, total_errors
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import ELEMENT_SUFFIX, describe_planes, has_numbers
from kvzip.errors import UsageError

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
SCALES = ("none", "tensor", "head", "token")
TILE = 32

BLOCK = np.dtype([("bytes", np.uint64), ("scales", np.uint64), ("token_step", np.uint32), ("head_step", np.uint32)])
"""The host side of ``struct Fp8Block``."""


class Fp8(Codec):
    """8-bit floats (arXiv:2209.05433).

    Args:
        dtype: ``float8_e4m3fn`` (range 448, 3 bits of mantissa) or ``float8_e5m2`` (57344, 2 bits).
        scale: what shares a scale: ``none``, ``tensor`` (a block of a plane), ``head`` or ``token``.
        saturate: whether values beyond the range become the largest finite one rather than NaN or infinity. By
        default as
            torch casts: yes for e4m3fn, no for e5m2, which has infinities.

    Raises:
        UsageError: an unknown dtype or scale.
    """

    name = "fp8"

    def __init__(self, *, dtype: str = "float8_e4m3fn", scale: str = "none", saturate: bool | None = None) -> None:
        if dtype not in LARGEST:
            raise UsageError(f"fp8: dtype must be one of {', '.join(LARGEST)}, got {dtype!r}", code="codec-option")
        if scale not in SCALES:
            raise UsageError(f"fp8: scale must be one of {', '.join(SCALES)}, got {scale!r}", code="codec-option")
        self.dtype = dtype
        self.scale = scale
        self.saturate = dtype == "float8_e4m3fn" if saturate is None else saturate

    def config(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "scale": self.scale, "saturate": self.saturate}

    @classmethod
    def ladder(cls) -> list[str]:
        return ["", "scale=head", "dtype=float8_e5m2"]

    def supports(self, plane: Plane) -> bool:
        return has_numbers(plane)

    def describe(self, plane: Plane) -> dict[str, Any]:
        return {"bits": 8}

    def bound(self, block: Block) -> int:
        tokens, heads = self._scale_shape(block)
        return block.tokens * block.plane.channels + tokens * heads * 4

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        xp, suffix, tiles = device.xp, _suffix(batch), _tiles(batch)
        planes = device.to_device(describe_planes(batch.arrays, device))
        starts = np.cumsum([0] + [block.tokens * block.plane.channels for block in batch.blocks])
        codes = xp.empty(int(starts[-1]), np.uint8)
        scales = self._choose_scales(batch, planes, device)
        blocks = self._describe(batch, scales, device)
        blocks["bytes"] = device.address(codes) + starts[:-1]
        errors = device.scratch("fp8.errors", (len(blocks), tiles, 3), np.float32)
        device.launch(
            f"fp8_encode_{self.dtype[7:]}_{suffix}", len(blocks) * tiles, planes, device.to_device(blocks), errors,
            np.uint32(tiles), np.uint32(self.saturate),
        )  # fmt: skip
        sums = device.to_host(errors)
        encoded = []
        for i, block in enumerate(batch.blocks):
            sections: dict[str, Array] = {"DATA": codes[starts[i] : starts[i + 1]]}
            if self.scale != "none":
                sections["SCAL"] = as_bytes(scales[i])
            encoded.append(Encoded(sections, [Errors(*total_errors(sums[i, : -(-block.tokens // TILE)]))]))
        return encoded

    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        blocks = self._describe(batch, [], device)
        for fields, block, parts in zip(blocks, batch.blocks, sections, strict=True):
            reader = SectionReader(block, parts, device)
            fields["bytes"], _ = reader.array("DATA", 1, exactly=block.tokens * block.plane.channels)
            if self.scale != "none":
                tokens, heads = self._scale_shape(block)
                fields["scales"], _ = reader.array("SCAL", 4, exactly=tokens * heads)
            reader.done()
        tiles = _tiles(batch)
        device.launch(
            f"fp8_decode_{self.dtype[7:]}_{_suffix(batch)}", len(blocks) * tiles,
            device.to_device(describe_planes(batch.arrays, device)), device.to_device(blocks), np.uint32(tiles),
        )  # fmt: skip

    def _scale_shape(self, block: Block) -> tuple[int, int]:
        """Tokens and heads that have scales of their own."""
        return block.tokens if self.scale == "token" else 1, block.plane.heads if self.scale == "head" else 1

    def _choose_scales(self, batch: Batch, planes: Array, device: Device) -> list[Array]:
        """One float32 array ``[tokens or 1, heads or 1]`` per block: its largest magnitude over the format's."""
        tiles = _tiles(batch)
        if self.scale == "none":
            return []
        heads = batch.blocks[0].plane.heads
        maxima = device.scratch("fp8.maxima", (len(batch.blocks), tiles * TILE, heads), np.float32)
        device.launch(f"head_maxima_{_suffix(batch)}", len(batch.blocks) * tiles, planes, maxima, np.uint32(tiles))
        shapes = [self._scale_shape(block) for block in batch.blocks]
        starts = np.cumsum([0] + [tokens * heads for tokens, heads in shapes])
        scales = device.xp.empty(int(starts[-1]), np.float32)
        places = (device.address(scales) + starts[:-1] * 4).astype(np.uint64)
        device.launch(
            "fp8_scales", len(batch.blocks), planes, maxima, device.to_device(places), np.uint32(tiles),
            np.uint32(self.scale == "token"), np.uint32(self.scale == "head"), np.float32(LARGEST[self.dtype]),
        )  # fmt: skip
        return [scales[starts[i] : starts[i + 1]].reshape(shape) for i, shape in enumerate(shapes)]

    def _describe(self, batch: Batch, scales: list[Array], device: Device) -> np.ndarray:
        blocks = np.zeros(len(batch.blocks), BLOCK)
        shapes = [self._scale_shape(block) for block in batch.blocks]
        blocks["token_step"] = [heads if tokens > 1 else 0 for tokens, heads in shapes]
        blocks["head_step"] = [heads > 1 for _, heads in shapes]
        if scales:
            blocks["scales"] = [device.address(scale) for scale in scales]
        return blocks


def _suffix(batch: Batch) -> str:
    return ELEMENT_SUFFIX[batch.blocks[0].plane.dtype]


def _tiles(batch: Batch) -> int:
    return max(-(-block.tokens // TILE) for block in batch.blocks)
