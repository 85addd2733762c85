"""Finds the intact frames of a truncated or damaged file, without its index."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from kvzip.cache import Plane
from kvzip.container import format as fmt
from kvzip.container.frames import check_data_size, parse_data_head
from kvzip.container.header import Header
from kvzip.container.index import Entry
from kvzip.container.reader import PIECE, FrameReader, frame_checksum, read_header, read_size, read_whole
from kvzip.container.source import Source
from kvzip.errors import CorruptError
from kvzip.kinds import foreign

WINDOW = 4096
_START = re.compile(b"|".join([*fmt.CRITICAL, b"stat", b"prof", re.escape(fmt.MAGIC[:4])]))


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


def recover(source: str | os.PathLike[str] | BinaryIO) -> list[Recovery]:
    """Scan a path or seekable stream for intact frames; one result per member whose header is intact.

    Every frame's checksum is compared. After damage the scan goes on at the next thing that starts like a frame. Raises
    CorruptError when no header is intact, UnsupportedError for a newer version. Close the file with ``reader.close()``.
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
        self.found: list[Recovery] = []
        self.member: Recovery | None = None
        # A file made of false starts, each of which claims the rest of the file, must not cost more than a few passes.
        self.budget = 4 * source.size + PIECE

    def run(self) -> list[Recovery]:
        position, size = 0, self.source.size
        while position < size and self.budget > 0:
            try:
                position += self._step(position)
            except CorruptError:
                self.budget -= WINDOW
                after = self._resynchronise(position + 1)
                where = f"bytes {position}:{after} are damaged" + (" up to the file's end" if after == size else "")
                for recovery in [self.member] if self.member else self.found[-1:]:
                    recovery.damage.append(where)
                position = after
        if not self.found:
            if (what := foreign(self.source.read(0, min(16, size)))) and not what.startswith("is a .kvz"):
                raise CorruptError(f"the file {what}", code="kvz-magic")
            raise CorruptError("no intact header was found: nothing can be recovered", code="kvz-lost")
        if position < size:
            self.found[-1].damage.append(f"too many false starts of frames: the search ended at byte {position}")
        elif self.member is not None:
            self.member.damage.append("the file ends before its trailer")
        for recovery in self.found:
            recovery._settle()
        return self.found

    def _step(self, position: int) -> int:
        """Take the frame or prologue at ``position`` and return its length. Raises CorruptError if there is none."""
        data = self.source.read(position, min(fmt.PROLOGUE.size, self.source.size - position))
        if data[:8] == fmt.MAGIC:
            fmt.check_prologue(data)
            return fmt.PROLOGUE.size
        size = read_size(self.source, 0, position, self.source.size)
        if size.kind == b"HEAD":
            return self._head(position)
        if self.member is None:
            raise CorruptError("a frame of no member", code="kvz-frame")
        place = position - self.member.reader.base
        seed = 0 if size.kind == b"TAIL" else self.member.reader.seed
        entry = self._entry(place, size) if size.kind == b"DATA" else None
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

    def _head(self, position: int) -> int:
        base = position - fmt.PROLOGUE.size
        header, seed, end = read_header(self.source, base, self.source.size - base)
        if self.member is not None:
            self.member.damage.append(f"its end is missing: another cache starts at byte {base}")
        self.member = Recovery(FrameReader(self.source, base, header, seed))
        self.found.append(self.member)
        try:
            start = max(base, 0)  # the file may have lost its first bytes
            fmt.check_prologue(self.source.read(start, position - start))
        except CorruptError as error:
            self.member.damage.append(str(error))
        return base + end - position

    def _entry(self, place: int, size: fmt.FrameSize) -> Entry:
        assert self.member is not None
        check_data_size(size, place)
        data = self.source.read(self.member.reader.base + place, fmt.FRAME.size + size.head)
        head = parse_data_head(data, 0, size, self.member.header, None)
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
