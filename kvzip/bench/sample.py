"""A cache, or the beginning of one, in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from kvzip.cache import BLOCK_TOKENS, Plane
from kvzip.errors import UsageError
from kvzip.layouts import CacheMap, Slab
from kvzip.tensorfile import TensorSource

MAX_BYTES = 512 << 20
"""Of a larger cache the first tokens are measured."""

TOKEN_IDS = ("token_ids", "input_ids")
"""Names under which caches carry the tokens of their text."""


@dataclass(frozen=True)
class Sample:
    """Keys, values and latents in memory.

    Attributes:
        planes: what is what; each plane's ``index`` is its place here.
        arrays: ``arrays[i]`` is ``[tokens, heads, head_dim]`` of ``planes[i]``, strided.
        buffers: the bytes that the arrays lie in, in the file's order: what a general compressor would see.
    """

    planes: tuple[Plane, ...]
    arrays: tuple[np.ndarray, ...]
    buffers: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    @property
    def elements(self) -> int:
        return sum(plane.tokens * plane.channels for plane in self.planes)

    @property
    def tokens(self) -> int:
        """Of the longest plane."""
        return max(plane.tokens for plane in self.planes)

    def kinds(self) -> list[str]:
        """``key``, ``value``, ``latent``: those that are there."""
        return list(dict.fromkeys(plane.kind for plane in self.planes))


def load(source: TensorSource, cache_map: CacheMap, max_bytes: int = MAX_BYTES) -> Sample:
    """The KV planes of a file, as they lie in it, cut to the first tokens if they have more than ``max_bytes``.

    Raises ``UsageError`` if there are none, or if the source is a pipe.
    """
    maps = [tensor_map for tensor_map in cache_map.maps if tensor_map.role and tensor_map.grid.tokens]
    if not any(plane.nbytes for tensor_map in maps for plane in tensor_map.planes):
        raise UsageError(f"{source.name} holds no keys and values to measure", code="no-kv")
    if not source.seekable:
        raise UsageError(f"{source.name} is a pipe: save it to a file to measure codecs on it", code="pipe")
    share = max_bytes / sum(tensor_map.tensor.nbytes for tensor_map in maps)
    planes: list[Plane] = []
    arrays: list[np.ndarray] = []
    buffers: list[np.ndarray] = []
    for tensor_map in maps:
        tokens, step = tensor_map.grid.tokens, lcm(BLOCK_TOKENS, max(tensor_map.grid.unit, 1))
        stop = tokens if share >= 1 else min(tokens, max(1, int(tokens * share) // step) * step)
        for outer in range(tensor_map.grid.outers):
            slab = Slab(tensor_map, outer, 0, stop)
            data = np.empty(slab.nbytes, np.uint8)
            source.read_runs(tensor_map.tensor.file, *slab.runs(), data)
            buffers.append(data)
            arrays += slab.gather(data.view(slab.dtype).reshape(slab.shape))
            planes += [replace(plane, tokens=stop) for plane in slab.planes]
    return Sample(
        tuple(replace(plane, index=index) for index, plane in enumerate(planes)), tuple(arrays), tuple(buffers)
    )


def token_ids(source: TensorSource) -> np.ndarray | None:
    """The tokens of the text that a file carries beside its cache, int64 ``[N]``; None if it carries none."""
    for tensor in source.tensors:
        if tensor.name in TOKEN_IDS and tensor.dtype in ("int64", "int32") and tensor.nbytes:
            data = np.empty(tensor.nbytes, np.uint8)
            source.read_into(tensor.file, tensor.offset, data)
            return data.view(tensor.dtype).reshape(-1).astype(np.int64)
    return None
