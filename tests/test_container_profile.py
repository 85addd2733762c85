"""A member may carry a profile: read by both readers and kept by repair; a broken, second or late one is corrupt."""

from __future__ import annotations

import io
import struct

import pytest

from kvzip.container import Reader, StreamReader, Writer, recover
from kvzip.container import format as fmt
from kvzip.errors import CorruptError, KvzipError, UsageError
from tests import containers

HASH = "0123456789abcdef" * 4
PROFILE = bytes(range(256)) * 5


def write(profile: bytes | None = PROFILE) -> bytes:
    sink = io.BytesIO()
    header = containers.header()
    writer = Writer(sink, header)
    if profile is not None:
        writer.write_profile(HASH, profile)
    for (group, start, stop), sections in containers.content(header).items():
        block = header.block(group, start, stop - start)
        writer.write_block(block, header.plane_codec[block.planes[0].index], sections)
    assert writer.close().total == len(sink.getvalue())
    return sink.getvalue()


def frame(head: bytes, body: bytes = PROFILE) -> bytes:
    padded = head + bytes(-len(head) % 8) + body + bytes(-len(body) % 8)
    return struct.pack("<4sIQ", b"prof", len(head), len(body)) + padded


def read_all(data: bytes) -> list[KvzipError | None]:
    """What both readers say."""
    found: list[KvzipError | None] = []
    for read in (lambda: Reader.open(io.BytesIO(data)), lambda: list(StreamReader(io.BytesIO(data)).frames())):
        try:
            read()
            found.append(None)
        except KvzipError as error:
            found.append(error)
    return found


@pytest.mark.parametrize("profile", [PROFILE, b"x", b""])
def test_it_comes_back(profile: bytes) -> None:
    """Its hash at once, its bytes on request, both counted; files without one have none."""
    data = write(profile)
    reader = Reader.open(io.BytesIO(data))
    stream = StreamReader(io.BytesIO(data))
    blocks = list(stream.frames())
    for found in (reader, stream, recover(io.BytesIO(data))[0].reader):
        assert found.profile is not None
        assert (found.profile.hash, found.profile.read()) == (HASH, profile)
    assert reader.totals == stream.totals
    assert reader.totals.profile >= len(profile) + len(HASH)
    assert containers.collect(blocks) == containers.read_random(write(None))[1]
    assert Reader.open(io.BytesIO(write(None))).profile is None


def test_a_reader_that_does_not_know_it_skips_it() -> None:
    """The type is ancillary: only the codec that needs a profile misses it."""
    assert fmt.FrameSize(b"prof", 0, 0).ancillary


def test_every_bit_counts() -> None:
    """A changed byte of the profile is found when the file is opened, by both readers."""
    data = write()
    ((_, start, length),) = [one for one in containers.frames(data) if one[0] == b"prof"]
    for at in range(start + 4, start + length, 37):
        bad = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        assert all(isinstance(error, CorruptError) for error in read_all(bad))


def test_a_second_or_late_one_is_corrupt() -> None:
    data = write()
    spans = containers.frames(data)
    for at in (spans[1][1], spans[3][1], spans[-2][1]):  # beside the first, behind blocks, before the index
        bad = containers.insert(data, frame(b'{"hash":"00"}'), at)
        assert all(isinstance(error, CorruptError) for error in read_all(bad))
    plain = write(None)
    spans = containers.frames(plain)
    assert read_all(containers.insert(plain, frame(b'{"hash":"00"}'), spans[1][1])) == [None, None]
    late = containers.insert(plain, frame(b'{"hash":"00"}'), spans[2][1])
    assert all(isinstance(error, CorruptError) for error in read_all(late))


@pytest.mark.parametrize("head", [b"", b"{}", b"[]", b'{"hash":3}', b"hello", b" " * 5000])
def test_a_head_that_tells_no_hash_is_corrupt(head: bytes) -> None:
    plain = write(None)
    bad = containers.insert(plain, frame(head), containers.frames(plain)[1][1])
    assert all(isinstance(error, CorruptError) for error in read_all(bad))


def test_absurd_sizes_are_refused_before_anything_is_allocated() -> None:
    plain = write(None)
    at = containers.frames(plain)[1][1]
    bad = plain[:at] + struct.pack("<4sIQ", b"prof", 16, 1 << 40) + plain[at:]
    with pytest.raises(CorruptError, match="claims"):
        list(StreamReader(io.BytesIO(bad)).frames())


def test_writers_keep_the_order() -> None:
    """Once, before all blocks, and not beyond the limit."""
    header = containers.header()
    writer = Writer(io.BytesIO(), header)
    writer.write_profile(HASH, b"")
    with pytest.raises(ValueError, match="once"):
        writer.write_profile(HASH, b"")

    class Long(bytes):
        def __len__(self) -> int:
            return fmt.MAX_PROFILE + 1

    with pytest.raises(UsageError, match="cannot be embedded"):
        Writer(io.BytesIO(), header).write_profile(HASH, Long())
