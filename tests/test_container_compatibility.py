"""Other versions and other programs: ``docs/format.md`` is enough to write a file, and its rules of reading hold."""

from __future__ import annotations

import io
import json
import struct

import pytest
import xxhash

from kvzip.cache import Plane
from kvzip.container import Header, Reader, StreamReader
from kvzip.errors import CorruptError, UnsupportedError
from tests.containers import content, frames, header, insert, read_random, read_stream, reseal, sample, write

READERS = pytest.mark.parametrize("read", [read_random, read_stream])


def _frame(kind: bytes, head: bytes, body: bytes, seed: int) -> bytes:
    text = struct.pack("<4sIQ", kind, len(head), len(body))
    text += head + bytes(-len(head) % 8) + body + bytes(-len(body) % 8)
    return text + struct.pack("<Q", xxhash.xxh3_64_intdigest(text, seed))


def _by_the_book() -> bytes:
    """A file of one plane in two blocks, put together from the specification alone."""
    prologue = b"\x8bKVZ\r\n\x1a\n" + struct.pack("<HH", 0, 0)
    prologue += struct.pack("<Q", xxhash.xxh3_64_intdigest(prologue))[:4]
    spec = {"codec": 0, "dtype": "float16", "head_dim": 2, "heads": 1, "kind": "latent", "spec": {}, "tokens": 6}
    value = {
        "block_tokens": 4,
        "codecs": [{"config": {}, "name": "raw"}],
        "files": [["", 3]],
        "map": {},
        "planes": {"class": [0], "classes": [spec], "layer": [7]},
        "producer": "by hand",
    }
    text = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    head = _frame(b"HEAD", text, b"abc", 0)
    seed = struct.unpack("<Q", head[-8:])[0]
    parts, rows, at = [prologue, head], b"", 16 + len(head)
    for start, count, payload in ((0, 4, b"0123456789"), (4, 2, b"ab")):
        data_head = struct.pack("<IHHQII4sI", 0, 0, 1, start, count, 0, b"RAWB", len(payload))
        frame = _frame(b"DATA", data_head, payload + bytes(-len(payload) % 8), seed)
        rows += struct.pack("<Q8sQIIIHH", at, frame[-8:], start, len(frame), count, 0, 0, 0)
        parts.append(frame)
        at += len(frame)
    totals = struct.pack("<4sIQ", b"RAWB", 0, 12)
    index = _frame(b"INDX", struct.pack("<QII", 2, 1, 0), rows + totals, seed)
    member = at + len(index) + 48
    return b"".join([*parts, index, _frame(b"TAIL", struct.pack("<QQQ", at, len(index), member), b"", 0)])


@READERS
def test_a_file_written_from_the_specification_is_read(read) -> None:
    of, found, statistics = read(_by_the_book())
    assert of.planes == (Plane(0, 7, "latent", 6, 1, 2, "float16"),)
    assert of.files == [("", b"abc")]
    assert found == {(0, 0, 4): {"RAWB": b"0123456789"}, (0, 4, 6): {"RAWB": b"ab"}}
    assert statistics is None


def test_the_writer_writes_the_file_of_the_specification() -> None:
    of = Header(
        planes=(Plane(0, 7, "latent", 6, 1, 2, "float16"),),
        codecs=[{"name": "raw", "config": {}}],
        plane_codec=[0],
        specs=[{}],
        block_tokens=4,
        files=[("", b"abc")],
        producer="by hand",
    )
    assert write(of, {(0, 0, 4): {"RAWB": b"0123456789"}, (0, 4, 6): {"RAWB": b"ab"}}) == _by_the_book()


@READERS
@pytest.mark.parametrize("place", range(1, 11))
def test_unknown_ancillary_frames_are_skipped_anywhere(read, place: int) -> None:
    data = sample()
    note = struct.pack("<4sIQ", b"newR", 3, 1 << 4) + b"abc\0\0\0\0\0" + bytes(16)
    assert read(insert(data, note, frames(data)[place][1])) == read(data)


@READERS
@pytest.mark.parametrize("place", range(1, 11))
def test_unknown_critical_frames_are_refused_anywhere(read, place: int) -> None:
    """What they hold may change what everything else means."""
    data = sample()
    with pytest.raises(UnsupportedError, match="NEWr"):
        read(insert(data, struct.pack("<4sIQ", b"NEWr", 0, 0), frames(data)[place][1]))


def _prologue(data: bytes, version: int, flags: int) -> bytes:
    return reseal(data[:8] + struct.pack("<HH", version, flags) + data[12:], frames(data))


@READERS
def test_ignorable_flags_are_ignored(read) -> None:
    data = sample()
    for bit in range(8, 16):
        assert read(_prologue(data, 0, 1 << bit)) == read(data)


@READERS
def test_reserved_flags_and_other_versions_are_unsupported(read) -> None:
    data = sample()
    for flags in (1 << bit for bit in range(8)):
        with pytest.raises(UnsupportedError) as error:
            read(_prologue(data, 0, flags))
        assert error.value.code == "kvz-reserved"
    for version in (1, 2, 65535):
        with pytest.raises(UnsupportedError) as error:
            read(_prologue(data, version, 0))
        assert error.value.code == "kvz-version"


@READERS
def test_what_a_newer_writer_adds_to_the_header_is_kept(read) -> None:
    of = header(extra={"colour": ["green"]})
    got, _, _ = read(write(of, content(of)))
    assert got.extra == {"colour": ["green"]}
    assert got.to_bytes() == of.to_bytes()


@pytest.mark.parametrize(("field", "value"), [("kind", "gate"), ("dtype", "float5"), ("dtype", "O"), ("dtype", "V8")])
def test_unknown_kinds_and_dtypes_are_unsupported_and_not_corrupt(field: str, value: str) -> None:
    head, body = header().to_bytes()
    forged = json.loads(head)
    forged["planes"]["classes"][0][field] = value
    with pytest.raises(UnsupportedError):
        Header.from_bytes(json.dumps(forged).encode(), body)


def test_unknown_codecs_do_not_hide_header_and_index() -> None:
    """``inspect`` works on files whose codec is not installed; the container knows no codec."""
    of = header(codecs=[{"name": "from-2031", "config": {"x": [1]}}, {"name": "raw", "config": {}}])
    reader = Reader.open(io.BytesIO(write(of, content(of))))
    assert reader.header.codecs[0]["name"] == "from-2031"
    assert len(reader.index) == len(content(of))


def test_header_of_a_stream_is_there_before_the_data() -> None:
    """``inspect`` of a pipe's beginning."""
    data = sample()
    cut = frames(data)[1][1]
    stream = StreamReader(io.BytesIO(data[:cut]))
    assert stream.header == header()
    with pytest.raises(CorruptError):
        next(stream.frames())
