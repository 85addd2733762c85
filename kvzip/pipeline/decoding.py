"""The road back: frames are read, decoded to slabs and written, all at the same time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from math import prod
from typing import TypeGuard

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.container import Frame, StreamReader
from kvzip.devices.base import Array, Device
from kvzip.layouts import Origin, Restriction
from kvzip.pipeline.batches import Pieces, decode_frames, load_frames
from kvzip.pipeline.encoding import Progress, ignore
from kvzip.pipeline.plan import Group, Unit, chunks, is_forward, plan
from kvzip.pipeline.report import Report
from kvzip.pipeline.spool import spooled_sink
from kvzip.pipeline.stages import WINDOWS, BufferPool, memory_limit, run_stages
from kvzip.pipeline.steps import Notice, Step, Work, fitted, once
from kvzip.pipeline.stored import FileFrames, StoredCache, Want
from kvzip.pipeline.window import Piece, Window, stored_dtype
from kvzip.tensorfile import ArraySink, SourceFile, TensorSink


class Discard:
    """A sink that keeps nothing: for decoding that only has to succeed."""

    seekable = True
    files: tuple[SourceFile, ...] = ()

    def write_runs(self, file: int, offsets: Sequence[int], nbytes: int, buffer: Array) -> None:
        """Nothing to do."""


def decompress(
    stored: StoredCache,
    selection: Restriction,
    sink: TensorSink | ArraySink | Discard,
    *,
    device: Device,
    notice: Notice = ignore,
    progress: Progress = ignore,
) -> Report:
    """Restore ``selection`` of a cache into ``sink``, which was opened for the selection's files and stays open.

    Reads only the frames that the selection needs, unless they come from a pipe.

    Args:
        notice: is told, in a sentence, when a pipe has to be spooled or a device is short of memory.
        progress: is told how many more bytes have been written, from another thread.
    """
    begin = time.perf_counter()
    header = stored.header
    report = Report(original_bytes=sum(file.size for file in selection.files))
    short = once(notice)
    groups = _groups(selection, header.group_of)
    first = {number: origin.start for number, origin in enumerate(selection.origins)}
    frames = stored.frames(selection, device.host_buffer)

    def units(forward: bool) -> Iterator[Unit]:
        return plan(selection.cache_map, groups, header.block_tokens, forward=forward, first=first)

    forward = _is_pipe(sink) and is_forward(units(forward=True))

    def read(pool: BufferPool) -> Iterator[Step[Frame]]:
        for members in chunks(units(forward), lambda unit: unit.nbytes, device.batch_bytes):
            window = Window(members, pool.take)
            step: Step[Frame] | None = None
            for found in frames.chunks(_wants(members, selection.origins, header.group_of), device.batch_bytes):
                if step is not None:
                    yield step
                step = Step(found, window, step is None, False, belongs)
            if step is not None:
                step.last = True
                yield step
        frames.finish()

    def belongs(frame: Frame, unit: Unit) -> bool:
        block, group = frame.entry.block, frame.entry.group
        wants = _wants([unit], selection.origins, header.group_of)
        return any(want.group == group and block.start < want.stop and want.start < block.stop for want in wants)

    def prepare(step: Step[Frame]) -> None:
        step.arrival = step.arrival or load_frames(step.items, device)

    def decode(step: Step[Frame]) -> None:
        step.window.allot(device)
        loaded = (step.arrival or load_frames(step.items, device))()
        decode_frames(loaded, stored.codecs, _pieces(step.window, selection.origins), device)
        if step.last:
            step.window.download(device)
            step.window.release()

    def code(step: Step[Frame]) -> Step[Frame]:
        for _ in fitted(step, decode, device, short):
            pass
        report.blocks += len(step.items)
        step.items, step.arrival = [], None
        return step

    def write(pool: BufferPool, step: Step[Frame]) -> None:
        if step.last:
            for slab, part in step.window.parts():
                target.write_runs(slab.tensor_map.tensor.file, *slab.runs(), part)
                progress(slab.nbytes)
            pool.give(step.window.buffer)

    spooled = spooled_sink(sink, notice) if _is_pipe(sink) and not forward else nullcontext(sink)
    with spooled as target, device.activate():
        run_stages(read, code, write, WINDOWS * device.batch_bytes, device.host_buffer, prepare)
    report.totals = stored.reader.totals
    report.stored_bytes = report.totals.total
    report.seconds = time.perf_counter() - begin
    return report


def collect(
    stored: StoredCache,
    selection: Restriction,
    *,
    device: Device,
    notice: Notice = ignore,
    progress: Progress = ignore,
) -> dict[str, np.ndarray]:
    """The tensors of ``selection`` by name, restored in memory; arguments as for :func:`decompress`."""
    with memory_limit():
        sink = ArraySink(selection.tensors)
    decompress(stored, selection, sink, device=device, notice=notice, progress=progress)
    return sink.arrays


def decode_plane(
    stored: StoredCache,
    plane: int,
    start: int,
    stop: int,
    device: Device,
    out: Array | None = None,
    notice: Notice = ignore,
) -> Array:
    """Tokens ``start:stop`` of the file's plane of that index, ``[tokens, heads, head_dim]`` in its dtype, on the host.

    Or in ``out``, if it is given: a device array of that shape with a contiguous last axis, which is returned when what
    fills it has been launched. ``notice`` is told when the device is short of memory.
    """
    header, found = stored.header, stored.header.planes[plane]
    group, dtype = header.group_of[plane], stored_dtype(found.dtype, device)
    frames = FileFrames(stored.file, stored.codecs, device.host_buffer)
    if (whole := out) is None:
        shape = (stop - start, found.heads, found.head_dim)
        with memory_limit():
            whole = device.host_buffer(prod(shape) * found.itemsize).view(found.dtype).reshape(shape)
    in_place = out is not None or device.xp is np

    def decode(work: Work[Block]) -> None:
        low, high = work.items[0].start, work.items[-1].stop
        part = whole[low - start : high - start]
        array = part.view(dtype) if in_place else device.xp.empty(part.shape, dtype)

        def pieces(index: int, first: int, last: int) -> list[Piece]:
            first, last = max(first, low), min(last, high)
            return [Piece(first, last, array[first - low : last - low])] if index == plane and first < last else []

        for some in frames.chunks([Want(group, low, high)], device.batch_bytes):
            decode_frames(load_frames(some, device)(), stored.codecs, pieces, device)
        if not in_place:
            device.to_host(array, part)

    if start < stop:
        entries = frames.entries([Want(group, start, stop)])
        runs = sorted((max(entry.block.start, start), min(entry.block.stop, stop)) for entry in entries)
        with device.activate():
            for _ in fitted(Work([Block((found,), low, high) for low, high in runs]), decode, device, notice):
                pass
    return whole


def verify(
    stored: StoredCache, *, device: Device | None = None, notice: Notice = ignore, progress: Progress = ignore
) -> Report:
    """Read all of a cache, compare its checksums, and with a device decode it, too. Raises what decompressing would."""
    if device is not None:
        return decompress(stored, stored.select(), Discard(), device=device, notice=notice, progress=progress)
    begin = time.perf_counter()
    report = Report(original_bytes=sum(file.size for file in stored.files))
    if isinstance(stored.reader, StreamReader):
        runs: Iterator[list[Frame]] = ([frame] for frame in stored.reader.frames())
    else:
        runs = map(
            stored.reader.read_frames, chunks(stored.reader.index, lambda entry: entry.length, Device.batch_bytes)
        )
    for frames in runs:
        report.blocks += len(frames)
        progress(sum(frame.entry.block.nbytes for frame in frames))
    report.totals = stored.reader.totals
    report.stored_bytes = report.totals.total
    report.seconds = time.perf_counter() - begin
    return report


def _is_pipe(sink: TensorSink | ArraySink | Discard) -> TypeGuard[TensorSink]:
    return not sink.seekable


def _groups(selection: Restriction, group_of: dict[int, int]) -> list[Group]:
    """The selection's planes, those together whose blocks share frames."""
    found: dict[int, list[Plane]] = {}
    for plane, origin in zip(selection.cache_map.planes, selection.origins, strict=True):
        found.setdefault(group_of[origin.plane.index], []).append(plane)
    return [tuple(planes) for planes in found.values()]


def _wants(units: Sequence[Unit], origins: Sequence[Origin], group_of: dict[int, int]) -> list[Want]:
    """What of the file's groups a window needs, in the file's own count of tokens."""
    wants = []
    for unit in units:
        for group in unit.groups:
            origin = origins[group[0].index]
            wants.append(Want(group_of[origin.plane.index], unit.start + origin.start, unit.stop + origin.start))
    return wants


def _pieces(window: Window, origins: Sequence[Origin]) -> Pieces:
    """Where the file's planes and tokens lie in a window of the selection."""
    places = {origin.plane.index: (number, origin.start) for number, origin in enumerate(origins)}

    def pieces(plane: int, start: int, stop: int) -> list[Piece]:
        if plane not in places:
            return []
        number, first = places[plane]
        found = window.pieces(number, start - first, stop - first)
        return [Piece(piece.start + first, piece.stop + first, piece.array) for piece in found]

    return pieces
