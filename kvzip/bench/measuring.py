"""Puts one codec to work on a sample."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from kvzip.bench.attention import Queries, attention_errors
from kvzip.bench.rows import Copies, Row
from kvzip.bench.sample import Sample
from kvzip.bench.timing import Timing, timed
from kvzip.cache import Block, Plane, blocks_of
from kvzip.codecs.base import Batch, Codec
from kvzip.container import Frame, Header, Reader, Totals, Writer
from kvzip.devices.base import Array, Device
from kvzip.pipeline import Assignment, PlaneErrors, assign
from kvzip.pipeline.batches import Coded, load_frames
from kvzip.pipeline.plan import chunks
from kvzip.pipeline.report import Tally
from kvzip.pipeline.steps import Item, Notice, Work, fitted, once
from kvzip.pipeline.window import stored_dtype
from kvzip.quality import differences

if TYPE_CHECKING:
    from kvzip.bench.model import Continuation

SECONDS = 0.3
"""How long encoding and decoding are repeated, each, at least."""


@dataclass(frozen=True)
class Judge:
    """What is asked about the restored numbers beyond their own errors: each a question if it is given."""

    queries: Queries | None = None
    continuation: Continuation | None = None


def measure(
    sample: Sample,
    codec: Codec,
    device: Device,
    *,
    name: str = "",
    judge: Judge | None = None,
    seconds: float = SECONDS,
    notice: Callable[[str], None] = lambda text: None,
) -> Row:
    """Encode, weigh, decode and compare ``sample``; planes that the codec does not take are stored raw, and count.

    Args:
        name: what the row is called; the codec's name if empty.
        notice: is told of planes that are stored raw, and when the device is short of memory.
    """
    judge = judge or Judge()
    assignment = assign(
        sample.planes, lambda plane: codec, notice, lambda plane, start, stop: sample.arrays[plane.index][start:stop]
    )
    with device.activate():
        coding = _code(sample, assignment, device, seconds, once(notice))
        copies = _copies(sample.nbytes, coding.totals.total, device, seconds)
    errors = _errors(sample, coding.restored)
    lossy = any(error.relative for error in errors)
    bound = next((bound for bound in assignment.codecs if bound.name == codec.name), assignment.codecs[0])
    return Row(
        name=name or codec.name,
        sample=sample,
        stored_bytes=coding.totals.total,
        encode=coding.encode,
        decode=coding.decode,
        copies=copies,
        codec=bound,
        totals=coding.totals,
        errors=errors,
        attention=attention_errors(sample, coding.restored, judge.queries) if judge.queries else [],
        quality=judge.continuation.judge(sample, coding.restored) if judge.continuation and lossy else None,
    )


@dataclass(frozen=True)
class Coding:
    """What coding a sample both ways took, made and left."""

    encode: Timing
    decode: Timing
    totals: Totals
    restored: list[np.ndarray]


def _code(sample: Sample, assignment: Assignment, device: Device, seconds: float, notice: Notice) -> Coding:
    arrays = [device.to_device(array.view(stored_dtype(array.dtype.name, device))) for array in sample.arrays]
    targets = [device.xp.empty(array.shape, array.dtype) for array in arrays]
    batches = list(_batches(assignment, sample.planes, device))

    def encode_part(part: Alike[Block]) -> list[Coded]:
        results = assignment.codecs[part.codec].encode(_batch(part.items, arrays), device)
        return [Coded(block, part.codec, encoded) for block, encoded in zip(part.items, results, strict=True)]

    def decode_part(part: Alike[Frame]) -> None:
        blocks = [frame.entry.block for frame in part.items]
        sections = [frame.sections for frame in part.items]
        assignment.codecs[part.codec].decode(_batch(blocks, targets), sections, device)

    def encode() -> list[Coded]:
        made = [coded for batch in batches for part in fitted(batch, encode_part, device, notice) for coded in part]
        _wait(device)
        return made

    def decode() -> None:
        for batch in stored:
            for _ in fitted(batch, decode_part, device, notice):
                pass
        _wait(device)

    coded, encode_timing = timed(encode, seconds)
    totals, frames = _through_container(assignment, sample.planes, coded, device)
    del coded
    stored = [Alike(list(islice(frames, len(batch.items))), batch.codec) for batch in batches]
    _, decode_timing = timed(decode, seconds)
    restored = [device.to_host(target).view(array.dtype) for target, array in zip(targets, sample.arrays, strict=True)]
    return Coding(encode_timing, decode_timing, totals, restored)


@dataclass
class Alike(Work[Item]):
    """What may share a launch: all of one codec, by its number."""

    codec: int


def _batches(assignment: Assignment, planes: Sequence[Plane], device: Device) -> Iterator[Alike[Block]]:
    """The blocks of each batch, as in the pipeline: alike, and together as large as the device likes."""
    alike: dict[tuple[object, ...], list[Block]] = {}
    for group in assignment.groups(planes):
        shapes = dict.fromkeys((plane.dtype, plane.heads, plane.head_dim) for plane in group)
        alike.setdefault((assignment.ids[group[0].index], *shapes), []).extend(blocks_of(group))
    for blocks in alike.values():
        for chunk in chunks(blocks, lambda block: block.nbytes, device.batch_bytes):
            yield Alike(chunk, assignment.ids[chunk[0].planes[0].index])


def _batch(blocks: list[Block], arrays: Sequence[Array]) -> Batch:
    return Batch(blocks, [arrays[plane.index][block.start : block.stop] for block in blocks for plane in block.planes])


def _wait(device: Device) -> None:
    device.to_host(device.xp.zeros(1, np.uint8))


def _through_container(
    assignment: Assignment,
    planes: tuple[Plane, ...],
    coded: Sequence[Coded],
    device: Device,
) -> tuple[Totals, Iterator[Frame]]:
    """Write a ``.kvz`` to memory and read it: its bytes by component, and frames as decoders get them."""
    header = Header(
        planes=planes,
        codecs=[{"name": codec.name, "config": codec.config()} for codec in assignment.codecs],
        plane_codec=[assignment.ids[plane.index] for plane in planes],
        specs=[assignment.describe(plane) for plane in planes],
        groups=assignment.groups(planes),
    )
    file, tally = io.BytesIO(), Tally()
    writer = Writer(file, header)
    for block, number, encoded in coded:
        parts = device.to_host_all(list(encoded.sections.values()))
        writer.write_block(block, number, dict(zip(encoded.sections, parts, strict=True)))
        tally.add(block, encoded.errors)
    if recorded := tally.statistics(len(planes)):
        writer.write_statistics(recorded)
    totals = writer.close()
    reader = Reader.open(file)
    return totals, iter(load_frames(reader.read_frames(list(reader.index)), device)())


def _copies(raw: int, packed: int, device: Device, seconds: float) -> Copies | None:
    """How long as many bytes take between pinned memory and the device, where that has memory of its own."""
    if device.xp is np:
        return None
    raw_in, raw_out = _copy_timings(raw, device, seconds)
    packed_in, packed_out = _copy_timings(packed, device, seconds)
    return Copies(raw_in, packed_out, packed_in, raw_out)


def _copy_timings(nbytes: int, device: Device, seconds: float) -> tuple[Timing, Timing]:
    """In and out."""
    host = device.host_buffer(nbytes)[:nbytes]
    host.fill(0)

    def copy_in() -> Array:
        array = device.to_device(host)
        _wait(device)
        return array

    array, timing_in = timed(copy_in, seconds / 2)
    _, timing_out = timed(lambda: device.to_host(array, host), seconds / 2)
    return timing_in, timing_out


def _errors(sample: Sample, restored: Sequence[np.ndarray]) -> list[PlaneErrors]:
    tally = Tally()
    for plane, original, values in zip(sample.planes, sample.arrays, restored, strict=True):
        tally.add(Block((plane,), 0, plane.tokens), [differences(original, values)])
    return tally.totals()
