"""Checks a ``.kvz`` without writing: its checksums, its decoding, its distance from the cache that it came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.container import Reader, read_members
from kvzip.devices.base import Device
from kvzip.errors import KvzipError, UsageError
from kvzip.layouts import CacheMap, Slab, map_cache
from kvzip.pipeline import PlaneErrors, Report, StoredCache, decode_plane, verify
from kvzip.pipeline.encoding import Progress, ignore
from kvzip.pipeline.plan import BYTES_BLOCK
from kvzip.pipeline.report import Tally
from kvzip.pipeline.steps import Notice, once
from kvzip.quality import differences
from kvzip.tensorfile import TensorSource, open_raw, open_tensors


def stored_members(file: BinaryIO, name: str) -> Iterator[StoredCache]:
    """The members of an open file or pipe, one after the other: read each before the next."""
    if not file.seekable():
        yield from map(StoredCache, read_members(file, name))
        return
    first = Reader.open(file)
    for number in range(len(first.members)):
        yield StoredCache(first.member(number) if number else first)


def verify_members(
    file: BinaryIO, name: str, *, device: Device | None = None, notice: Notice = ignore, progress: Progress = ignore
) -> list[Report]:
    """Check every member of an open ``.kvz`` file or pipe; one report each.

    Args:
        device: where to decode every block, too; None checks structure and checksums alone, which cannot tell whether
            what was written made sense.

    Raises ``CorruptError`` naming the first thing that is wrong, and whatever decoding raises.
    """
    return [verify(stored, device=device, notice=notice, progress=progress) for stored in stored_members(file, name)]


def compare(
    stored: StoredCache,
    reference: TensorSource,
    *,
    device: Device,
    layout: str | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    notice: Notice = ignore,
    progress: Progress = ignore,
) -> list[PlaneErrors]:
    """The error of every plane of a stored cache (a file) against a cache in safetensors files, in any layout.

    Tensors that are no KV are compared where the reference holds the same tensors as the source did.

    Raises:
        KvzipError: the reference lacks planes of the cache, or has them in another shape.
        UsageError: its layout cannot be told.
    """
    cache_map = _map_reference(stored, reference, layout, heads, head_dim)
    ours = _pair(stored, cache_map, reference.name)
    tally, short = Tally(), once(notice)
    for tensor_map in cache_map.maps:
        step = stored.header.block_tokens if tensor_map.role else BYTES_BLOCK
        for slab in tensor_map.slabs(step):
            for plane, original in zip(slab.planes, _read(reference, slab), strict=True):
                if plane.index in ours:
                    found = ours[plane.index]
                    values = decode_plane(stored, found.index, slab.start, slab.stop, device, notice=short)
                    tally.add(
                        Block((found,), slab.start, slab.stop), [differences(original, values.reshape(original.shape))]
                    )
            progress(slab.nbytes)
    return tally.totals()


def open_restored(path: str, stored: StoredCache) -> TensorSource:
    """Open what a cache was restored to: of raw bytes the cache tells the shape. Raises as ``open_tensors``."""
    if len(stored.files) == 1 and not stored.files[0].header and not stored.files[0].path:
        return open_raw(path, stored.tensors[0].shape, stored.tensors[0].dtype)
    return open_tensors(path)


def same_tensors(stored: StoredCache, reference: TensorSource) -> bool:
    """Whether a source has the tensors of a stored cache: names, dtypes, shapes and order."""
    ours, theirs = ([(t.label, t.dtype, t.shape) for t in tensors] for tensors in (stored.tensors, reference.tensors))
    return ours == theirs


def _map_reference(
    stored: StoredCache, reference: TensorSource, layout: str | None, heads: int | None, head_dim: int | None
) -> CacheMap:
    """The source's own map, if the reference has the same tensors: what was once declared need not be again."""
    if layout is None and same_tensors(stored, reference):
        return CacheMap.from_json(stored.header.map, reference.tensors)
    return map_cache(reference, layout, heads, head_dim)


def _pair(stored: StoredCache, cache_map: CacheMap, name: str) -> dict[int, Plane]:
    """By index of each plane of the reference: the stored plane that should equal it."""
    same_map = len(cache_map.planes) == len(stored.header.planes)
    theirs = {_key(plane, same_map): plane for plane in cache_map.planes}
    pairs: dict[int, Plane] = {}
    for plane in stored.header.planes:
        other = theirs.get(_key(plane, same_map))
        if plane.kind == "bytes" and (other is None or other.tokens != plane.tokens):
            continue
        if other is None:
            raise KvzipError(f"{name} has no {plane}, which the compressed cache has", code="reference-plane")
        if (other.tokens, other.channels) != (plane.tokens, plane.channels):
            raise KvzipError(
                f"{name}: {other} is {other.tokens} tokens x {other.channels} channels, the compressed one "
                f"{plane.tokens} x {plane.channels}",
                code="reference-shape",
            )
        pairs[other.index] = plane
    if not pairs and stored.header.planes:
        raise UsageError(f"{name} has nothing to compare with", code="reference-empty")
    return pairs


def _key(plane: Plane, same_map: bool) -> tuple[object, ...]:
    """What tells a plane apart in any layout; those of kind ``bytes`` only have their place."""
    if plane.kind == "bytes":
        return ("bytes", plane.index if same_map else None)
    return (plane.kind, plane.layer, plane.sequence)


def _read(source: TensorSource, slab: Slab) -> list[np.ndarray]:
    data = np.empty(slab.nbytes, np.uint8)
    source.read_runs(slab.tensor_map.tensor.file, *slab.runs(), data)
    return slab.gather(data.view(slab.dtype).reshape(slab.shape))
