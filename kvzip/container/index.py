"""The INDX frame: where every block is, and how many bytes each kind of section takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.container import format as fmt
from kvzip.container.header import Header
from kvzip.errors import CorruptError


class Entry(NamedTuple):
    """One DATA frame: its block, codec number, offset from the member's start, length and checksum."""

    block: Block
    codec: int
    offset: int
    length: int
    checksum: int
    group: int


@dataclass
class Totals:
    """Bytes of a member by component. ``sections`` by tag, without padding; ``index`` includes the trailer."""

    header: int = 0
    statistics: int = 0
    profile: int = 0
    index: int = 0
    framing: int = 0
    sections: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        parts = self.header + self.statistics + self.profile + self.index + self.framing
        return parts + sum(self.sections.values())


class Index:
    """The DATA frames of a member in file order: a sequence of :class:`Entry`, and numpy columns in ``array``."""

    def __init__(self, header: Header, array: np.ndarray, sections: dict[str, int]) -> None:
        self.header = header
        self.array = array
        self.sections = sections

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, number: int) -> Entry:
        offset, checksum, start, length, count, group, codec, _ = self.array[number].item()
        return Entry(Block(self.header.groups[group], start, start + count), codec, offset, length, checksum, group)

    def __iter__(self) -> Iterator[Entry]:
        return map(self.__getitem__, range(len(self.array)))

    def covering(self, planes: Iterable[Plane | int], start: int = 0, stop: int | None = None) -> list[Entry]:
        """The frames that hold any of tokens ``start:stop`` of any of ``planes``, in file order."""
        indices = (plane if isinstance(plane, int) else plane.index for plane in planes)
        wanted = np.zeros(len(self.header.groups), bool)
        wanted[[self.header.group_of[index] for index in indices]] = True
        chosen = wanted[self.array["group"]] & (self._stops > start)
        if stop is not None:
            chosen &= self.array["start"] < stop
        return [self[int(number)] for number in np.flatnonzero(chosen)]

    @cached_property
    def _stops(self) -> np.ndarray:
        stops: np.ndarray = self.array["start"] + self.array["count"]
        return stops

    def to_bytes(self) -> tuple[bytes, bytes]:
        """The frame's head and body."""
        totals = np.zeros(len(self.sections), fmt.SECTION_TOTAL)
        totals["tag"] = [tag.encode() for tag in self.sections]
        totals["bytes"] = list(self.sections.values())
        head = fmt.INDEX_HEAD.pack(len(self.array), len(totals), 0)
        return head, self.array.tobytes() + totals.tobytes()

    @classmethod
    def from_bytes(cls, header: Header, head: bytes, body: bytes, begin: int, end: int) -> Index:
        """Parse and check against the geometry; frames must lie between ``begin`` and ``end`` of the member."""
        if len(head) != fmt.INDEX_HEAD.size:
            raise _bad(f"its head has {len(head)} bytes, expected {fmt.INDEX_HEAD.size}")
        frames, tags, reserved = fmt.INDEX_HEAD.unpack(head)
        size = frames * fmt.ENTRY.itemsize
        if size + tags * fmt.SECTION_TOTAL.itemsize != len(body) or reserved:
            raise _bad(f"{frames} frames and {tags} section tags do not fit its {len(body)} bytes")
        array = np.frombuffer(body, fmt.ENTRY, frames)
        rows = np.frombuffer(body, fmt.SECTION_TOTAL, tags, size)
        sections = {fmt.section_tag(tag): count for tag, _, count in rows.tolist()}
        if len(sections) != tags or rows["reserved"].any():
            raise _bad("a section tag repeats, or a reserved field is not 0")
        index = cls(header, array, sections)
        index._check_places(begin, end)
        index.check_cover()
        return index

    def _check_places(self, begin: int, end: int) -> None:
        offset, length = self.array["offset"], self.array["length"].astype(np.uint64)
        if self.array["reserved"].any() or (offset > end).any() or (offset + length > end).any():
            raise _bad("a frame lies outside the file")
        least = np.append(np.uint64(begin), offset + length)[:-1]
        if (offset < least).any() or ((offset | length) & np.uint64(7)).any():
            raise _bad("frames overlap, are out of order or not aligned to 8 bytes")
        if (self.array["codec"] >= len(self.header.codecs)).any():
            raise _bad("a frame names a codec that the header lacks")

    def check_cover(self) -> None:
        """Every token of every plane must be in exactly one frame. Raises CorruptError naming the first that is not."""
        array, groups = self.array, self.header.groups
        if (array["group"] >= len(groups)).any() or (array["start"] > fmt.MAX_CACHE_BYTES).any():
            raise _bad("a frame names planes or tokens that the header lacks")
        tokens = np.array([group[0].tokens for group in groups], np.int64)
        array = array[np.lexsort((array["start"], array["group"]))]
        group, start = array["group"].astype(np.int64), array["start"].astype(np.int64)
        stop = start + array["count"]
        first = np.diff(group, prepend=-1) != 0
        expected = np.where(first, 0, np.roll(stop, 1))
        wrong = np.flatnonzero((start != expected) | (stop > tokens[group]) | (stop == start))
        if len(wrong):
            at = wrong[0]
            plane = groups[group[at]][0]
            raise _bad(f"{plane}: a frame holds tokens {start[at]}:{stop[at]} where {expected[at]} should follow")
        reached = np.zeros(len(groups), np.int64)
        np.maximum.at(reached, group, stop)
        short = np.flatnonzero(reached != tokens)
        if len(short):
            plane = groups[short[0]][0]
            raise _bad(f"{plane}: only {reached[short[0]]} of {plane.tokens} tokens are in the file")


def _bad(message: str) -> CorruptError:
    return CorruptError(f"the index is invalid: {message}", code="kvz-index")
