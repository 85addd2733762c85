"""No byte can be changed, cut or forged so that a reader crashes, hangs, over-allocates or gives wrong data."""

from __future__ import annotations

import io
import json
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvzip.container import Header, Reader, StreamReader
from kvzip.errors import CorruptError, KvzipError, UnsupportedError
from tests.containers import content, frames, header, insert, read_random, read_stream, reseal, sample, write

READERS = pytest.mark.parametrize("read", [read_random, read_stream])
DAMAGE = (CorruptError, UnsupportedError)
MEGABYTE = 1 << 20


@contextmanager
def memory_under(limit: int) -> Iterator[Callable[[], None]]:
    """Yields a check that the peak of traced memory since the last check stayed under ``limit`` bytes."""

    def check() -> None:
        peak = tracemalloc.get_traced_memory()[1] - base
        tracemalloc.reset_peak()
        assert peak < limit

    tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0]
    try:
        yield check
    finally:
        tracemalloc.stop()


@READERS
def test_every_changed_byte_is_noticed(read) -> None:
    data = sample()
    for at in range(len(data)):
        for mask in {1 << at % 8, 0x20}:
            damaged = data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
            with pytest.raises(DAMAGE):
                read(damaged)


@READERS
def test_every_truncation_is_noticed(read) -> None:
    data = sample()
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            read(data[:length])


@READERS
def test_foreign_bytes_behind_the_end_are_noticed(read) -> None:
    """The stream reader gives the member, then refuses what follows."""
    data = sample() + b"\0" * 16
    with pytest.raises(CorruptError):
        if read is read_random:
            read(data)
        else:
            stream = io.BytesIO(data)
            list(StreamReader(stream).frames())
            StreamReader(stream)


@READERS
@pytest.mark.parametrize("text", [b"", b"\x8b", b"hello, world", b"\x8bKVZ\n\x1a\n" + bytes(40), bytes(4096)])
def test_other_files_are_refused(read, text: bytes) -> None:
    with pytest.raises(CorruptError) as error:
        read(text)
    assert error.value.code in ("kvz-magic", "kvz-truncated")


HOSTILE = [0, 1, 7, 1 << 16, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1]


def _fields() -> Iterator[tuple[int, int]]:
    """Offset and width of every binary field of the sample, the text of HEAD and stat and the sections left out."""
    data = sample()
    for kind, start, length in frames(data):
        yield from [(start + 4, 4), (start + 8, 8)]
        if kind == b"DATA":
            yield from [(start + 16 + at, width) for at, width in ((0, 4), (4, 2), (6, 2), (8, 8), (16, 4), (20, 4))]
            yield from [(start + 40 + at, 4) for at in (0, 4, 8, 12)]
        if kind in (b"INDX", b"TAIL"):
            yield from [(start + at, width) for width in (8, 4) for at in range(16, length - 8, width)]


@READERS
def test_forged_numbers_under_right_checksums_are_refused(read) -> None:
    """An attacker repairs the checksums: lengths, offsets, counts and numbers must be checked for themselves."""
    data = sample()
    spans = frames(data)
    intact = read(data)
    with memory_under(6 * MEGABYTE) as check:
        for at, width in _fields():
            for value in HOSTILE:
                forged = bytearray(data)
                forged[at : at + width] = value.to_bytes(8, "little")[:width]
                try:
                    found = read(reseal(bytes(forged), spans))
                except DAMAGE:
                    pass
                else:
                    # A codec number or a total may be forged into another valid one; the data stays what it is.
                    assert found[0] == intact[0]
                    assert found[1].keys() == intact[1].keys()
                check()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*path, name)
        yield from _places(inner, (*path, name))


_HEAD, _BODY = header().to_bytes()


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(list(_places(json.loads(_HEAD)))), _JSON)
def test_any_value_in_the_header_is_accepted_or_refused_by_name(path: tuple[Any, ...], value: Any) -> None:
    forged = json.loads(_HEAD)
    place = forged
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    try:
        of = Header.from_bytes(json.dumps(forged).encode(), _BODY)
    except DAMAGE:
        return
    assert Header.from_bytes(*of.to_bytes()) == of


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'{"a":1,"a":2}',
        b'{"a":"\\ud800"}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}",
        b'{"' + b"\\" * 100001,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_malformed_json_is_corrupt(text: bytes) -> None:
    with pytest.raises(CorruptError):
        Header.from_bytes(text, b"")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"tokens":20', '"tokens":4611686018427387905'),
        ('"heads":2', '"heads":-1'),
        ('"heads":2', '"heads":true'),
        ('"tokens":20', '"tokens":9223372036854775807,"x":0'),
        ('"class":[0,', '"class":[9,'),
        ('"layer":[0,', '"layer":['),
        ('"codec":1', '"codec":2'),
        ('"groups":[0,4,1,[2,3]]', '"groups":[0,4,1,[2,2]]'),
        ('"groups":[0,4,1,[2,3]]', '"groups":[[0,4],1,[2,3]]'),
        ('"groups":[0,4,1,[2,3]]', '"groups":[0,4,1,[],[2,3]]'),
        ('"block_tokens":8', '"block_tokens":0'),
        ('"kv.safetensors",13', '"kv.safetensors",14'),
        ('"kv.safetensors",13', '"../kv.safetensors",13'),
        ('"kv.safetensors",13', '"/kv",13'),
        ('["kv.safetensors",13]', '["kv.safetensors",13],["kv.safetensors",0]'),
    ],
)
def test_contradictory_headers_are_corrupt(old: str, new: str) -> None:
    assert old in _HEAD.decode()
    with pytest.raises(CorruptError):
        Header.from_bytes(_HEAD.decode().replace(old, new).encode(), _BODY)


def test_codec_bound_is_asked_before_the_body_is_read() -> None:
    """A frame of 3 GiB in a pipe for a block of 128 bytes: refused from its head."""
    of = header()
    data = write(of, content(of))
    start = next(start for kind, start, _ in frames(data) if kind == b"DATA")
    big = 3 << 30
    head = struct.pack("<4sIQIHHQII4sI", b"DATA", 32, big, 0, 1, 1, 0, 8, 0, b"STRM", big)
    with memory_under(2 * MEGABYTE) as check:
        with pytest.raises(CorruptError) as error:
            list(StreamReader(io.BytesIO(data[:start] + head)).frames(lambda codec, block: 2 * block.nbytes))
        check()
    assert error.value.code == "kvz-bound"


def test_a_pipe_is_not_believed_about_lengths() -> None:
    """Without a bound, and for the header, memory grows with what arrives and not with what is claimed."""
    data = sample()
    start = next(start for kind, start, _ in frames(data) if kind == b"DATA")
    big = 3 << 30
    claims = [
        data[:start] + struct.pack("<4sIQIHHQII4sI", b"DATA", 32, big, 0, 1, 1, 0, 8, 0, b"STRM", big),
        data[:start] + struct.pack("<4sIQ", b"INDX", 16, big),
        data[:start] + struct.pack("<4sIQ", b"note", 16, 1 << 62),
        data[:start] + struct.pack("<4sIQ", b"stat", 1 << 24, 0),
        data[:16] + struct.pack("<4sIQ", b"HEAD", 100, 127 << 20),
    ]
    with memory_under(6 * MEGABYTE) as check:
        for claim in claims:
            with pytest.raises(CorruptError):
                list(StreamReader(io.BytesIO(claim)).frames())
            check()


def test_bound_is_asked_for_random_reads_too() -> None:
    of = header()
    reader = Reader.open(io.BytesIO(write(of, content(of))))
    with pytest.raises(CorruptError) as error:
        reader.read_frames(list(reader.index), lambda codec, block: 20)
    assert error.value.code == "kvz-bound"


def test_a_frame_of_another_file_is_not_taken_for_one_of_this() -> None:
    """Same geometry, same place, right checksums there: still refused, since checksums are seeded by the header."""
    of, other = header(), header(producer="kvzip tesT")
    data, foreign = write(of, content(of)), write(other, content(other))
    assert len(data) == len(foreign)
    _, start, length = frames(data)[2]
    spliced = data[:start] + foreign[start : start + length] + data[start + length :]
    for read in read_random, read_stream:
        with pytest.raises(CorruptError) as error:
            read(spliced)
        assert error.value.code == "kvz-checksum"


@READERS
@pytest.mark.parametrize("kind", [b"HEAD", b"DATA", b"INDX", b"stat"])
def test_repeated_frames_are_refused(read, kind: bytes) -> None:
    data = sample()
    start, length = next((start, length) for name, start, length in frames(data) if name == kind)
    with pytest.raises(CorruptError):
        read(insert(data, data[start : start + length - 8], frames(data)[4][1]))


def test_a_file_that_shrinks_while_open_is_noticed(tmp_path) -> None:
    path = tmp_path / "a.kvz"
    path.write_bytes(sample())
    with Reader.open(path) as reader:
        path.write_bytes(sample()[:400])
        with pytest.raises(CorruptError, match=r"a\.kvz"):
            reader.read_frames(list(reader.index))


@READERS
def test_random_damage_never_escapes_the_named_errors(read) -> None:
    """Blocks moved, repeated, zeroed or cut out, as disks and transfers do it."""
    data = sample()
    intact = read(data)
    chance = random.Random(7)
    for _ in range(600):
        a, b, c = sorted(chance.randrange(0, len(data) + 1) for _ in range(3))
        damaged = chance.choice(
            [
                data[:a] + data[b:],
                data[:a] + data[b:c] + data[a:],
                data[:a] + bytes(b - a) + data[b:],
                data[:a] + chance.randbytes(b - a) + data[b:],
                data[:a] + data[b:c] + data[a:b] + data[c:],
            ]
        )
        try:
            assert read(damaged) == intact
        except KvzipError as error:
            assert isinstance(error, DAMAGE)
