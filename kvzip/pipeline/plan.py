"""In which pieces a cache is coded: units of slabs and blocks, in an order that depends on the cache alone.

The order is that of the frames in the file. It is the same whether a source is a file or a pipe, so that the same input
gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import TypeVar

from kvzip.cache import Block, Plane
from kvzip.layouts.maps import CacheMap, Slab, TensorMap

BYTES_BLOCK = 1 << 20
"""Bytes in a full block of a plane of kind ``bytes``."""

Group = tuple[Plane, ...]
Item = TypeVar("Item")


def block_size(plane: Plane, block_tokens: int) -> int:
    """Tokens in a full block of ``plane``."""
    return BYTES_BLOCK if plane.kind == "bytes" else block_tokens


@dataclass(frozen=True)
class Unit:
    """Tokens ``start:stop`` of some planes that cannot be handled apart: all their slabs, and the blocks in them."""

    slabs: tuple[Slab, ...]
    groups: tuple[Group, ...]
    start: int
    stop: int
    step: int

    @cached_property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    def blocks(self) -> Iterator[Block]:
        """The blocks of the unit: oldest tokens first, then group by group."""
        for start in range(self.start, self.stop, self.step):
            for group in self.groups:
                yield Block(group, start, min(start + self.step, self.stop))


@dataclass
class Cluster:
    """Planes that share slabs (of a tensor that holds several) or frames (of a codec that spans several)."""

    places: list[tuple[TensorMap, int]]
    groups: list[Group]

    def units(self, block_tokens: int, forward: bool, first: int) -> Iterator[Unit]:
        """Units over all tokens, cut on the grid of a longer cache where token 0 of this one is token ``first``."""
        plane = self.groups[0][0]
        if not plane.tokens:
            return
        step = block_size(plane, block_tokens)
        stride = lcm(step, *(max(tensor_map.grid.unit, 1) for tensor_map, _ in self.places))
        if forward and any(len(Slab(*place, 0, min(stride, plane.tokens)).runs()[0]) > 1 for place in self.places):
            stride = first + plane.tokens  # nothing less than all tokens lies in one piece
        for edge in range(first - first % stride, first + plane.tokens, stride):
            start, stop = max(edge - first, 0), min(edge + stride - first, plane.tokens)
            slabs = tuple(Slab(tensor_map, outer, start, stop) for tensor_map, outer in self.places)
            yield Unit(slabs, tuple(self.groups), start, stop, step)


def plan(
    cache_map: CacheMap,
    groups: Sequence[Group],
    block_tokens: int,
    *,
    forward: bool = False,
    first: Mapping[int, int] | None = None,
) -> Iterator[Unit]:
    """All units of a cache whose frames hold ``groups`` of planes, in file order as far as the groups allow.

    Args:
        forward: the file can only go forward (a pipe): tokens are cut only where that leaves contiguous pieces.
        first: for a range of a longer cache, by plane index, which token of the longer one is token 0 here.
    """
    for cluster in clusters(cache_map, groups):
        yield from cluster.units(block_tokens, forward, (first or {}).get(cluster.groups[0][0].index, 0))


def clusters(cache_map: CacheMap, groups: Sequence[Group]) -> list[Cluster]:
    """The smallest sets of planes that share neither slabs nor frames, in the order of their first plane."""
    places = [
        (tensor_map, outer)
        for tensor_map in cache_map.maps
        if tensor_map.planes
        for outer in range(tensor_map.grid.outers)
    ]
    held = [Slab(*place, 0, 0).planes for place in places]
    root = _join([*held, *groups])
    found: dict[int, Cluster] = {}
    for place, planes in zip(places, held, strict=True):
        found.setdefault(root[planes[0].index], Cluster([], [])).places.append(place)
    for group in groups:
        found[root[group[0].index]].groups.append(group)
    return list(found.values())


def is_forward(units: Iterable[Unit]) -> bool:
    """Whether units can be read or written without ever going back: one slab each, at rising places."""
    last = (0, -1)
    for unit in units:
        place = (unit.slabs[0].tensor_map.tensor.file, unit.slabs[0].runs()[0][0])
        if len(unit.slabs) > 1 or place < last:
            return False
        last = place
    return True


def chunks(items: Iterable[Item], size: Callable[[Item], int], nbytes: int) -> Iterator[list[Item]]:
    """Runs of items of at most ``nbytes`` together; a larger item stands alone."""
    chunk: list[Item] = []
    total = 0
    for item in items:
        if chunk and total + size(item) > nbytes:
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += size(item)
    if chunk:
        yield chunk


def _join(sets: Iterable[Sequence[Plane]]) -> dict[int, int]:
    """Plane index to the lowest plane index that is linked to it through the sets."""
    parent: dict[int, int] = {}

    def find(index: int) -> int:
        while parent.setdefault(index, index) != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for planes in sets:
        for plane in planes:
            low, high = sorted((find(planes[0].index), find(plane.index)))
            parent[high] = low
    return {index: find(index) for index in list(parent)}
