"""Numbers of a source for codecs that look before they code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from kvzip.cache import Plane
from kvzip.codecs.base import Read
from kvzip.layouts import CacheMap
from kvzip.pipeline.spool import spooled_source
from kvzip.tensorfile import TensorSource


def reader(source: TensorSource, cache_map: CacheMap) -> Read:
    """Reads the first tokens of any plane of ``source``, which must be seekable."""

    def read(plane: Plane, tokens: int) -> np.ndarray:
        tensor_map = next(part for part in cache_map.maps if plane in part.planes)
        slab = next(slab for slab in tensor_map.slabs(tokens) if plane in slab.planes and slab.start == 0)
        held = np.empty(slab.shape, slab.dtype)
        source.read_runs(tensor_map.tensor.file, *slab.runs(), held.reshape(-1).view(np.uint8))
        numbers: np.ndarray = slab.gather(held)[slab.planes.index(plane)]
        return numbers

    return read


def at_random(
    source: TensorSource, wanted: bool, notice: Callable[[str], None]
) -> AbstractContextManager[TensorSource]:
    """``source``, or a copy that can be read at random if that is ``wanted`` and it cannot."""
    return (
        spooled_source(source, notice, "the codec looks at the numbers first")
        if wanted and not source.seekable
        else nullcontext(source)
    )
