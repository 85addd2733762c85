"""Caches in files as sources of training: safetensors in any layout, and ``.kvz``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, overload

import numpy as np

from kvzip.cache import Plane
from kvzip.codecs import codec_class
from kvzip.container import Reader
from kvzip.devices import get_device
from kvzip.errors import UsageError
from kvzip.layouts import Slab, TensorMap, map_cache
from kvzip.opening import open_stored
from kvzip.pipeline import decode_plane
from kvzip.profiles.profile import Geometry
from kvzip.profiles.sources import Source
from kvzip.tensorfile import open_tensors

FLOATS = ("bfloat16", "float16", "float32", "float64")

Read = Callable[[Plane], np.ndarray]
Notice = Callable[[str], None]


@dataclass(frozen=True)
class CacheFile:
    """One sequence of a file. ``planes`` are found by layer and kind; ``read`` brings one, ``[tokens, heads, dim]``."""

    name: str
    geometry: Geometry
    tokens: int
    planes: Mapping[tuple[int, str], Plane]
    read: Read

    def plane(self, layer: int, kind: Literal["key", "value"]) -> np.ndarray:
        return self.read(self.planes[layer, kind])

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes.values())


class Keys(Sequence[np.ndarray]):
    """The keys of a source, layer by layer, each read when it is asked for."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return self._source.geometry.layers

    @overload
    def __getitem__(self, layer: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, layer: slice) -> Sequence[np.ndarray]: ...
    def __getitem__(self, layer: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        if isinstance(layer, slice):
            return [self[i] for i in range(*layer.indices(len(self)))]
        return self._source.plane(layer, "key")


def open_caches(
    path: str, layout: str | None = None, heads: int | None = None, head_dim: int | None = None,
    notice: Notice = lambda _: None,
) -> list[CacheFile]:  # fmt: skip
    """The sequences of a safetensors file or folder, or of every cache in a ``.kvz``.

    Only headers are read here; files are opened again for each plane, so that their number has no limit.

    Args:
        layout, heads, head_dim: as for :func:`kvzip.compress`; a ``.kvz`` knows its own.
        notice: is told, in a sentence, what speaks against learning from a file.

    Raises:
        UsageError: no keys and values of one shape in all layers from 0 on, or numbers that are no floats.
        KvzipError: whatever opening the file raises.
    """
    if Path(path).is_file() and path.endswith(".kvz"):
        return _open_stored(path, notice)
    with open_tensors(path) as source:
        if not source.seekable:
            raise UsageError(f"{path} is a pipe: save it to a file to train on it", code="pipe")
        cache_map = map_cache(source, layout, heads, head_dim)
    for text in cache_map.notices:
        notice(f"{path}: {text}")
    places = {
        plane.index: (number, place * tensor_map.grid.outers // len(tensor_map.planes))
        for number, tensor_map in enumerate(cache_map.maps)
        for place, plane in enumerate(tensor_map.planes)
    }

    @lru_cache(maxsize=2)  # keys and values of all layers may lie in one slab each
    def slab_of(number: int, outer: int) -> dict[int, np.ndarray]:
        return _read_slab(path, cache_map.maps[number], outer)

    def read(plane: Plane) -> np.ndarray:
        return slab_of(*places[plane.index])[plane.index]

    return list(_sequences(path, cache_map.planes, read))


def _read_slab(path: str, tensor_map: TensorMap, outer: int) -> dict[int, np.ndarray]:
    slab = Slab(tensor_map, outer, 0, tensor_map.grid.tokens)
    data = np.empty(slab.nbytes, np.uint8)
    with open_tensors(path) as source:
        source.read_runs(tensor_map.tensor.file, *slab.runs(), data)
    arrays = slab.gather(data.view(slab.dtype).reshape(slab.shape))
    return {plane.index: array for plane, array in zip(slab.planes, arrays, strict=True)}


def _open_stored(path: str, notice: Notice) -> list[CacheFile]:
    with Reader.open(path) as reader:
        headers = [reader.member(number).header for number in range(len(reader.members))]
    device = get_device("cpu")
    found: list[CacheFile] = []
    for number, header in enumerate(headers):
        kv = [plane for plane in header.planes if plane.kind != "bytes"]
        used = {header.codecs[header.plane_codec[plane.index]]["name"] for plane in kv}
        if lossy := sorted(name for name in used if not codec_class(name).lossless):
            notice(f"{path} was made by {', '.join(lossy)}: its errors are learned, too; originals teach better")

        def read(plane: Plane, number: int = number) -> np.ndarray:
            with open_stored(path, number) as stored:
                array: np.ndarray = decode_plane(stored, plane.index, 0, plane.tokens, device)
            return array

        found += _sequences(path, header.planes, read)
    return found


def _sequences(path: str, planes: Sequence[Plane], read: Read) -> Iterator[CacheFile]:
    by_sequence: defaultdict[int, dict[tuple[int, str], Plane]] = defaultdict(dict)
    for plane in planes:
        if plane.kind != "bytes":
            by_sequence[plane.sequence][plane.layer, plane.kind] = plane
    if not by_sequence:
        raise UsageError(f"{path} holds no keys and values to learn from", code="train-caches")
    for sequence, own in sorted(by_sequence.items()):
        name = f"{path}, sequence {sequence}" if len(by_sequence) > 1 else path
        yield CacheFile(name, _geometry(name, own), next(iter(own.values())).tokens, own, read)


def _geometry(name: str, planes: Mapping[tuple[int, str], Plane]) -> Geometry:
    layers = len(planes) // 2
    wanted = {(layer, kind) for layer in range(layers) for kind in ("key", "value")}
    shapes = {(plane.kind, plane.heads, plane.head_dim, plane.tokens) for plane in planes.values()}
    if set(planes) != wanted or len(shapes) != 2 or len({(heads, tokens) for _, heads, _, tokens in shapes}) != 1:
        raise UsageError(
            f"{name}: a profile is learned from keys and values of one shape in all layers from 0 on",
            code="train-geometry",
        )
    for plane in planes.values():
        if plane.dtype not in FLOATS:
            raise UsageError(f"{name}: {plane} is {plane.dtype}, a profile is learned from floats", code="train-caches")
    key, value = planes[0, "key"], planes[0, "value"]
    return Geometry(layers, key.heads, key.head_dim, value.head_dim)
