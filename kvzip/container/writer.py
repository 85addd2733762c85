"""Writes a member front to back without ever seeking, so that it may go to a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import xxhash

from kvzip.cache import Block
from kvzip.container import format as fmt
from kvzip.container.frames import TABLE_AT, pack_data_head, pack_profile_head
from kvzip.container.header import Header
from kvzip.container.index import Index, Totals
from kvzip.errors import CorruptError, UsageError

MAX_SECTION_BYTES = fmt.MAX_DATA_FRAME - TABLE_AT - 16 * fmt.MAX_SECTIONS - fmt.CHECKSUM.size
"""So that a DATA frame stays under 4 GiB whatever its section table and padding."""


class Writer:
    """Writes header, blocks in any order, statistics and index to ``sink``, which stays open.

    Raises UsageError when ``header`` does not fit the format, and whatever ``sink.write`` raises.
    """

    def __init__(self, sink: BinaryIO, header: Header) -> None:
        self._sink = sink
        self._header = header
        self._seed = 0
        self._position = 0
        self._rows: list[tuple[int, ...]] = []
        self._totals = Totals()
        try:
            head, body = header.to_bytes()
            Header.from_bytes(head, body)
        except (CorruptError, ValueError) as error:
            raise UsageError(f"the cache does not fit the format: {error}", code="kvz-header") from None
        if len(head) > fmt.MAX_JSON or len(head) + len(body) > fmt.MAX_HEADER:
            raise UsageError(
                f"a header of {len(head) + len(body)} bytes is beyond the format's limit", code="kvz-limit"
            )
        self._put(fmt.pack_prologue())
        self._totals.header, self._seed = self._frame(b"HEAD", head, body)

    def write_profile(self, digest: str, data: bytes) -> None:
        """Write the file of a trained profile, so that the cache can be read without it: once, before all blocks."""
        if self._rows or self._totals.profile:
            raise ValueError("a profile comes once, before all blocks")
        if len(data) > fmt.MAX_PROFILE:
            raise UsageError(
                f"a profile of {len(data)} bytes cannot be embedded, at most {fmt.MAX_PROFILE} can", code="kvz-limit"
            )
        self._totals.profile, _ = self._frame(b"prof", pack_profile_head(digest), data)

    def write_block(self, block: Block, codec: int, sections: Mapping[str, Any]) -> int:
        """Write one frame and return its length in bytes.

        ``sections`` are contiguous byte buffers (uint8 arrays) by four-letter tag; they are not copied.
        """
        group = self._header.group_of[block.planes[0].index]
        if self._header.groups[group] != block.planes:
            raise ValueError(f"{block.planes[0]}: the block's planes are not a group of the header")
        self._header.block(group, block.start, block.tokens)
        views = [memoryview(section) for section in sections.values()]
        lengths = [view.nbytes for view in views]
        if codec >= len(self._header.codecs) or len(views) > fmt.MAX_SECTIONS or sum(lengths) > MAX_SECTION_BYTES:
            raise ValueError(f"{block.planes[0]}: codec {codec} or its {len(views)} sections are beyond the format")
        totals = self._totals.sections
        for tag, length in zip(sections, lengths, strict=True):
            totals[tag] = totals.get(tag, 0) + length
        offset = self._position
        head = pack_data_head(group, codec, block, [fmt.encode_tag(tag) for tag in sections], lengths)
        length, checksum = self._pieces(head, views)
        self._rows.append((offset, checksum, block.start, length, block.tokens, group, codec, 0))
        return length

    def write_statistics(self, statistics: Mapping[str, Any]) -> None:
        """Write what a lossy codec did: JSON values, floats cut to 6 digits, NaN and infinities as null."""
        self._totals.statistics, _ = self._frame(b"stat", fmt.canonical_json(fmt.rounded(statistics)), b"")

    def close(self) -> Totals:
        """Write index and trailer, flush, return the bytes by component. Raises ValueError if a block is missing."""
        index = Index(self._header, np.array(self._rows, fmt.ENTRY), self._totals.sections)
        try:
            index.check_cover()
        except CorruptError as error:
            raise ValueError(f"the blocks written do not make a whole cache: {error}") from None
        offset = self._position
        length, _ = self._frame(b"INDX", *index.to_bytes())
        self._put(fmt.pack_tail(offset, length, self._position + fmt.TAIL.size))
        self._sink.flush()
        self._totals.index = length + fmt.TAIL.size
        self._totals.framing = self._position - self._totals.total
        return self._totals

    def _frame(self, kind: bytes, head: bytes, body: bytes) -> tuple[int, int]:
        first = fmt.FRAME.pack(kind, len(head), len(body)) + head + fmt.zeros(len(head))
        return self._pieces(first, [memoryview(body)])

    def _pieces(self, first: bytes, pieces: Sequence[memoryview]) -> tuple[int, int]:
        """Write a frame whose body is ``pieces``, each padded; returns its length and checksum."""
        start = self._position
        digest = xxhash.xxh3_64(first, self._seed)
        self._put(first)
        for piece in pieces:
            length = piece.nbytes
            digest.update(piece)
            self._put(piece)
            if length & 7:
                digest.update(fmt.zeros(length))
                self._put(fmt.zeros(length))
        checksum = digest.intdigest()
        self._put(fmt.CHECKSUM.pack(checksum))
        return self._position - start, checksum

    def _put(self, data: bytes | memoryview) -> None:
        length = data.nbytes if isinstance(data, memoryview) else len(data)
        written = self._sink.write(data)
        if written is not None and written < length:
            # An unbuffered sink may take less than it is given.
            rest = memoryview(data).cast("B")[written:]
            while rest:
                rest = rest[self._sink.write(rest) :]
        self._position += length
