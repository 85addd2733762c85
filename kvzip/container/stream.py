"""Reads a pipe front to back, with the same checks as the random reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

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
from kvzip.container.index import Index, Totals
from kvzip.errors import CorruptError

PIECE = 4 << 20
"""Bytes set aside before they have arrived: what a pipe claims is not believed."""


class StreamReader:
    """One member of a stream: ``header`` at once, ``profile`` with the first of :meth:`frames`, after the last
    ``statistics``, ``index``, ``totals``.
    """

    def __init__(self, stream: BinaryIO, name: str | None = None, prologue: bytes | None = None) -> None:
        self._stream = stream
        self.name = name or str(getattr(stream, "name", "the stream"))
        self._position = 0
        self._seed = 0
        self._rows: list[tuple[int, ...]] = []
        self.statistics: dict[str, Any] | None = None
        self.profile: Embedded | None = None
        self.index: Index | None = None
        self.totals = Totals()
        self.finished = False
        with fmt.naming(self.name):
            prologue = self._some(fmt.PROLOGUE.size) if prologue is None else prologue
            fmt.check_kind(prologue)
            fmt.check_prologue(prologue)
            self._position = fmt.PROLOGUE.size
            size, head, body = self._whole(*self._next())
            if size.kind != b"HEAD":
                raise CorruptError(f"the first frame is {size.kind.decode()!r}, expected 'HEAD'", code="kvz-frame")
            self.header = Header.from_bytes(head, body)
            self.totals.header = size.total
            self._seed = self._checksum

    def frames(self, bound: Bound | None = None) -> Iterator[Frame]:
        """The DATA frames in file order, checked, each in a buffer of its own; then index and trailer are checked."""
        while not self.finished:
            with fmt.naming(self.name):
                size, start = self._next()
                frame = None
                if size.kind == b"DATA":
                    frame = self._data(size, start, bound)
                else:
                    self._other(size, start)
            if frame is not None:
                yield frame

    def _next(self) -> tuple[fmt.FrameSize, bytes]:
        start = self._exactly(fmt.FRAME.size)
        return fmt.parse_frame(start, 0, self._position - fmt.FRAME.size), start

    def _data(self, size: fmt.FrameSize, start: bytes, bound: Bound | None) -> Frame:
        offset = self._position - fmt.FRAME.size
        if self.index is not None:
            raise CorruptError(f"a DATA frame at byte {offset}, behind the index", code="kvz-frame")
        check_data_size(size, offset)
        start += self._exactly(size.head)
        head = parse_data_head(start, 0, size, self.header, bound)
        frame = open_data(self._fill(start, size.total), 0, head, offset, self._seed)
        entry, block = frame.entry, head.block
        self._rows.append((offset, entry.checksum, block.start, head.total, block.tokens, head.group, head.codec, 0))
        for tag, section in frame.sections.items():
            self.totals.sections[tag] = self.totals.sections.get(tag, 0) + len(section)
        return frame

    def _other(self, size: fmt.FrameSize, start: bytes) -> None:
        offset = self._position - fmt.FRAME.size
        if size.kind == b"stat" and self.statistics is None:
            _, head, _ = self._whole(size, start)
            self.statistics = fmt.parse_json(head, "the statistics frame")
            self.totals.statistics = size.total
        elif size.kind == b"prof" and self.profile is None and not self._rows:
            _, head, body = self._whole(size, start)
            self.profile = Embedded(parse_profile_head(head), lambda: body)
            self.totals.profile = size.total
        elif size.kind == b"INDX" and self.index is None:
            self._check_index(offset, *self._whole(size, start))
        elif size.kind == b"TAIL" and self.index is not None:
            self._check_tail(start)
        elif size.kind in (*fmt.CRITICAL, b"stat", b"prof"):
            raise CorruptError(f"a {size.kind.decode()} frame at byte {offset}, where none may be", code="kvz-frame")
        elif not size.ancillary:
            raise fmt.unknown_frame(size.kind, offset)
        else:
            self._skip(size, start)

    def _check_index(self, offset: int, size: fmt.FrameSize, head: bytes, body: bytes) -> None:
        begin = fmt.PROLOGUE.size + self.totals.header
        index = Index.from_bytes(self.header, head, body, begin, offset)
        seen = np.array(self._rows, fmt.ENTRY)
        if not np.array_equal(index.array, seen) or index.sections != self.totals.sections:
            raise CorruptError("the index does not list the frames that came before it", code="kvz-index")
        self.index = index
        self._index_span = (offset, size.total)

    def _check_tail(self, start: bytes) -> None:
        tail = start + self._exactly(fmt.TAIL.size - fmt.FRAME.size)
        offset, length, member = fmt.parse_tail(tail, self._position)
        if (offset, length) != self._index_span or member != self._position:
            raise CorruptError("the trailer does not fit the frames before it", code="kvz-trailer")
        self.totals.index = length + fmt.TAIL.size
        self.totals.framing = member - self.totals.total
        self.finished = True

    def _whole(self, size: fmt.FrameSize, start: bytes) -> tuple[fmt.FrameSize, bytes, bytes]:
        position = self._position - fmt.FRAME.size
        fmt.check_size(size, position)
        data = self._fill(start, size.total).data[: size.total]
        (self._checksum,) = fmt.CHECKSUM.unpack(data[-fmt.CHECKSUM.size :])
        return size, *fmt.split_frame(data, size, position, self._seed)

    def _skip(self, size: fmt.FrameSize, start: bytes) -> None:
        """An unknown ancillary frame: hashed in pieces, kept nowhere."""
        position = self._position - fmt.FRAME.size
        digest = xxhash.xxh3_64(start, self._seed)
        left = size.total - fmt.FRAME.size - fmt.CHECKSUM.size
        while left:
            piece = self._exactly(min(left, 1 << 20))
            digest.update(piece)
            left -= len(piece)
        if self._exactly(fmt.CHECKSUM.size) != fmt.CHECKSUM.pack(digest.intdigest()):
            raise fmt.checksum_error(f"the {size.kind.decode()} frame", position)

    def _fill(self, start: bytes, total: int) -> np.ndarray:
        """A buffer with ``start`` and the rest of a frame of ``total`` bytes; it grows only as bytes arrive."""
        have, room = len(start), min(total, PIECE)
        buffer = frame_buffer(room)
        buffer[:have] = np.frombuffer(start, np.uint8)
        while True:
            self._read_into(buffer[have:room])
            if room == total:
                return buffer
            have, room = room, min(total, 2 * room)
            grown = frame_buffer(room)
            grown[:have] = buffer[:have]
            buffer = grown

    def _exactly(self, length: int) -> bytes:
        data = bytearray(length)
        self._read_into(data)
        return bytes(data)

    def _read_into(self, target: Any) -> None:
        view = memoryview(target)
        done = 0
        while done < len(view):
            count = self._stream.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise CorruptError(
                    f"the stream ends at byte {self._position + done}, before its trailer", code="kvz-truncated"
                )
            done += count
        self._position += done

    def _some(self, length: int) -> bytes:
        return read_some(self._stream, length)


def read_some(stream: BinaryIO, length: int) -> bytes:
    """Up to ``length`` bytes: fewer only at the stream's end."""
    data = b""
    while len(data) < length and (piece := stream.read(length - len(data))):
        data += piece
    return data


def read_members(stream: BinaryIO, name: str | None = None) -> Iterator[StreamReader]:
    """The members of a stream, one after the other; what a caller leaves unread of one is checked before the next."""
    prologue, before = read_some(stream, fmt.PROLOGUE.size), 0
    while True:
        reader = StreamReader(stream, name, prologue)
        yield reader
        for _ in reader.frames():
            pass
        before += reader.totals.total
        prologue = read_some(stream, fmt.PROLOGUE.size)
        if not prologue:
            return
        if prologue[: len(fmt.MAGIC)] != fmt.MAGIC[: len(prologue)]:
            raise CorruptError(
                f"{reader.name}: what follows the trailer at byte {before} is no .kvz: bytes were added",
                code="kvz-truncated",
            )
