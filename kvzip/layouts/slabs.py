"""One tensor and the planes in it, and the slabs through which its bytes flow both ways."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod

import numpy as np

from kvzip.cache import BLOCK_TOKENS, Kind, Plane
from kvzip.devices.base import Array
from kvzip.errors import UsageError
from kvzip.layouts.axes import PLANE_AXES, Axes, Grid, spell
from kvzip.tensorfile import TensorInfo

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
KV_DTYPES = frozenset(("float16", "bfloat16", "float32", "float64", "uint8", "int8", *_FLOAT8))
"""Dtypes of keys and values. uint8 and int8 hold what someone has quantized: they are never reinterpreted."""

MAX_PLANES = 1 << 20
MAX_EMPTY_PLANES = 1 << 12
"""Bounds on what a few bytes of a hostile header can inflate to: tensors without data cost their file nothing."""


@dataclass(frozen=True, slots=True)
class Role:
    """What a tensor is in its cache.

    ``layer`` is its layer, or that of index 0 of its L axis; ``kind`` is None where the axes hold both keys and values.
    ``heads`` splits a C or 2C axis. ``sequence`` is that of index 0 of its B axis.
    """

    axes: Axes
    layer: int = 0
    kind: Kind | None = None
    heads: int = 1
    sequence: int = 0


@dataclass(frozen=True)
class TensorMap:
    """One tensor of a source and the planes in it; without a role, one plane of kind ``bytes``.

    Planes are ordered by outer index, then by their place within a slab.
    """

    tensor: TensorInfo
    role: Role | None
    planes: tuple[Plane, ...]

    @property
    def axes(self) -> Axes:
        return self.role.axes if self.role else ()

    @cached_property
    def grid(self) -> Grid:
        """Sizes of the axes; a pass-through tensor counts as ``T,D`` of single bytes."""
        return Grid(self.role.axes, self.tensor.shape) if self.role else Grid(("T", "D"), (self.tensor.nbytes, 1))

    @property
    def dtype(self) -> str:
        """The dtype of slab arrays, a numpy or ml_dtypes name."""
        return self.tensor.dtype if self.role else "uint8"

    def slabs(self, block_tokens: int = BLOCK_TOKENS) -> Iterator[Slab]:
        """Slabs that cover the tensor, in file order by outer index, then by tokens.

        A slab begins at a multiple of ``block_tokens`` and has that many tokens, except the last of an outer index;
        where tokens come in blocks that do not divide ``block_tokens``, a common multiple of both.
        """
        grid = self.grid
        step = lcm(block_tokens, max(grid.unit, 1))
        for outer in range(grid.outers):
            for start in range(0, grid.tokens, step):
                yield Slab(self, outer, start, min(start + step, grid.tokens))


@dataclass(frozen=True, slots=True)
class Slab:
    """Tokens ``start:stop`` of one outer index of a tensor: what is read, coded and written as one array."""

    tensor_map: TensorMap
    outer: int
    start: int
    stop: int

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes that the slab holds ``start:stop`` of."""
        planes = self.tensor_map.planes
        count = len(planes) // self.tensor_map.grid.outers
        return planes[self.outer * count : (self.outer + 1) * count]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that holds the slab, in the tensor's memory order."""
        return tuple(self._cut(axis, size) for axis, size in self.tensor_map.grid.body)

    @property
    def dtype(self) -> str:
        return self.tensor_map.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def staged(self) -> bool:
        """Whether planes are no affine views of the array, so that :meth:`gather` copies."""
        return not self.tensor_map.grid.affine

    def _cut(self, axis: str, size: int) -> int:
        if axis == "T":
            return self.stop - self.start
        return (self.stop - self.start) // self.tensor_map.grid.unit if axis == "N" else size

    def runs(self) -> tuple[list[int], int]:
        """Where the array's bytes lie: offsets in the file and the bytes of each run, in the order of the array."""
        tensor, grid = self.tensor_map.tensor, self.tensor_map.grid
        body = grid.body
        at = next(number for number, (axis, _) in enumerate(body) if axis in ("T", "N"))
        sizes = [size for _, size in body]
        row = prod(sizes[at + 1 :]) * np.dtype(self.dtype).itemsize
        stride = sizes[at] * row
        begin = tensor.offset + self.outer * prod(sizes[:at]) * stride + self.start // grid.unit * row
        count = self._cut(*body[at])
        if count == sizes[at]:
            return [begin], self.nbytes
        return [begin + number * stride for number in range(prod(sizes[:at]))], count * row

    def views(self, array: Array) -> list[Array]:
        """One array ``[tokens, heads, head_dim]`` per plane, without a copy unless the slab is :attr:`staged`.

        Args:
            array: of :attr:`shape` and :attr:`dtype`, C-contiguous, of any array module.
        """
        planes = self.planes
        shape = (self.stop - self.start, planes[0].heads, planes[0].head_dim) if planes else ()
        return [strided.reshape(shape) for strided in self._strided(array)]

    def gather(self, array: Array) -> list[Array]:
        """As :meth:`views`, but always with contiguous channels: copies where the slab is :attr:`staged`."""
        views = self.views(array)
        return [view.copy() for view in views] if self.staged else views

    def scatter(self, array: Array, values: Sequence[Array]) -> None:
        """Put the arrays that :meth:`gather` gave, and someone filled, back into ``array``; nothing to do for views."""
        if self.staged:
            for strided, value in zip(self._strided(array), values, strict=True):
                strided[...] = value.reshape(strided.shape)

    def _strided(self, array: Array) -> Iterator[Array]:
        """Views ``[token axes..., heads, channels]`` of the planes, in order."""
        grid = self.tensor_map.grid
        body = grid.body
        kept = [axis for axis, _ in body if axis not in PLANE_AXES]
        order = [kept.index(axis) for axis in ("N", "b", "T", "H", grid.channel_axis) if axis in kept]
        choices = [range(size) if axis in PLANE_AXES else (slice(None),) for axis, size in body]
        half = grid.size(grid.channel_axis) // 2
        parts = (slice(0, half), slice(half, None)) if grid.fused else (slice(None),)
        for index in itertools.product(*choices):
            plane = array[index].transpose(order)
            for part in parts:
                yield plane[..., part]


def planes_of(tensor: TensorInfo, role: Role | None, first: int) -> Iterator[Plane]:
    """The planes of a tensor in its role, numbered from ``first``."""
    if role is None:
        yield Plane(first, 0, "bytes", tensor.nbytes, 1, 1, "uint8")
        return
    grid = Grid(role.axes, tensor.shape)
    problem = misfit(tensor, role.axes) or _kind_problem(grid, role)
    if problem:
        raise UsageError(f"tensor {tensor} does not fit the layout {spell(role.axes)}: {problem}", code="layout-shape")
    most = MAX_PLANES if tensor.nbytes else MAX_EMPTY_PLANES
    if first + grid.plane_count > most:
        raise UsageError(f"tensor {tensor}: a cache has at most {most} planes up to here", code="layout-planes")
    heads = grid.size("H") if "H" in role.axes else role.heads
    if heads < 1 or grid.channels % heads:
        raise UsageError(f"tensor {tensor}: {grid.channels} channels do not make {heads} heads", code="layout-heads")
    for number, (layer, kind, sequence) in enumerate(_combinations(grid, role)):
        yield Plane(
            first + number, layer, kind, grid.tokens, heads, grid.channels // heads, tensor.dtype, sequence=sequence
        )


def _combinations(grid: Grid, role: Role) -> Iterator[tuple[int, Kind, int]]:
    """Layer, kind and sequence of each plane, in the order of :class:`TensorMap`."""
    both: tuple[Kind, ...] = ("key", "value")
    axes = [axis for axis in grid.axes if axis in PLANE_AXES]
    for index in itertools.product(*(range(grid.size(axis)) for axis in axes)):
        at = dict(zip(axes, index, strict=True))
        layer, sequence = role.layer + at.get("L", 0), role.sequence + at.get("B", 0)
        if grid.fused:
            yield from ((layer, kind, sequence) for kind in both)
        else:
            yield layer, role.kind or both[at["kv"]], sequence


def misfit(tensor: TensorInfo, axes: Axes) -> str:
    """Why a tensor cannot hold keys and values along these axes, or ``""``."""
    grid = Grid(axes, tensor.shape)
    problem = grid.misfit()
    if problem:
        return problem
    if tensor.dtype not in KV_DTYPES or prod(tensor.shape) * np.dtype(tensor.dtype).itemsize != tensor.nbytes:
        return f"keys and values do not come in dtype {tensor.tag}"
    return "" if grid.plane_count and grid.channels else "it has no elements"


def _kind_problem(grid: Grid, role: Role) -> str:
    if (grid.kinds == 2) == (role.kind is not None):
        return "its axes do not say, or say twice, which are keys and values"
    return ""
