"""Numbers of a source for codecs that look before they code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from kvzip.cache import Plane
from kvzip.codecs.base import Read
from kvzip.devices.base import Device
from kvzip.layouts import CacheMap, Slab
from kvzip.pipeline.spool import spooled_source
from kvzip.tensorfile import TensorSource


def reader(source: TensorSource, cache_map: CacheMap, device: Device) -> Read:
    """Reads tokens of any plane of ``source``, which must be seekable, to the host; ``device`` is where it may lie."""

    def read(plane: Plane, start: int, stop: int) -> np.ndarray:
        tensor_map = next(part for part in cache_map.maps if plane in part.planes)
        grid = tensor_map.grid
        outer = tensor_map.planes.index(plane) * grid.outers // len(tensor_map.planes)
        first = start - start % grid.unit
        slab = Slab(tensor_map, outer, first, min(-(-stop // grid.unit) * grid.unit, plane.tokens))
        held = source.allocate(slab.nbytes) if source.allocate else np.empty(slab.nbytes, np.uint8)
        source.read_runs(tensor_map.tensor.file, *slab.runs(), held)
        on_host = np.asarray(device.to_host(held)) if source.allocate else held
        numbers: np.ndarray = slab.gather(on_host.view(slab.dtype).reshape(slab.shape))[slab.planes.index(plane)]
        return numbers[start - first : stop - first]

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
