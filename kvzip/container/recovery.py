"""Finds the intact frames of a truncated or damaged file, without its index, member by member."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from kvzip.cache import Plane
from kvzip.container import format as fmt
from kvzip.container.frames import check_data_size, parse_data_head
from kvzip.container.header import Header
from kvzip.container.index import Entry
from kvzip.container.reader import PIECE, FrameReader, frame_checksum, read_header, read_size, read_whole
from kvzip.container.source import Source
from kvzip.errors import CorruptError, KvzipError, UnsupportedError

WINDOW = 4096
_FRAMES = (*fmt.CRITICAL, b"stat", b"prof")
_START = re.compile(b"|".join([*_FRAMES, re.escape(fmt.MAGIC[:4])]))


class Lost(NamedTuple):
    """A member of which nothing can be recovered, where it seems to start, and why."""

    start: int
    reason: KvzipError


@dataclass
class Recovery:
    """What is left of one member: its intact ``entries`` in file order, to be read with ``reader.read_frames``.

    ``damage`` tells a person what was found broken; ``missing`` are the token ranges that no intact frame holds.
    """

    reader: FrameReader
    entries: list[Entry] = field(default_factory=list)
    statistics: dict[str, Any] | None = None
    damage: list[str] = field(default_factory=list)
    missing: list[tuple[Plane, int, int]] = field(default_factory=list)

    @property
    def header(self) -> Header:
        return self.reader.header

    @property
    def complete(self) -> bool:
        """Whether every token of every plane can be read."""
        return not self.missing

    def prefix(self, plane: Plane) -> int:
        """How many of the plane's first tokens are intact: a KV prefix is of use on its own."""
        return min((start for lost, start, _ in self.missing if lost.index == plane.index), default=plane.tokens)

    def _settle(self) -> None:
        """Drop frames that repeat tokens, and list what is missing."""
        by_group: defaultdict[int, list[Entry]] = defaultdict(list)
        for entry in self.entries:
            by_group[entry.group].append(entry)
        kept: list[Entry] = []
        for number, planes in enumerate(self.header.groups):
            reached = 0
            for entry in sorted(by_group[number], key=lambda entry: (entry.block.start, entry.offset)):
                if entry.block.start < reached:
                    self.damage.append(f"the frame at byte {entry.offset} repeats tokens of {planes[0]}")
                    continue
                if entry.block.start > reached:
                    self.missing += [(plane, reached, entry.block.start) for plane in planes]
                reached = entry.block.stop
                kept.append(entry)
            if reached < planes[0].tokens:
                self.missing += [(plane, reached, planes[0].tokens) for plane in planes]
        self.entries = sorted(kept, key=lambda entry: entry.offset)


def recover(source: str | os.PathLike[str] | BinaryIO) -> list[Recovery | Lost]:
    """Scan a path or seekable stream for intact frames; one result per member, in the order of the file.

    Every frame's checksum is compared. After damage the scan goes on at the next thing that starts like a frame. A
    member whose header is broken, or needs a newer kvzip, is lost; it is noticed by what else is there of it. Raises
    CorruptError or UnsupportedError when all are, UsageError for a file of another kind. Close the file with
    ``reader.close()`` of any other.
    """
    opened = Source(source)
    try:
        with fmt.naming(opened.name):
            return _Scan(opened).run()
    except BaseException:
        opened.close()
        raise


class _Scan:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.found: list[Recovery | Lost] = []
        self.member: Recovery | Lost | None = None
        """Whose frames are to be expected: the last of ``found`` until its trailer has come."""
        # A file made of false starts, each of which claims the rest of the file, must not cost more than a few passes.
        self.budget = 4 * source.size + PIECE

    def run(self) -> list[Recovery | Lost]:
        position, size = 0, self.source.size
        while position < size and self.budget > 0:
            try:
                position += self._step(position)
            except (CorruptError, UnsupportedError):
                self.budget -= WINDOW
                after = self._resynchronise(position + 1)
                end = " up to the file's end" if after == size else ""
                self._damaged(f"bytes {position}:{after} are damaged{end}")
                position = after
        if position < size:
            self._damaged(f"too many false starts of frames: the search ended at byte {position}")
        elif self.member is not None:
            self._damaged("the file ends before its trailer")
        recovered = [found for found in self.found if isinstance(found, Recovery)]
        if not recovered:
            raise self._nothing()
        for recovery in recovered:
            recovery._settle()
        return self.found

    def _nothing(self) -> KvzipError:
        """Why no member can be recovered. Raises UsageError for a file of another kind."""
        fmt.check_kind(self.source.read(0, min(fmt.PROLOGUE.size, self.source.size)))
        reasons = [found.reason for found in self.found if isinstance(found, Lost)]
        lost = CorruptError("no intact header was found: nothing can be recovered", code="kvz-lost")
        return next((reason for reason in reasons if isinstance(reason, UnsupportedError)), lost)

    def _damaged(self, what: str) -> None:
        """Tell it of the member at hand, or of the one before."""
        if self.found and isinstance(self.found[-1], Recovery):
            self.found[-1].damage.append(what)

    def _begin(self, member: Recovery | Lost, start: int) -> None:
        """A member begins at byte ``start``; what was found of its first bytes alone is known better now."""
        if isinstance(self.member, Lost) and self.member.start == start:
            self.found.pop()
        elif self.member is not None:
            self._damaged(f"its end is missing: another cache starts at byte {start}")
        self.member = member
        self.found.append(member)

    def _step(self, position: int) -> int:
        """Take the frame or prologue at ``position`` and return its length. Raises CorruptError if there is none."""
        data = self.source.read(position, min(fmt.PROLOGUE.size, self.source.size - position))
        if data[:8] == fmt.MAGIC:
            self._prologue(position, data)
            return fmt.PROLOGUE.size
        size = read_size(self.source, 0, position, self.source.size)
        if size.kind == b"HEAD":
            return self._head(position)
        if not isinstance(self.member, Recovery):
            return self._orphan(position, size)
        place = position - self.member.reader.base
        seed = 0 if size.kind == b"TAIL" else self.member.reader.seed
        entry = self._entry(self.member, place, size) if size.kind == b"DATA" else None
        self.budget -= size.total
        checksum = frame_checksum(self.source, 0, position, size.total, seed)
        if entry is not None:
            self.member.entries.append(entry._replace(checksum=checksum))
        elif size.kind == b"stat":
            head = read_whole(self.source, 0, position, self.source.size, seed)[1]
            self.member.statistics = fmt.parse_json(head, "the statistics frame")
        elif size.kind == b"prof" and self.member.reader.profile is None:
            self.member.reader.take_profile(place, size)
        elif size.kind == b"TAIL":
            self.member = None
        elif not size.ancillary and size.kind != b"INDX":
            self.member.damage.append(str(fmt.unknown_frame(size.kind, place)))
        return size.total

    def _prologue(self, position: int, data: bytes) -> None:
        lost: KvzipError = CorruptError("its header is lost", code="kvz-lost")
        try:
            fmt.check_prologue(data)
        except UnsupportedError as error:
            lost = error
        self._begin(Lost(position, lost), position)

    def _head(self, position: int) -> int:
        base = position - fmt.PROLOGUE.size
        try:
            header, seed, end = read_header(self.source, base, self.source.size - base)
        except UnsupportedError as error:
            self._begin(Lost(base, error), base)
            raise
        damage = []
        try:
            start = max(base, 0)  # the file may have lost its first bytes
            fmt.check_prologue(self.source.read(start, position - start))
        except CorruptError as error:
            damage.append(str(error))
        self._begin(Recovery(FrameReader(self.source, base, header, seed), damage=damage), base)
        return base + end - position

    def _orphan(self, position: int, size: fmt.FrameSize) -> int:
        """Pass over a frame whose header is not known. Its checksum cannot be compared: what follows it must be known.

        A trailer's can, and tells where its member starts.
        """
        after = position + size.total
        start = position
        if size.kind == b"TAIL":
            start = after - fmt.parse_tail(self.source.read(position, size.total), after)[2]
        elif size.kind not in _FRAMES or not self._starts(after):
            raise CorruptError("a frame of no member", code="kvz-frame")
        if self.member is None:
            self.member = Lost(start, CorruptError("its header is lost", code="kvz-lost"))
            self.found.append(self.member)
        if size.kind == b"TAIL":
            self.member = None
        return size.total

    def _starts(self, position: int) -> bool:
        """Whether the file ends at ``position``, or something known starts there."""
        start = self.source.read(position, min(8, self.source.size - position))
        return not start or start == fmt.MAGIC or start[:4] in _FRAMES

    def _entry(self, member: Recovery, place: int, size: fmt.FrameSize) -> Entry:
        check_data_size(size, place)
        data = self.source.read(member.reader.base + place, fmt.FRAME.size + size.head)
        head = parse_data_head(data, 0, size, member.header, None)
        return Entry(head.block, head.codec, place, head.total, 0, head.group)

    def _resynchronise(self, position: int) -> int:
        """The next place where a frame or prologue may start, or the file's end. Bytes may be missing: no alignment."""
        window = WINDOW
        while position < self.source.size:
            piece = self.source.read(position, min(window, self.source.size - position))
            if found := _START.search(piece):
                return position + found.start()
            position += max(len(piece) - 3, 1)
            window = min(2 * window, PIECE)
        return self.source.size
