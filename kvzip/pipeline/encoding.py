"""The road to a ``.kvz``: slabs are read, coded and written, all at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, BinaryIO

from kvzip._version import __version__
from kvzip.cache import BLOCK_TOKENS, Block
from kvzip.container import Header, Writer
from kvzip.devices.base import Device
from kvzip.errors import UsageError
from kvzip.layouts import CacheMap
from kvzip.pipeline.assignment import Assignment
from kvzip.pipeline.batches import Coded, encode_blocks
from kvzip.pipeline.plan import Unit, chunks, is_forward, plan
from kvzip.pipeline.report import Report, Tally
from kvzip.pipeline.spool import spooled_source
from kvzip.pipeline.stages import WINDOWS, BufferPool, run_stages
from kvzip.pipeline.steps import Notice, Step, fitted, once, steps
from kvzip.pipeline.window import Window
from kvzip.tensorfile import TensorSource

Progress = Callable[[int], None]


def ignore(_: Any) -> None:
    """A listener that does not listen."""


def compress(
    source: TensorSource,
    cache_map: CacheMap,
    sink: BinaryIO,
    *,
    assignment: Assignment,
    device: Device,
    block_tokens: int = BLOCK_TOKENS,
    identity: Mapping[str, Any] | None = None,
    embed_profile: bool = False,
    notice: Notice = ignore,
    progress: Progress = ignore,
) -> Report:
    """Write ``source`` as one ``.kvz`` to ``sink``, which stays open and is never sought.

    Args:
        cache_map: the planes of ``source``.
        assignment: a bound codec for each plane (:func:`kvzip.pipeline.assignment.assign`).
        identity: what the header tells about the model and tokens that the cache belongs to.
        embed_profile: whether to write the codec's profile, too.
        notice: is told, in a sentence, when a pipe has to be spooled or a device is short of memory.
        progress: is told how many more bytes of the source have been written, from another thread.
    """
    begin = time.perf_counter()
    groups = assignment.groups(cache_map.planes)
    writer = Writer(sink, _header(source, cache_map, assignment, block_tokens, identity or {}))
    if embed_profile:
        _embed(writer, assignment)
    report = Report(original_bytes=sum(file.size for file in source.files))
    used = [assignment.codec_of(plane).name for plane in cache_map.planes if plane.kind != "bytes"]
    report.codecs = list(dict.fromkeys(used))
    short = once(notice)
    tally = Tally()
    forward = not source.seekable and is_forward(plan(cache_map, groups, block_tokens, forward=True))

    def read(pool: BufferPool) -> Iterator[Step[Block]]:
        units = plan(cache_map, groups, block_tokens, forward=forward)
        for members in chunks(units, lambda unit: unit.nbytes, device.batch_bytes):
            window = Window(members, pool.take)
            for slab, part in window.parts():
                opened.read_runs(slab.tensor_map.tensor.file, *slab.runs(), part)
            blocks = (block for unit in members for block in unit.blocks())
            yield from steps(window, list(chunks(blocks, lambda block: block.nbytes, device.batch_bytes)), _belongs)
        opened.finish()

    def encode(step: Step[Block]) -> Callable[[], list[Coded]]:
        step.window.upload(device)
        coded = encode_blocks(step.items, step.window, assignment, device)
        if step.last:
            step.window.release()
        return coded

    def code(step: Step[Block]) -> tuple[Step[Block], list[Callable[[], list[Coded]]]]:
        return step, list(fitted(step, encode, device, short))

    def write(pool: BufferPool, result: tuple[Step[Block], list[Callable[[], list[Coded]]]]) -> None:
        step, parts = result
        for block, codec, encoded in (coded for part in parts for coded in part()):
            writer.write_block(block, codec, encoded.sections)
            tally.add(block, encoded.errors)
            progress(block.nbytes)
            report.blocks += 1
        if step.last:
            pool.give(step.window.buffer)

    spooled = nullcontext(source) if source.seekable or forward else spooled_source(source, notice)
    with spooled as opened, device.activate():
        run_stages(
            read, code, write, WINDOWS * device.batch_bytes, opened.allocate or device.host_buffer,
            prepare=lambda step: step.window.prefetch(device),
        )  # fmt: skip
    if statistics := tally.statistics(len(cache_map.planes)):
        writer.write_statistics(statistics)
    report.totals = writer.close()
    report.stored_bytes = report.totals.total
    report.errors = tally.totals()
    report.seconds = time.perf_counter() - begin
    return report


def _embed(writer: Writer, assignment: Assignment) -> None:
    profiles = {codec.profile.hash: codec.profile for codec in assignment.codecs if codec.profile is not None}
    if len(profiles) != 1:
        raise UsageError(
            f"the codecs of the file use {len(profiles)} profiles, and only one can be embedded"
            if profiles
            else "no codec of the file uses a profile that could be embedded",
            code="embed-profile",
        )
    ((digest, profile),) = profiles.items()
    writer.write_profile(digest, profile.to_bytes())


def _belongs(block: Block, unit: Unit) -> bool:
    return block.planes in unit.groups and unit.start <= block.start < unit.stop


def _header(
    source: TensorSource, cache_map: CacheMap, assignment: Assignment, block_tokens: int, identity: Mapping[str, Any]
) -> Header:
    planes = cache_map.planes
    return Header(
        planes=planes,
        codecs=[{"name": codec.name, "config": codec.config()} for codec in assignment.codecs],
        plane_codec=[assignment.ids[plane.index] for plane in planes],
        specs=[assignment.codec_of(plane).describe(plane) for plane in planes],
        block_tokens=block_tokens,
        map={**cache_map.to_json(), "sizes": [file.size for file in source.files]},
        files=[(file.path, file.header) for file in source.files],
        producer=f"kvzip {__version__}",
        identity=dict(identity),
        groups=assignment.groups(planes),
    )
