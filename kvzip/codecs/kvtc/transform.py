"""Planes to coefficient rows and back: the host side of kernels/kvtc.cu, with the basis between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch
from kvzip.codecs.kvtc import columns
from kvzip.codecs.kvtc.rotations import Rotation
from kvzip.coding import rans
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import ELEMENT_SUFFIX, PLANE, describe_planes
from kvzip.profiles.scales import FLOOR, KEY_UNIT, OCTAVE, log2_index, power, spread_exponent

if TYPE_CHECKING:
    from kvzip.codecs.kvtc.codec import KvTc

TILE = 32
RUN = 4 * TILE
"""Tokens that a warp has of some channels: ``KVTC_RUN`` of kernels/kvtc.cu."""

SIDE = np.dtype(
    [("rows", PLANE)]
    + [(name, np.uint64) for name in ("scales", "cosines", "sines", "partners", "exact")]
    + [("length", np.float32), ("largest", np.float32)]
)
"""The host side of ``struct KvtcPlane``."""


@dataclass(slots=True)
class Basis:
    """On a device: ``mean`` float32 ``[width]``, and the directions that are coded, ``matrix`` ``[rank, width]``."""

    mean: Array
    matrix: Array

    @property
    def rank(self) -> int:
        return len(self.matrix)


@dataclass(slots=True)
class Side:
    """What is known about a batch beside its numbers.

    Attributes:
        exact: which tokens of each block are kept as they are, bool ``[tokens]``.
        exponents: of each block, int ``[planes, tokens]`` in 1/256 octaves.
        masks: ``exact`` on the device, uint32 ``[blocks, tiles]``; what lies behind the last token counts as exact.
        kept: device arrays that descriptors point into.
    """

    exact: list[np.ndarray]
    exponents: list[np.ndarray]
    masks: Array
    kept: list[Array]


class Transform:
    """One batch on its way to coefficient rows, or back."""

    def __init__(self, codec: KvTc, batch: Batch, device: Device) -> None:
        self.codec, self.batch, self.device = codec, batch, device
        self.planes = [(number, block, plane) for number, block in enumerate(batch.blocks) for plane in block.planes]
        self.tiles = max(-(-block.tokens // TILE) for block in batch.blocks)
        self.runs = -(-self.tiles * TILE // RUN)
        self.groups = rans.groups_of(self.planes[0][2])
        self.suffix = ELEMENT_SUFFIX[self.planes[0][2].dtype]
        self.host_descriptors = describe_planes(batch.arrays, device)
        self.descriptors = device.to_device(self.host_descriptors)
        self.widths = [sum(plane.channels for plane in block.planes) for block in batch.blocks]
        sizes = [block.tokens * width for block, width in zip(batch.blocks, self.widths, strict=True)]
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.numbers = device.scratch("kvtc.numbers", (int(self.starts[-1]),), np.float32)
        self.bases = [codec.basis(block, device) for block in batch.blocks]
        self.coefficients: list[Array] = [
            self.rows(i) if basis is None else device.xp.zeros((block.tokens, basis.rank), np.float32)
            for i, (block, basis) in enumerate(zip(batch.blocks, self.bases, strict=True))
        ]

    def rows(self, block: int) -> Array:
        """The scaled numbers of a block, float32 ``[tokens, width]``."""
        return self.numbers[self.starts[block] : self.starts[block + 1]].reshape(-1, self.widths[block])

    def describe(self) -> np.ndarray:
        """Descriptors of the blocks' columns, but for where things lie."""
        blocks = np.zeros(len(self.batch.blocks), columns.BLOCK)
        blocks["tokens"] = [block.tokens for block in self.batch.blocks]
        blocks["width"] = blocks["row_stride"] = [rows.shape[1] for rows in self.coefficients]
        blocks["groups"] = -(-blocks["width"].astype(np.int64) // rans.LANES)
        blocks["step"] = power(self.codec.step_at)
        blocks["inverse_step"] = power(-self.codec.step_at)
        return blocks

    def place(self, blocks: np.ndarray, side: Side) -> None:
        """Fill in where rows and masks lie."""
        blocks["rows"] = [self.device.address(rows) for rows in self.coefficients]
        blocks["exact"] = self.device.address(side.masks) + np.arange(len(blocks)) * (self.tiles * 4)

    # ------------------------------------------------------------------------------------------------------ measuring

    def measure(self) -> Side:
        """Which tokens are exact, and the scales of all others."""
        device, count = self.device, len(self.planes)
        unfit = device.scratch("kvtc.unfit", (count, self.tiles), np.uint32)
        squares = device.scratch("kvtc.squares", (count, self.tiles * TILE), np.float32)
        device.launch(
            f"kvtc_tokens_{self.suffix}", count * self.tiles, self.descriptors, unfit, squares, np.uint32(self.tiles)
        )
        flags = np.unpackbits(device.to_host(unfit).view(np.uint8), axis=1, bitorder="little").astype(bool)
        mean_squares = device.to_host(squares)
        exact = []
        at = 0
        for block in self.batch.blocks:
            own = np.asarray(flags[at : at + len(block.planes), : block.tokens].any(axis=0))
            exact.append(self.codec.exact_tokens(block, own))
            at += len(block.planes)
        return self.side(exact, self._exponents(exact, mean_squares))

    def _exponents(self, exact: list[np.ndarray], mean_squares: np.ndarray) -> list[np.ndarray]:
        keys = iter(self._key_exponents(exact))
        exponents = [np.zeros((len(block.planes), block.tokens), np.int64) for block in self.batch.blocks]
        rows = [row for block in exponents for row in block]
        with np.errstate(invalid="ignore"):
            usable = np.where(np.isfinite(mean_squares), np.maximum(mean_squares, np.float32(FLOOR)), np.float32(1))
        quarter = OCTAVE // 4
        for (_, _, plane), row, squares in zip(self.planes, rows, usable, strict=True):
            if plane.kind == "key":
                row[:] = next(keys) + KEY_UNIT
            else:
                row[:] = (log2_index(squares[: len(row)]) // 2 + quarter // 2) // quarter * quarter
        return exponents

    def _key_exponents(self, exact: list[np.ndarray]) -> list[int]:
        """The scale of each key plane, before the unit of keys."""
        which = [i for i, (_, _, plane) in enumerate(self.planes) if plane.kind == "key"]
        profile = self.codec.profile
        if profile is not None or not which:
            return [profile.key_exponents[self.planes[i][2].layer] for i in which] if profile is not None else []
        device = self.device
        side = self.side(exact, [np.zeros((len(b.planes), b.tokens), np.int64) for b in self.batch.blocks])
        fields = self._fields(side, inverse=True)
        variances = device.scratch("kvtc.variances", (len(which), self.groups * rans.LANES), np.float32)
        device.launch(
            f"kvtc_variance_{self.suffix}", len(which) * self.groups,
            device.to_device(self.host_descriptors[which]), device.to_device(fields[which]),
            variances, np.uint32(self.groups),
        )  # fmt: skip
        channels = self.planes[0][2].channels
        return [spread_exponent(row[:channels]) for row in device.to_host(variances)]

    def side(self, exact: list[np.ndarray], exponents: list[np.ndarray]) -> Side:
        masks = np.ones((len(exact), self.tiles * TILE), bool)
        for row, flags in zip(masks, exact, strict=True):
            row[: len(flags)] = flags
        words = np.packbits(masks, axis=1, bitorder="little").view(np.uint32)
        return Side(exact, exponents, self.device.to_device(np.ascontiguousarray(words)), [])

    # --------------------------------------------------------------------------------------------------- there and back

    def forward(self, side: Side) -> np.ndarray:
        """Fill the coefficient rows; returns the blocks' descriptors. Tokens with too large numbers become exact."""
        blocks = self.describe()
        while self._fill(side):
            pass
        for i, basis in enumerate(self.bases):
            if basis is not None:
                rows = self.rows(i)
                rows -= basis.mean
                self.device.xp.matmul(rows, basis.matrix.transpose(), out=self.coefficients[i])
        self.place(blocks, side)
        return blocks

    def _fill(self, side: Side) -> bool:
        """Un-rotate and scale all planes into rows; True if tokens turned out too large, and are exact now."""
        count, tiles = len(self.planes), RUN // TILE
        masks = self.device.scratch("kvtc.large", (count, self.runs, self.groups, tiles), np.uint32)
        self._launch_runs("forward", side, masks, inverse=True)
        words = np.bitwise_or.reduce(self.device.to_host(masks), axis=2)
        again = False
        for (number, block, _), row in zip(self.planes, words.reshape(count, -1), strict=True):
            if row.any():
                large = np.unpackbits(row.view(np.uint8), bitorder="little")[: block.tokens].astype(bool)
                side.exact[number] = side.exact[number] | large
                again = True
        if again:
            side.masks = self.side(side.exact, side.exponents).masks
        return again

    def _launch_runs(self, kernel: str, side: Side, *results: Array, inverse: bool) -> None:
        """Launch a kernel that goes through all planes, each warp a run of tokens."""
        fields = self.device.to_device(self._fields(side, inverse=inverse))
        self.device.launch(
            f"kvtc_{kernel}_{self.suffix}", len(self.planes) * self.runs * self.groups, self.descriptors, fields,
            *results, np.uint32(self.groups), np.uint32(self.runs),
        )  # fmt: skip

    def inverse(self, side: Side) -> None:
        """Fill the planes from the coefficient rows, but for exact tokens."""
        self._expand()
        self._launch_runs("inverse", side, inverse=False)

    def errors(self, side: Side) -> list[np.ndarray]:
        """What the inverse would make, beside the planes: per block and plane float32 ``[runs * groups, 3]``."""
        self._expand()
        sums = self.device.scratch("kvtc.errors", (len(self.planes), self.runs * self.groups, 3), np.float32)
        self._launch_runs("errors", side, sums, inverse=False)
        counts = np.cumsum([len(block.planes) for block in self.batch.blocks])[:-1]
        return np.split(self.device.to_host(sums).copy(), counts)

    def _expand(self) -> None:
        for i, basis in enumerate(self.bases):
            if basis is not None:
                rows = self.rows(i)
                self.device.xp.matmul(self.coefficients[i], basis.matrix, out=rows)
                rows += basis.mean

    def _fields(self, side: Side, *, inverse: bool) -> np.ndarray:
        """Descriptors of the planes: to rows with ``inverse`` rotations and scales, from rows with the rotations."""
        from kvzip.codecs.kvtc.codec import LARGEST

        device = self.device
        fields = np.zeros(len(self.planes), SIDE)
        longest = max(block.tokens for block in self.batch.blocks)
        scales = np.ones((len(self.planes), longest), np.float32)
        flat = [row for block in side.exponents for row in block]
        for row, exponents in zip(scales, flat, strict=True):
            row[: len(exponents)] = power(-exponents if inverse else exponents)
        on_device = device.to_device(scales)
        side.kept = [on_device]
        fields["scales"] = device.address(on_device) + np.arange(len(scales)) * (longest * 4)
        at = -1
        offset = 0
        for i, (number, block, plane) in enumerate(self.planes):
            offset = 0 if number != at else offset
            at = number
            start = device.address(self.numbers) + (int(self.starts[number]) + offset) * 4
            strides = self.widths[number] * 4, plane.head_dim * 4
            fields[i]["rows"] = (start, *strides, block.tokens, plane.heads, plane.head_dim, 0)
            offset += plane.channels
            # A coefficient is no larger than the length of the vector of numbers.
            fields[i]["length"] = 1 if self.bases[number] is None else self.widths[number] ** 0.5
            fields[i]["largest"] = LARGEST * float(power(self.codec.step_at))
            fields[i]["exact"] = device.address(side.masks) + number * self.tiles * 4
            if rotation := self._rotation(block, plane, inverse=inverse):
                fields[i]["cosines"] = device.address(rotation.cosines)
                fields[i]["sines"] = device.address(rotation.sines)
                fields[i]["partners"] = device.address(rotation.partners)
        return fields

    def _rotation(self, block: Block, plane: Plane, *, inverse: bool) -> Rotation | None:
        ropes = self.codec.ropes
        rope = ropes.of(plane.layer) if ropes is not None and plane.kind == "key" else None
        if rope is None:
            return None
        return Rotation.of(rope, plane.head_dim, block.start, block.tokens, plane.tokens, self.device, inverse=inverse)
