"""What is intact in a broken file is found: the longest token prefix of every plane, and what lies behind damage."""

from __future__ import annotations

import io
import struct

import pytest

from kvzip.cache import Plane
from kvzip.container import Header, Lost, Recovery, recover
from kvzip.errors import CorruptError, UnsupportedError
from tests.containers import collect, content, frames, header, key, read_random, reseal, sample, write


def _content(found: Recovery) -> dict:
    return collect([frame for entry in found.entries for frame in found.reader.read_frames([entry])])


def _data_frames(data: bytes) -> list[tuple[tuple[int, int, int], int, int]]:
    """Block, offset and end of every DATA frame."""
    found = []
    for kind, start, length in frames(data):
        if kind == b"DATA":
            group, _, _, first, count = struct.unpack_from("<IHHQI", data, start + 16)
            found.append(((group, first, first + count), start, start + length))
    return found


def test_an_intact_file_is_recovered_whole() -> None:
    data = sample()
    (found,) = recover(io.BytesIO(data))
    assert (found.complete, found.damage, found.missing) == (True, [], [])
    of, parts, statistics = read_random(data)
    assert (found.header, _content(found), found.statistics) == (of, parts, statistics)


def test_every_truncation_gives_the_longest_prefix() -> None:
    """All frames that lie before the cut, and for each plane the tokens before the first that is lost."""
    data = sample()
    head_end = sum(frames(data)[0][1:])
    blocks = _data_frames(data)
    for length in range(len(data)):
        if length < head_end:
            with pytest.raises(CorruptError) as error:
                recover(io.BytesIO(data[:length]))
            assert error.value.code == "kvz-lost"
            continue
        (found,) = recover(io.BytesIO(data[:length]))
        whole = [block for block, _, end in blocks if end <= length]
        assert [key(entry) for entry in found.entries] == whole
        assert found.damage
        for number, group in enumerate(found.header.groups):
            stops = [stop for owner, _, stop in whole if owner == number]
            assert all(found.prefix(plane) == max(stops, default=0) for plane in group)


@pytest.mark.parametrize("lost", range(1, 17))
def test_a_file_that_lost_its_first_bytes_is_recovered(lost: int) -> None:
    """The header still begins with its type; the prologue before it may be cut anywhere, or be gone."""
    (found,) = recover(io.BytesIO(sample()[lost:]))
    assert found.complete
    assert found.damage
    assert _content(found) == content(header())


def test_every_damaged_byte_costs_one_frame_at_most() -> None:
    data = sample()
    intact = content(header())
    head_start, head_length = frames(data)[0][1:]
    blocks = _data_frames(data)
    for at in range(0, len(data), 3):
        damaged = io.BytesIO(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        if head_start <= at < head_start + head_length:
            with pytest.raises(CorruptError):
                recover(damaged)
            continue
        (found,) = recover(damaged)
        lost = {block for block, start, end in blocks if start <= at < end}
        assert _content(found) == {block: part for block, part in intact.items() if block not in lost}
        assert found.damage
        assert {(plane.index, start, stop) for plane, start, stop in found.missing} == {
            (plane.index, start, stop) for group, start, stop in lost for plane in found.header.groups[group]
        }


def test_a_hole_of_zeros_is_skipped() -> None:
    data = sample()
    blocks = _data_frames(data)
    (_, start, _), (_, _, end) = blocks[1], blocks[3]
    (found,) = recover(io.BytesIO(data[:start] + bytes(end - start) + data[end:]))
    assert [key(entry) for entry in found.entries] == [block for block, _, _ in blocks[:1] + blocks[4:]]
    assert f"bytes {start}:{end} are damaged" in found.damage
    assert found.prefix(found.header.planes[0]) == blocks[0][0][2]


@pytest.mark.parametrize("lost", [1, 3, 8, 41])
def test_missing_bytes_shift_what_follows_and_cost_one_frame(lost: int) -> None:
    """What lies behind is no longer aligned in the file, and still is in memory."""
    data = sample()
    blocks = _data_frames(data)
    _, start, _ = blocks[2]
    (found,) = recover(io.BytesIO(data[: start + 20] + data[start + 20 + lost :]))
    assert [key(entry) for entry in found.entries] == [block for block, _, _ in blocks[:2] + blocks[3:]]
    got = found.reader.read_frames(found.entries)
    assert all(part.ctypes.data % 8 == 0 for frame in got for part in frame.sections.values())
    assert collect(got) == _content(found) == {key(entry): content(header())[key(entry)] for entry in found.entries}


def test_members_are_recovered_one_by_one() -> None:
    """A member whose header is lost takes none of its neighbour's place, though geometry and blocks are the same."""
    data = sample()
    broken = bytearray(data)
    broken[40] ^= 1
    first, lost, last = recover(io.BytesIO(data + bytes(broken) + data[:-100]))
    assert first.complete and not first.damage
    assert isinstance(lost, Lost) and lost.start == len(data)
    assert len(first.entries) == len(last.entries) == len(content(header()))
    assert _content(last) == content(header())
    first, last = recover(io.BytesIO(data[:-1001] + data))
    assert not first.complete
    assert last.complete
    assert _content(last) == content(header())


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kept", ["all but the header", "all but the beginning", "prologue", "trailer", "newer"])
def test_a_member_that_cannot_be_recovered_is_counted(place: int, kept: str) -> None:
    """By whatever tells that it was there; its neighbours, however many frames it has, stay what they are."""
    data = sample()
    end = sum(frames(data)[0][1:])
    broken = bytes([*data[:40], data[40] ^ 1, *data[41:]])
    lost = {
        "all but the header": broken,
        "all but the beginning": data[end:],
        "prologue": data[:16] + bytes(40),
        "trailer": bytes(len(data) - 48) + data[-48:],
        "newer": reseal(data[:8] + b"\1" + data[9:], frames(data)),
    }[kept]
    members = [data, data]
    members.insert(place, lost)
    found = recover(io.BytesIO(b"".join(members)))
    assert [isinstance(each, Lost) for each in found] == [number == place for number in range(3)]
    assert all(each.complete and _content(each) == content(header()) for each in found if isinstance(each, Recovery))
    reason = found[place].reason
    assert (reason.code, reason.exit_code) == (("kvz-version", 4) if kept == "newer" else ("kvz-lost", 3))


def test_repeated_blocks_are_taken_once() -> None:
    data = sample()
    _, start, end = _data_frames(data)[0]
    (found,) = recover(io.BytesIO(data[:end] + data[start:end] + data[end:]))
    assert _content(found) == content(header())
    assert any("repeats" in text for text in found.damage)


def test_newer_versions_are_not_guessed_at() -> None:
    data = sample()
    with pytest.raises(UnsupportedError):
        recover(io.BytesIO(reseal(data[:8] + b"\1" + data[9:], frames(data))))


class _Counting(io.BytesIO):
    taken = 0

    def readinto(self, view) -> int:
        count = super().readinto(view)
        self.taken += count
        return count


def test_frames_that_claim_to_overlap_cost_a_few_passes_only() -> None:
    """Each 48 bytes start a frame that claims to reach to the end: 20,000 of them would be 10 GB of hashing."""
    of = Header((Plane(0, 0, "bytes", 1 << 30, 1, 1, "uint8"),), [{"name": "raw", "config": {}}], [0], [{}])
    whole = write(Header(of.planes, of.codecs, [0], [{}]), {(0, 0, 1 << 30): {"RAWB": b""}})
    start = next(start for kind, start, _ in frames(whole) if kind == b"DATA")
    count, step = 20000, 48
    out = bytearray(whole[:start])
    for number in range(count):
        body = (count - number) * step - 56
        out += struct.pack("<4sIQIHHQII4sI", b"DATA", 32, max(0, body), 0, 0, 1, 0, 1, 0, b"RAWB", max(0, body))
    file = _Counting(bytes(out))
    (found,) = recover(file)
    assert found.entries == []
    assert any("false starts" in text for text in found.damage)
    assert file.taken < 20 * len(out)
