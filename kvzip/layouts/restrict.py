"""A part of a cache: some layers, some tokens, under the same tensor names with smaller shapes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from kvzip.cache import Plane
from kvzip.errors import UsageError
from kvzip.layouts.maps import CacheMap
from kvzip.layouts.slabs import Role, TensorMap
from kvzip.tensorfile import SourceFile, TensorInfo, header_bytes, parse_header


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plane of a restricted cache comes from: tokens ``start:stop`` of ``plane`` of the whole one."""

    plane: Plane
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Restriction:
    """A smaller cache: its files with canonical headers, its map, and an origin for each of its planes, in order."""

    files: tuple[SourceFile, ...]
    tensors: tuple[TensorInfo, ...]
    cache_map: CacheMap
    origins: tuple[Origin, ...]


def restrict(
    cache_map: CacheMap, files: Sequence[SourceFile], layers: range | None = None, tokens: range | None = None
) -> Restriction:
    """Cut a cache to ``layers`` and ``tokens`` (steps of 1), each clipped to what is there.

    Tokens count from the beginning of each plane, also where a sliding window has dropped older ones. Tensors of
    other layers disappear, and so do files with none left; stacked tensors are cut; tensors that are no KV stay
    whole. Raises ``UsageError`` if nothing would be left, or if token blocks would have to be cut.
    """
    kept: list[tuple[TensorInfo, Role | None]] = []
    origins: list[Origin] = []
    for tensor_map in cache_map.maps:
        cut = _cut(tensor_map, layers, tokens)
        if cut:
            kept.append(cut[:2])
            origins += cut[2]
    _check_something(cache_map, origins, layers, tokens)
    new_files, tensors = _lay_out(files, [tensor for tensor, _ in kept])
    new_map = CacheMap.build(cache_map.layout, tensors, [role for _, role in kept], cache_map.notices)
    return Restriction(new_files, tensors, new_map, tuple(origins))


def _cut(
    tensor_map: TensorMap, layers: range | None, tokens: range | None
) -> tuple[TensorInfo, Role | None, list[Origin]] | None:
    role, tensor = tensor_map.role, tensor_map.tensor
    if role is None:
        return tensor, None, [Origin(plane, 0, plane.tokens) for plane in tensor_map.planes]
    grid = tensor_map.grid
    count = grid.size("L")
    first = max(role.layer, layers.start) if layers is not None else role.layer
    last = min(role.layer + count, layers.stop) if layers is not None else role.layer + count
    if first >= last:
        return None
    start = min(tokens.start, grid.tokens) if tokens is not None else 0
    stop = max(start, min(tokens.stop, grid.tokens)) if tokens is not None else grid.tokens
    sizes = dict(zip(role.axes, tensor.shape, strict=True))
    block = grid.size("b")
    if start % block or stop % block:
        raise UsageError(
            f"tensor {tensor} keeps tokens in blocks of {block}: tokens {start}:{stop} must be multiples of that",
            code="tokens-in-blocks",
        )
    sizes |= {axis: size for axis, size in (("T", stop - start), ("N", (stop - start) // block)) if axis in sizes}
    sizes |= {"L": last - first} if "L" in sizes else {}
    shape = tuple(sizes[axis] if axis != "1" else 1 for axis in role.axes)
    nbytes = prod(shape) * np.dtype(tensor.dtype).itemsize
    chosen = [plane for plane in tensor_map.planes if first <= plane.layer < last]
    origins = [Origin(plane, start, stop) for plane in chosen]
    return replace(tensor, shape=shape, nbytes=nbytes), replace(role, layer=first), origins


def _check_something(
    cache_map: CacheMap, origins: Sequence[Origin], layers: range | None, tokens: range | None
) -> None:
    planes = [plane for plane in cache_map.planes if plane.kind != "bytes"]
    left = [origin for origin in origins if origin.plane.kind != "bytes"]
    if planes and not left and layers is not None:
        numbers = [plane.layer for plane in planes]
        raise UsageError(
            f"no layer is in {spelt(layers)}; the cache has layers {min(numbers)}:{max(numbers) + 1}",
            code="layers-range",
        )
    if left and tokens is not None and all(origin.start == origin.stop for origin in left):
        most = max(origin.plane.tokens for origin in left)
        raise UsageError(f"no token is in {spelt(tokens)}; the cache has {most} tokens", code="tokens-range")


def spelt(cut: range) -> str:
    """A range as a user writes it: an open end reaches to ``sys.maxsize``."""
    return f"{cut.start}:{'' if cut.stop == sys.maxsize else cut.stop}"


def _lay_out(
    files: Sequence[SourceFile], tensors: Sequence[TensorInfo]
) -> tuple[tuple[SourceFile, ...], tuple[TensorInfo, ...]]:
    """New files for the tensors, in their order, with canonical headers."""
    new_files: list[SourceFile] = []
    placed: list[TensorInfo] = []
    for index, file in enumerate(files):
        inside = [tensor for tensor in tensors if tensor.file == index]
        if not inside and any(file.path for file in files):
            continue
        metadata = parse_header(file.header, file.path or "source header")[1] if file.header else {}
        header = header_bytes(inside, metadata) if file.header else b""
        position = len(header)
        for tensor in inside:
            placed.append(replace(tensor, offset=position, file=len(new_files)))
            position += tensor.nbytes
        new_files.append(SourceFile(file.path, header, position))
    return tuple(new_files), tuple(placed)
