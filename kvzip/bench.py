"""Codecs side by side on one cache: size with all side information, speed in process, errors.

:func:`load` brings a cache into memory once, :func:`measure` puts one codec to work on it. What shows or compares rows
stands elsewhere.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import lcm
from typing import TypeVar

import numpy as np

from kvzip.cache import BLOCK_TOKENS, Block, Plane, blocks_of
from kvzip.codecs.base import Batch, Codec, Encoded, Sections
from kvzip.container import Header, Reader, Totals, Writer
from kvzip.devices.base import Array, Device
from kvzip.errors import UsageError
from kvzip.layouts import CacheMap, Slab
from kvzip.pipeline import Assignment, PlaneErrors, assign
from kvzip.pipeline.plan import chunks
from kvzip.pipeline.report import Tally
from kvzip.pipeline.window import stored_dtype
from kvzip.quality import differences
from kvzip.tensorfile import TensorSource

Result = TypeVar("Result")

MAX_BYTES = 512 << 20
"""Of a larger cache the first tokens are measured."""

SECONDS = 0.5
"""How long encoding and decoding are repeated, each, and at least :data:`RUNS` times."""
RUNS = 3


@dataclass(frozen=True)
class Sample:
    """Keys, values and latents in memory: ``arrays[i]`` is ``[tokens, heads, head_dim]`` of ``planes[i]``, strided."""

    planes: tuple[Plane, ...]
    arrays: tuple[np.ndarray, ...]

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


@dataclass(frozen=True)
class Row:
    """What a codec made of a sample.

    Attributes:
        codec: the codec as it was bound to the sample.
        totals: the bytes of the ``.kvz`` that it makes, by component; nothing is left out.
        encode_seconds, decode_seconds: medians of ``runs`` over the whole sample, in memory.
        errors: of each plane, measured on what was decoded.
    """

    codec: Codec
    sample: Sample
    totals: Totals
    encode_seconds: float
    decode_seconds: float
    runs: int
    errors: list[PlaneErrors]

    @property
    def ratio(self) -> float:
        return self.sample.nbytes / self.totals.total

    @property
    def bits_per_element(self) -> float:
        return 8 * self.totals.total / self.sample.elements

    @property
    def encode_speed(self) -> float:
        """GB of input per second."""
        return self.sample.nbytes / self.encode_seconds / 1e9

    @property
    def decode_speed(self) -> float:
        """GB of output per second."""
        return self.sample.nbytes / self.decode_seconds / 1e9

    def errors_of(self, kind: str) -> list[PlaneErrors]:
        return [error for error in self.errors if error.plane.kind == kind]


def load(source: TensorSource, cache_map: CacheMap, max_bytes: int = MAX_BYTES) -> Sample:
    """The KV planes of a file, as they lie in it, cut to the first tokens if they have more than ``max_bytes``.

    Raises ``UsageError`` if there are none, or if the source is a pipe.
    """
    maps = [tensor_map for tensor_map in cache_map.maps if tensor_map.role and tensor_map.grid.tokens]
    if not maps:
        raise UsageError(f"{source.name} holds no keys and values to measure", code="no-kv")
    if not source.seekable:
        raise UsageError(f"{source.name} is a pipe: save it to a file to measure codecs on it", code="pipe")
    share = max_bytes / sum(tensor_map.tensor.nbytes for tensor_map in maps)
    planes: list[Plane] = []
    arrays: list[np.ndarray] = []
    for tensor_map in maps:
        tokens, step = tensor_map.grid.tokens, lcm(BLOCK_TOKENS, max(tensor_map.grid.unit, 1))
        stop = tokens if share >= 1 else min(tokens, max(1, int(tokens * share) // step) * step)
        for outer in range(tensor_map.grid.outers):
            slab = Slab(tensor_map, outer, 0, stop)
            data = np.empty(slab.nbytes, np.uint8)
            source.read_runs(tensor_map.tensor.file, *slab.runs(), data)
            arrays += slab.gather(data.view(slab.dtype).reshape(slab.shape))
            planes += [replace(plane, tokens=stop) for plane in slab.planes]
    return Sample(tuple(replace(plane, index=index) for index, plane in enumerate(planes)), tuple(arrays))


def measure(sample: Sample, codec: Codec, device: Device, seconds: float = SECONDS) -> Row:
    """Encode, weigh, decode and compare ``sample``; planes that the codec does not take are stored raw, and count.

    Only the codec's own work is timed, on arrays that are on the device already; the size is that of a whole ``.kvz``.
    """
    assignment = assign(sample.planes, lambda plane: codec)
    with device.activate():
        arrays = [device.to_device(array.view(stored_dtype(array.dtype.name, device))) for array in sample.arrays]
        targets = [device.xp.empty(array.shape, array.dtype) for array in arrays]
        batches = list(_batches(assignment, sample.planes, device))

        def encode() -> list[list[Encoded]]:
            made = [assignment.codecs[number].encode(_batch(blocks, arrays), device) for number, blocks in batches]
            for encoded in made:
                for one in encoded:
                    one.sections = dict(zip(one.sections, device.to_host_all(list(one.sections.values())), strict=True))
            return made

        def decode() -> None:
            for (number, blocks), parts in zip(batches, sections, strict=True):
                assignment.codecs[number].decode(_batch(blocks, targets), parts, device)
            device.to_host(device.xp.ascontiguousarray(targets[-1][:1, :1, :1]))  # waits

        encoded, encode_times = _timed(encode, seconds)
        totals, sections = _through_container(assignment, sample.planes, batches, encoded, device)
        _, decode_times = _timed(decode, seconds)
        restored = [
            device.to_host(target).view(array.dtype) for target, array in zip(targets, sample.arrays, strict=True)
        ]
    return Row(
        codec=next((bound for bound in assignment.codecs if bound.name == codec.name), assignment.codecs[0]),
        sample=sample,
        totals=totals,
        encode_seconds=statistics.median(encode_times),
        decode_seconds=statistics.median(decode_times),
        runs=min(len(encode_times), len(decode_times)),
        errors=_errors(sample, restored),
    )


def copy_speed(sample: Sample, seconds: float = SECONDS) -> float:
    """GB/s of a plain copy of as many bytes on one core of the host: what no codec can be expected to pass by far."""
    source = np.ones(min(sample.nbytes, 256 << 20), np.uint8)
    target = np.empty_like(source)
    _, times = _timed(lambda: np.copyto(target, source), seconds)
    return source.nbytes / statistics.median(times) / 1e9


def _batches(assignment: Assignment, planes: Sequence[Plane], device: Device) -> Iterator[tuple[int, list[Block]]]:
    """Codec number and blocks of each batch, as in the pipeline: alike, and together as large as the device likes."""
    alike: dict[tuple[object, ...], list[Block]] = {}
    for group in assignment.groups(planes):
        shapes = dict.fromkeys((plane.dtype, plane.heads, plane.head_dim) for plane in group)
        alike.setdefault((assignment.ids[group[0].index], *shapes), []).extend(blocks_of(group))
    for blocks in alike.values():
        for chunk in chunks(blocks, lambda block: block.nbytes, device.batch_bytes):
            yield assignment.ids[chunk[0].planes[0].index], chunk


def _batch(blocks: list[Block], arrays: Sequence[Array]) -> Batch:
    return Batch(blocks, [arrays[plane.index][block.start : block.stop] for block in blocks for plane in block.planes])


def _timed(work: Callable[[], Result], seconds: float) -> tuple[Result, list[float]]:
    """The result and the times of some runs, after one that does not count: it makes memory and tables ready."""
    result = work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < RUNS or time.perf_counter() < end:
        start = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - start)
    return result, times


def _through_container(
    assignment: Assignment,
    planes: tuple[Plane, ...],
    batches: Sequence[tuple[int, list[Block]]],
    encoded: Sequence[Sequence[Encoded]],
    device: Device,
) -> tuple[Totals, list[list[Sections]]]:
    """Write a ``.kvz`` to memory and read it: its bytes by component, and sections as decoders get them."""
    header = Header(
        planes=planes,
        codecs=[{"name": codec.name, "config": codec.config()} for codec in assignment.codecs],
        plane_codec=[assignment.ids[plane.index] for plane in planes],
        specs=[assignment.describe(plane) for plane in planes],
        groups=assignment.groups(planes),
    )
    file, tally = io.BytesIO(), Tally()
    writer = Writer(file, header)
    for (number, blocks), results in zip(batches, encoded, strict=True):
        for block, one in zip(blocks, results, strict=True):
            writer.write_block(block, number, one.sections)
            tally.add(block, one.errors)
    if recorded := tally.statistics(len(planes)):
        writer.write_statistics(recorded)
    totals = writer.close()
    reader = Reader.open(file)
    entries = iter(reader.index)
    sections: list[list[Sections]] = []
    for _, blocks in batches:
        frames = reader.read_frames(list(islice(entries, len(blocks))))
        sections.append([_on_device(frame.sections, device) for frame in frames])
    return totals, sections


def _on_device(sections: Mapping[str, np.ndarray], device: Device) -> Sections:
    return dict(zip(sections, device.to_device_all(list(sections.values())), strict=True))


def _errors(sample: Sample, restored: Sequence[np.ndarray]) -> list[PlaneErrors]:
    tally = Tally()
    for plane, original, values in zip(sample.planes, sample.arrays, restored, strict=True):
        tally.add(Block((plane,), 0, plane.tokens), [differences(original, values)])
    return tally.totals()
