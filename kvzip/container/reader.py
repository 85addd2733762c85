"""Opens a file at random through its trailer and index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import xxhash

from kvzip.container import format as fmt
from kvzip.container.frames import (
    Bound,
    Embedded,
    Frame,
    check_data_size,
    frame_buffer,
    open_data,
    parse_data_head,
    parse_profile_head,
)
from kvzip.container.header import Header
from kvzip.container.index import Entry, Index, Totals
from kvzip.container.source import Source
from kvzip.errors import CorruptError

PIECE = 1 << 20


class Span(NamedTuple):
    """Where a member lies in its file."""

    offset: int
    length: int


class FrameReader:
    """Reads frames of the member that starts at byte ``base`` of ``source``. Safe to use from several threads."""

    def __init__(self, source: Source, base: int, header: Header, seed: int) -> None:
        self.source = source
        self.base = base
        self.header = header
        self.seed = seed
        self.profile: Embedded | None = None

    @property
    def name(self) -> str:
        """What messages call the file."""
        return self.source.name

    def take_profile(self, position: int, size: fmt.FrameSize) -> None:
        """Remember where the profile of the member lies; its checksum has been compared. Raises CorruptError."""
        if self.profile is not None:
            raise CorruptError(f"a second profile at byte {position}", code="kvz-frame")
        head = self.source.read(self.base + position + fmt.FRAME.size, size.head)

        def read() -> bytes:
            return read_whole(self.source, self.base, position, position + size.total, self.seed)[2]

        self.profile = Embedded(parse_profile_head(head), read)

    def read_frames(
        self, entries: Sequence[Entry], bound: Bound | None = None, buffer: np.ndarray | None = None
    ) -> list[Frame]:
        """Read a run of frames with one read, and check each.

        Args:
            entries: neighbours in file order; what lies between them is read too.
            bound: the most bytes that a codec makes of a block.
            buffer: uint8, 8-byte aligned, to be reused; a new one is made if it has less than the run's bytes + 128.

        Returns:
            One frame per entry, views into the buffer: sections start at multiples of 8, 128 zero bytes follow all.

        Raises CorruptError naming the first frame that is damaged or is not what the index says.
        """
        if not entries:
            return []
        first = entries[0].offset
        length = entries[-1].offset + entries[-1].length - first
        if any(one.offset + one.length > other.offset for one, other in pairwise(entries)):
            raise ValueError("entries must be in file order")
        if buffer is None or len(buffer) < length + fmt.PADDING:
            buffer = frame_buffer(length)
        buffer[length : length + fmt.PADDING] = 0
        with fmt.naming(self.source.name):
            self.source.read_into(self.base + first, buffer[:length])
            return [self._check(buffer, entry.offset - first, entry, bound) for entry in entries]

    def _check(self, buffer: np.ndarray, at: int, entry: Entry, bound: Bound | None) -> Frame:
        if at & 7:
            # Only in damaged files, where bytes are missing between two frames.
            buffer, skewed = frame_buffer(entry.length), buffer
            buffer[: entry.length] = skewed[at : at + entry.length]
            at = 0
        size = fmt.parse_frame(buffer, at, entry.offset)
        check_data_size(size, entry.offset)
        if size.kind != b"DATA" or size.total != entry.length:
            raise CorruptError(f"the frame at byte {entry.offset} is not the one in the index", code="kvz-index")
        frame = open_data(buffer, at, parse_data_head(buffer, at, size, self.header, bound), entry.offset, self.seed)
        if frame.entry != entry:
            raise CorruptError(f"the frame at byte {entry.offset} is not the one in the index", code="kvz-index")
        return frame

    def close(self) -> None:
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Reader(FrameReader):
    """One member of a ``.kvz`` file: ``header``, ``index``, ``statistics``, ``profile``, ``totals``, and its frames.

    ``members`` are the spans of all members of the file; :meth:`member` opens another one of them.
    """

    def __init__(self, source: Source, members: tuple[Span, ...], number: int = 0) -> None:
        self.members = members
        self.statistics: dict[str, Any] | None = None
        base, length = members[number]
        fmt.check_prologue(source.read(base, fmt.PROLOGUE.size))
        end = base + length
        index_at, index_length, _ = fmt.parse_tail(source.read(end - fmt.TAIL.size, fmt.TAIL.size), end)
        header, seed, begin = read_header(source, base, index_at)
        super().__init__(source, base, header, seed)
        self._statistics_length = self._profile_length = 0
        self.index = self._read_index(begin, index_at, index_length)
        self._walk_gaps(begin, index_at, index_at + index_length, length - fmt.TAIL.size)
        self.totals = Totals(
            header=begin - fmt.PROLOGUE.size,
            statistics=self._statistics_length,
            profile=self._profile_length,
            index=index_length + fmt.TAIL.size,
            sections=dict(self.index.sections),
        )
        self.totals.framing = length - self.totals.total
        if self.totals.framing < 0:
            raise CorruptError("the index counts more bytes of sections than the file has", code="kvz-index")

    @classmethod
    def open(cls, source: str | os.PathLike[str] | BinaryIO, member: int = 0) -> Reader:
        """Open a path or seekable stream. Raises CorruptError, UnsupportedError, OSError; UsageError for a pipe."""
        opened = Source(source)
        try:
            with fmt.naming(opened.name):
                return cls(opened, find_members(opened), member)
        except BaseException:
            opened.close()
            raise

    def member(self, number: int) -> Reader:
        """Another member of the same open file."""
        with fmt.naming(self.source.name):
            return Reader(self.source, self.members, number)

    def _read_index(self, begin: int, offset: int, length: int) -> Index:
        kind, head, body = read_whole(self.source, self.base, offset, offset + length, self.seed)
        if kind.kind != b"INDX" or kind.total != length:
            raise CorruptError("the trailer does not point at an index", code="kvz-trailer")
        return Index.from_bytes(self.header, head, body, begin, offset)

    def _walk_gaps(self, begin: int, index: int, index_end: int, tail: int) -> None:
        """Visit the frames that the index does not list: statistics, and those of newer writers."""
        array = self.index.array
        starts = np.append(array["offset"].astype(np.int64), [index, tail])
        ends = np.concatenate([[begin], array["offset"].astype(np.int64) + array["length"], [index_end]])
        for gap in np.flatnonzero(starts != ends):
            position = int(ends[gap])
            while position < starts[gap]:
                position += self._visit(position, int(starts[gap]))

    def _visit(self, position: int, end: int) -> int:
        size = read_size(self.source, self.base, position, end)
        if size.kind == b"stat":
            if self.statistics is not None:
                raise CorruptError(f"a second statistics frame at byte {position}", code="kvz-frame")
            _, head, _ = read_whole(self.source, self.base, position, end, self.seed)
            self.statistics = fmt.parse_json(head, "the statistics frame")
            self._statistics_length = size.total
        elif size.kind == b"prof":
            if (self.index.array["offset"] < position).any():
                raise CorruptError(f"a profile at byte {position}, behind the first block", code="kvz-frame")
            frame_checksum(self.source, self.base, position, size.total, self.seed)
            self.take_profile(position, size)
            self._profile_length = size.total
        elif size.kind in fmt.CRITICAL:
            raise CorruptError(f"the index omits the {size.kind.decode()} frame at byte {position}", code="kvz-index")
        elif not size.ancillary:
            raise fmt.unknown_frame(size.kind, position)
        else:
            # Else a damaged type would hide the frame that it was.
            frame_checksum(self.source, self.base, position, size.total, self.seed)
        return size.total


def find_members(source: Source, wanted: int | None = None) -> tuple[Span, ...]:
    """The members of a file, found from its end: a member's trailer says where it starts.

    If that fails, the members up to number ``wanted`` are found from the file's start, if they are there: what is
    broken behind a member does not matter to who wants that one. Raises CorruptError; UsageError for a file of another
    kind.
    """
    spans: list[Span] = []
    end = source.size
    try:
        while end:
            size = min(fmt.TAIL.size, end)
            _, _, length = fmt.parse_tail(source.read(end - size, size), end)
            end -= length
            spans.append(Span(end, length))
    except CorruptError:
        start = source.read(0, min(fmt.PROLOGUE.size, source.size))
        fmt.check_kind(start)
        fmt.check_prologue(start)
        if wanted is not None:
            with suppress(CorruptError):
                return _first_members(source, wanted + 1)
        raise
    if not spans:
        fmt.check_prologue(b"")
    return tuple(reversed(spans))


def _first_members(source: Source, count: int) -> tuple[Span, ...]:
    """The first ``count`` members, found by the sizes of their frames."""
    spans: list[Span] = []
    base = 0
    while len(spans) < count:
        fmt.check_prologue(source.read(base, min(fmt.PROLOGUE.size, source.size - base)))
        length, kind = fmt.PROLOGUE.size, b""
        while kind != b"TAIL":
            size = read_size(source, base, length, source.size - base)
            length, kind = length + size.total, size.kind
        spans.append(Span(base, length))
        base += length
    return tuple(spans)


def read_size(source: Source, base: int, position: int, end: int) -> fmt.FrameSize:
    """The header of the frame at ``position`` of a member, which must end by ``end``."""
    if end - position < fmt.FRAME.size:
        raise CorruptError(f"{end - position} stray bytes at byte {position}", code="kvz-frame")
    size = fmt.parse_frame(source.read(base + position, fmt.FRAME.size), 0, position)
    if size.total > end - position:
        raise CorruptError(
            f"the {size.kind.decode()} frame at byte {position} claims {size.total} bytes, {end - position} are left",
            code="kvz-frame",
        )
    fmt.check_size(size, position)
    return size


def read_whole(source: Source, base: int, position: int, end: int, seed: int) -> tuple[fmt.FrameSize, bytes, bytes]:
    """A frame that is no DATA, its checksum compared: size, head, body."""
    size = read_size(source, base, position, end)
    data = memoryview(source.read(base + position, size.total))
    return size, *fmt.split_frame(data, size, position, seed)


def frame_checksum(source: Source, base: int, position: int, total: int, seed: int) -> int:
    """The checksum of a frame of ``total`` bytes, compared in pieces. Raises CorruptError."""
    digest = xxhash.xxh3_64(seed=seed)
    end = base + position + total - fmt.CHECKSUM.size
    for at in range(base + position, end, PIECE):
        digest.update(source.read(at, min(PIECE, end - at)))
    (stored,) = fmt.CHECKSUM.unpack(source.read(end, fmt.CHECKSUM.size))
    if digest.intdigest() != stored:
        raise fmt.checksum_error("the frame", position)
    return int(stored)


def read_header(source: Source, base: int, end: int) -> tuple[Header, int, int]:
    """The HEAD frame of a member: header, the seed of the other frames' checksums, and where the frame ends."""
    position = fmt.PROLOGUE.size
    size, head, body = read_whole(source, base, position, end, 0)
    if size.kind != b"HEAD":
        raise CorruptError(f"the first frame is {size.kind.decode()!r}, expected 'HEAD'", code="kvz-frame")
    data = source.read(base + position + size.total - fmt.CHECKSUM.size, fmt.CHECKSUM.size)
    return Header.from_bytes(head, body), fmt.CHECKSUM.unpack(data)[0], position + size.total
