"""What the tests of files and layouts share: the samples, and a copy through slabs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvzip.layouts import CacheMap, map_cache
from kvzip.tensorfile import TensorSource, open_sink

SAMPLES = Path(__file__).parent / "data" / "layouts"


class Pipe(io.RawIOBase):
    """A stream that gives at most 1000 bytes a time and cannot seek."""

    def __init__(self, content: bytes) -> None:
        self._inner = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return self._inner.readinto(memoryview(buffer)[:1000])


def planes_of(source: TensorSource, cache_map: CacheMap, block_tokens: int = 1024) -> dict[int, np.ndarray]:
    """Every plane ``[tokens, heads, head_dim]`` by its index, read slab by slab."""
    pieces: dict[int, list[np.ndarray]] = {plane.index: [] for plane in cache_map.planes}
    for tensor_map in cache_map.maps:
        for slab in tensor_map.slabs(block_tokens):
            array = np.empty(slab.shape, slab.dtype)
            source.read_runs(tensor_map.tensor.file, *slab.runs(), array)
            for plane, view in zip(slab.planes, slab.gather(array), strict=True):
                assert view.strides[-1] == view.itemsize or view.shape[-1] <= 1
                pieces[plane.index].append(view.copy())
    shapes = {plane.index: (0, plane.heads, plane.head_dim) for plane in cache_map.planes}
    return {index: np.concatenate(found) if found else np.empty(shapes[index]) for index, found in pieces.items()}


def copy_through(source: TensorSource, target: Path | BinaryIO, block_tokens: int = 1024, **options: Any) -> CacheMap:
    """Read a source slab by slab, take the slabs apart into planes, put them together again and write them."""
    cache_map = map_cache(source, **options)
    with open_sink(target, source.files) as sink:
        for tensor_map in cache_map.maps:
            file = tensor_map.tensor.file
            for slab in tensor_map.slabs(block_tokens):
                array, restored = np.empty(slab.shape, slab.dtype), np.zeros(slab.shape, slab.dtype)
                offsets, nbytes = slab.runs()
                assert len(offsets) * nbytes == slab.nbytes == array.nbytes
                source.read_runs(file, offsets, nbytes, array)
                targets = slab.gather(restored)
                for view, place in zip(slab.gather(array), targets, strict=True):
                    place[...] = view
                slab.scatter(restored, targets)
                sink.write_runs(file, offsets, nbytes, restored)
    source.finish()
    return cache_map
