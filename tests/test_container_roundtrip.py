"""What is written comes back: through the index, from a pipe, in part, from several threads, every time."""

from __future__ import annotations

import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvzip.cache import Block, Plane, blocks_of
from kvzip.container import Header, Reader, StreamReader, Writer, read_members
from kvzip.errors import CorruptError, UsageError
from tests.containers import collect, content, frames, header, key, read_random, read_stream, write

_DTYPES = st.sampled_from(["bfloat16", "float16", "float32", "uint8", "float8_e4m3fn"])


@st.composite
def headers(draw: st.DrawFn) -> Header:
    planes = []
    for index in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["key", "value", "latent", "bytes"]))
        tokens, dtype = draw(st.integers(0, 40)), draw(_DTYPES)
        heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 5))
        planes.append(Plane(index, draw(st.integers(0, 3)), kind, tokens, heads, dim, dtype, draw(st.integers(0, 1))))
    by_tokens: dict[int, list[Plane]] = {}
    for plane in planes:
        by_tokens.setdefault(plane.tokens, []).append(plane)
    grouped = tuple(tuple(group) for group in by_tokens.values()) if draw(st.booleans()) else ()
    json = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=5) | st.none(), max_size=3)
    return Header(
        planes=tuple(planes),
        codecs=[{"name": "a", "config": draw(json)}],
        plane_codec=[0] * len(planes),
        specs=[draw(json) for _ in planes],
        block_tokens=draw(st.integers(1, 50)),
        map=draw(json),
        files=[
            (f"{number}.bin", text) for number, text in enumerate(draw(st.lists(st.binary(max_size=9), max_size=3)))
        ],
        producer=draw(st.text(max_size=5)),
        groups=grouped,
        extra={"later": draw(json)},
    )


@settings(max_examples=60, deadline=None)
@given(headers(), st.randoms(use_true_random=False))
def test_any_cache_comes_back_by_every_way_of_reading(of: Header, random) -> None:
    parts = list(content(of).items())
    random.shuffle(parts)
    data = write(of, dict(parts))
    assert len(data) % 8 == 0
    for read in read_random, read_stream:
        got, found, _ = read(data)
        assert got == of
        assert found == dict(parts)


def test_same_input_gives_same_bytes_whatever_the_order_of_keys() -> None:
    one = header(map={"a": 1, "b": 2})
    other = header(map={"b": 2, "a": 1})
    assert write(one, content(one)) == write(other, content(other))


class _Pipe(io.BytesIO):
    """Takes 7 bytes at a time, as an unbuffered pipe may, and cannot seek."""

    def write(self, data) -> int:
        return super().write(memoryview(data).cast("B")[:7])

    def seekable(self) -> bool:
        return False

    def seek(self, *_: object) -> int:
        raise io.UnsupportedOperation("seek")

    tell = seek  # type: ignore[assignment]


def test_writer_never_seeks_and_survives_short_writes() -> None:
    of = header()
    assert write(of, content(of), _Pipe()) == write(of, content(of))


def test_reader_survives_short_reads_of_a_pipe() -> None:
    of = header()
    data = write(of, content(of))
    read_end, write_end = os.pipe()

    def feed() -> None:
        with os.fdopen(write_end, "wb", buffering=0) as pipe:
            for at in range(0, len(data), 13):
                pipe.write(data[at : at + 13])

    thread = threading.Thread(target=feed)
    thread.start()
    with os.fdopen(read_end, "rb", buffering=0) as pipe:
        reader = StreamReader(pipe)
        assert collect(list(reader.frames())) == content(of)
    thread.join()


def test_a_pipe_is_not_opened_at_random() -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe, pytest.raises(UsageError):
        Reader.open(pipe)


def test_a_frame_costs_48_bytes_and_8_a_section() -> None:
    """The container must not eat what the codec wins."""
    of = header()
    writer = Writer(io.BytesIO(), of)
    assert writer.write_block(Block(of.groups[0], 0, 8), 1, {}) == 48
    assert writer.write_block(Block(of.groups[0], 8, 16), 1, {"AAAA": b"1", "BBBB": b"12345678"}) == 48 + 16 + 8 + 8


def test_a_header_costs_little_and_keeps_the_source_header_once() -> None:
    planes = tuple(Plane(i, i // 2, ("key", "value")[i % 2], 1024, 3, 64, "bfloat16") for i in range(60))
    text = os.urandom(5400)
    of = Header(planes, [{"name": "a", "config": {}}], [0] * 60, [{"bins": 32}] * 60, files=[("kv.safetensors", text)])
    head, body = of.to_bytes()
    assert body == text
    assert len(head) < 800


def test_sections_lie_aligned_with_readable_zeros_behind() -> None:
    """Kernels read sections in place, and may read 128 bytes past the last."""
    of = header()
    data = write(of, content(of))
    reader = Reader.open(io.BytesIO(data))
    dirty = np.full(len(data) + 128, 255, np.uint8)
    for buffer in None, dirty, dirty[:8]:
        found = reader.read_frames(list(reader.index)[3:7], buffer=buffer)
        assert collect(found).items() <= content(of).items()
        last = found[-1].entry
        base = found[0].sections["STRM"].base.view(np.uint8)
        end = last.offset + last.length - found[0].entry.offset
        assert not base[end : end + 128].any()
        assert len(base) >= end + 128
        for frame in found:
            assert all(part.ctypes.data % 8 == 0 for part in frame.sections.values())


@pytest.mark.parametrize("as_path", [True, False])
def test_threads_read_different_frames_at_once(tmp_path, as_path: bool) -> None:
    of = header()
    path = tmp_path / "a.kvz"
    path.write_bytes(write(of, content(of)))
    with Reader.open(path if as_path else io.BytesIO(path.read_bytes())) as reader, ThreadPoolExecutor(4) as pool:
        entries = list(reader.index) * 20
        found = list(pool.map(lambda entry: (entry, collect(reader.read_frames([entry]))), entries))
    for entry, part in found:
        assert part == {key(entry): content(of)[key(entry)]}


def test_covering_names_the_frames_of_a_part() -> None:
    of = header()
    index = Reader.open(io.BytesIO(write(of, content(of)))).index
    assert [key(entry) for entry in index.covering([of.planes[0], 3], 7, 9)] == [
        (0, 0, 8),
        (0, 8, 16),
        (3, 0, 8),
        (3, 8, 16),
    ]
    assert [key(entry) for entry in index.covering([4])] == [(1, 0, 5)]
    assert index.covering([0], 8, 8) == []


def test_totals_count_every_byte_once() -> None:
    """``inspect`` shows bytes per component from header and index alone."""
    of = header()
    data = write(of, content(of), statistics={"max_abs": [float("nan"), 1 / 3]})
    reader = Reader.open(io.BytesIO(data))
    sizes = {kind: length for kind, _, length in frames(data)}
    assert reader.totals.header == sizes[b"HEAD"]
    assert reader.totals.statistics == sizes[b"stat"]
    assert reader.totals.index == sizes[b"INDX"] + 48
    assert reader.totals.sections["STRM"] == sum(len(part["STRM"]) for part in content(of).values())
    assert reader.totals.total == len(data)
    assert reader.statistics == {"max_abs": ["inf", 0.333333]}
    stream = StreamReader(io.BytesIO(data))
    list(stream.frames())
    assert stream.totals == reader.totals


def test_concatenated_files_are_read_member_by_member() -> None:
    of, other = header(), header(producer="someone else")
    parts, others = content(of), content(other, seed=1)
    data = write(of, parts) + write(other, others)
    first = Reader.open(io.BytesIO(data))
    second = first.member(1)
    assert len(first.members) == 2
    for reader, head, part in (first, of, parts), (second, other, others):
        assert reader.header == head
        assert collect(reader.read_frames(list(reader.index))) == part
    streamed = [(reader.header, collect(list(reader.frames()))) for reader in read_members(io.BytesIO(data))]
    assert streamed == [(of, parts), (other, others)]


def test_members_that_are_not_read_are_still_checked() -> None:
    of = header()
    data = bytearray(write(of, content(of)) * 2)
    data[1000] ^= 1
    with pytest.raises(CorruptError):
        list(read_members(io.BytesIO(data)))


def test_only_a_whole_cache_can_be_closed() -> None:
    of = header()
    for lost in content(of):
        parts = {where: part for where, part in content(of).items() if where != lost}
        with pytest.raises(ValueError, match="whole cache"):
            write(of, parts)


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a//b", "a/./b", "C:x", "a\\b", "a\nb", "\ud800"])
def test_paths_that_leave_the_folder_are_not_written(path: str) -> None:
    with pytest.raises(UsageError):
        Writer(io.BytesIO(), header(files=[(path, b"")]))


def test_blocks_follow_the_declared_block_length() -> None:
    of = header()
    blocks = list(blocks_of(of.groups[0], 16))
    with pytest.raises(CorruptError):
        Writer(io.BytesIO(), of).write_block(blocks[0], 1, {})
