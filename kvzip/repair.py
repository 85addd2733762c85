"""Saves what is intact of a truncated or damaged ``.kvz`` as a sound one: nothing is decoded, frames are copied."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, BinaryIO, cast

from kvzip._version import __version__
from kvzip.cache import Block, Plane
from kvzip.container import Header, Lost, Reader, Recovery, Writer, recover
from kvzip.container.format import naming
from kvzip.errors import CorruptError, KvzipError
from kvzip.layouts import Restriction, TensorMap, restrict
from kvzip.pipeline import StoredCache


@dataclass(frozen=True)
class Repair:
    """What was saved of one cache.

    Attributes:
        header: of the cache as it was; None if that is lost.
        layers: the numbers of the layers that were saved.
        tokens: how many of their first tokens, if that is not all; else None.
        tensors: names of the tensors that are no KV and were lost.
        damage: what was found broken, for people.
        missing: the token ranges that no intact frame holds.
        left_out: the token ranges that are intact, but belong to no prefix or run of layers that was saved.
        lost: why nothing was saved; None if something was.
    """

    header: Header | None
    layers: list[int] = field(default_factory=list)
    tokens: int | None = None
    tensors: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    missing: list[tuple[Plane, int, int]] = field(default_factory=list)
    left_out: list[tuple[Plane, int, int]] = field(default_factory=list)
    lost: KvzipError | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing but structure was broken."""
        return not self.missing and self.lost is None


def repair(source: str | os.PathLike[str] | BinaryIO, sink: BinaryIO, *, whole_layers: bool = False) -> list[Repair]:
    """Write what is left of every cache in ``source`` to ``sink``: one sound member of each that is not lost.

    A prefix of a KV cache is valid on its own: of all layers the tokens before the first that any of them lacks are
    kept. Where that leaves none, and where ``whole_layers`` prefers it, the longest run of layers that lack nothing.

    Args:
        source: a path or a seekable stream.
        sink: stays open.

    Returns:
        One report for each cache, in their order, those that are lost too.

    Raises:
        CorruptError: no header is intact, or of no cache first tokens or a whole layer.
        UnsupportedError: the file needs a newer kvzip.
        UsageError: the source is a pipe, or a file of another kind.
    """
    found = recover(source)
    recoveries = [each for each in found if isinstance(each, Recovery)]
    try:
        repairs = [_save(each, sink, whole_layers) if isinstance(each, Recovery) else _lost(each) for each in found]
        reasons = [each.lost for each in repairs if each.lost is not None]
        if len(reasons) == len(repairs):
            with naming(recoveries[0].reader.name):
                raise reasons[0]
        return repairs
    finally:
        for recovery in recoveries:
            recovery.reader.close()


def _lost(member: Lost) -> Repair:
    return Repair(None, lost=member.reason)


def _save(recovery: Recovery, sink: BinaryIO, whole_layers: bool) -> Repair:
    try:
        part, header, report = _plan(recovery, whole_layers)
    except KvzipError as error:
        return Repair(recovery.header, damage=recovery.damage, missing=recovery.missing, lost=error)
    _copy(recovery, part, header, sink)
    return report


def _plan(recovery: Recovery, whole_layers: bool) -> tuple[Restriction, Header, Repair]:
    """What to save under which header. Raises KvzipError if nothing of use is left."""
    header = recovery.header
    stored = StoredCache(cast(Reader, recovery.reader))
    choice = _Choice(recovery, stored.cache_map.maps)
    if not recovery.missing:
        return stored.select(), header, Repair(header, choice.layers, damage=recovery.damage)
    tokens, layers = choice.best(whole_layers)
    lost = [m.tensor for m in stored.cache_map.maps if m.role is None and choice.lacks(m.planes)]
    kept = tuple(m for m in stored.cache_map.maps if m.tensor not in lost)
    if not kept:
        raise CorruptError("no tensor of it is whole", code="kvz-lost")
    cut = None if tokens is None else range(tokens)
    run = None if layers is None else range(layers[0], layers[-1] + 1)
    part = restrict(replace(stored.cache_map, maps=kept), stored.files, run, cut)
    saved = choice.layers if layers is None else layers
    left_out = _left_out(recovery, {origin.plane.index: origin.stop for origin in part.origins})
    report = Repair(
        header, saved, tokens, [tensor.label for tensor in lost], recovery.damage, recovery.missing, left_out
    )
    return part, _smaller(header, part, tokens is not None), report


def _left_out(recovery: Recovery, kept: Mapping[int, int]) -> list[tuple[Plane, int, int]]:
    """What is intact beyond the first ``kept`` tokens of each plane (by its index; none if it is not there)."""
    found = []
    for plane in recovery.header.planes:
        at = kept.get(plane.index, 0)
        gaps = [(start, stop) for lost, start, stop in recovery.missing if lost.index == plane.index]
        for start, stop in [*sorted(gaps), (plane.tokens, plane.tokens)]:
            if start > at:
                found.append((plane, at, start))
            at = max(at, stop)
    return found


class _Choice:
    """Which layers and tokens of a damaged cache to keep."""

    def __init__(self, recovery: Recovery, maps: Iterable[TensorMap]) -> None:
        self._planes = [plane for plane in recovery.header.planes if plane.kind != "bytes"]
        self._maps = [tensor_map for tensor_map in maps if tensor_map.role]
        self._groups = [group for group in recovery.header.groups if group[0].kind != "bytes"]
        self._first_lost = {plane.index: start for plane, start, _ in reversed(recovery.missing)}
        self._edges: defaultdict[int, list[int]] = defaultdict(list)
        for entry in sorted(recovery.entries, key=lambda entry: entry.block.stop):
            self._edges[entry.block.planes[0].index].append(entry.block.stop)

    @property
    def layers(self) -> list[int]:
        """The numbers of all layers."""
        return sorted({plane.layer for plane in self._planes})

    def lacks(self, planes: Iterable[Plane]) -> bool:
        """Whether any tokens of any of these are missing."""
        return any(plane.index in self._first_lost for plane in planes)

    def best(self, whole_layers: bool) -> tuple[int | None, list[int] | None]:
        """Tokens and layers to keep, None for all of them."""
        if not self.lacks(self._planes):
            return None, None
        tokens, layers = self._tokens(), self._whole_layers()
        if layers and (whole_layers or not tokens):
            return None, layers
        if tokens:
            return tokens, None
        raise CorruptError("the first tokens of every layer are lost, nothing of use is left", code="kvz-lost")

    def _tokens(self) -> int:
        """The longest prefix that all layers have, which every frame and every block of tokens ends with or before."""
        tokens, last = min(self._first_lost[p.index] for p in self._planes if p.index in self._first_lost), -1
        while tokens != last:
            last = tokens
            for group in self._groups:
                if tokens < group[0].tokens:
                    edges = self._edges[group[0].index]
                    at = bisect_right(edges, tokens)
                    tokens = edges[at - 1] if at else 0
            for tensor_map in self._maps:
                if tokens < tensor_map.grid.tokens:
                    tokens -= tokens % tensor_map.grid.size("b")
        return tokens

    def _whole_layers(self) -> list[int]:
        """The longest run of layers that lack nothing and share no frames with others."""
        kept = {plane.layer for plane in self._planes}
        kept -= {plane.layer for plane in self._planes if plane.index in self._first_lost}
        while True:
            closed = kept - {
                plane.layer for group in self._groups if not {p.layer for p in group} <= kept for plane in group
            }
            run = _longest_run(sorted(closed))
            if run == sorted(kept):
                return run
            kept = set(run)


def _longest_run(numbers: list[int]) -> list[int]:
    """The longest part of sorted numbers without a gap; the first of equals."""
    starts = [0, *(at for at, (one, other) in enumerate(pairwise(numbers), 1) if other != one + 1), len(numbers)]
    return max((numbers[a:b] for a, b in pairwise(starts)), key=len)


def _smaller(header: Header, part: Restriction, cut: bool) -> Header:
    """The header of a part whose frames are those of the whole."""
    numbers = {origin.plane.index: number for number, origin in enumerate(part.origins)}
    planes = part.cache_map.planes
    # A hash of all tokens says nothing of the first ones.
    identity = {key: value for key, value in header.identity.items() if not (cut and key.startswith("token"))}
    return replace(
        header,
        planes=planes,
        plane_codec=[header.plane_codec[origin.plane.index] for origin in part.origins],
        specs=[header.specs[origin.plane.index] for origin in part.origins],
        map={**part.cache_map.to_json(), "sizes": [file.size for file in part.files]},
        files=[(file.path, file.header) for file in part.files],
        producer=f"kvzip {__version__}",
        identity=identity,
        groups=tuple(
            tuple(planes[numbers[plane.index]] for plane in group)
            for group in header.groups
            if all(plane.index in numbers for plane in group)
        ),
    )


def _copy(recovery: Recovery, part: Restriction, header: Header, sink: BinaryIO) -> None:
    """The frames of a part under its own header."""
    kept = {origin.plane.index: (number, origin.stop) for number, origin in enumerate(part.origins)}
    writer = Writer(sink, header)
    if recovery.reader.profile is not None:
        writer.write_profile(recovery.reader.profile.hash, recovery.reader.profile.read())
    for entry in recovery.entries:
        places = [kept.get(plane.index) for plane in entry.block.planes]
        if any(place is None or entry.block.start >= place[1] for place in places):
            continue
        planes = tuple(header.planes[place[0]] for place in places if place is not None)
        (frame,) = recovery.reader.read_frames([entry])
        writer.write_block(Block(planes, entry.block.start, entry.block.stop), entry.codec, frame.sections)
    statistics = _columns(recovery, [origin.plane.index for origin in part.origins])
    whole = all(origin.stop == origin.plane.tokens for origin in part.origins)
    if statistics and whole:
        writer.write_statistics(statistics)
    writer.close()


def _columns(recovery: Recovery, planes: list[int]) -> Mapping[str, Any]:
    """The statistics of some planes; what is no column of all planes is left out."""
    count = len(recovery.header.planes)
    columns = (recovery.statistics or {}).items()
    return {
        key: [column[index] for index in planes]
        for key, column in columns
        if isinstance(column, list) and len(column) == count
    }


def share(repair: Repair, ranges: Iterable[tuple[Plane, int, int]]) -> float:
    """How much of the cache as it was some token ranges are, from 0 to 1, by bytes of its tensors."""
    total = sum(plane.nbytes for plane in repair.header.planes) if repair.header else 0
    part = sum((stop - start) * plane.channels * plane.itemsize for plane, start, stop in ranges)
    return part / total if total else math.nan
