"""DATA frames: one encoded block, its section table, and the checks that every reader makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvzip.cache import Block
from kvzip.container import format as fmt
from kvzip.container.header import Header
from kvzip.container.index import Entry
from kvzip.errors import CorruptError

Bound = Callable[[int, Block], int]
"""``bound(codec number, block)``: the most bytes that the block's sections may have together (``Codec.bound``)."""

TABLE_AT = fmt.FRAME.size + fmt.DATA_HEAD.size
MAX_HEAD = fmt.DATA_HEAD.size + 8 * fmt.MAX_SECTIONS


class Frame(NamedTuple):
    """A checked frame: its entry, and its sections as uint8 views by tag, in stored order."""

    entry: Entry
    sections: Mapping[str, np.ndarray]


class Embedded(NamedTuple):
    """A profile that a member carries: its hash, as the file says, and what brings the bytes of its own file."""

    hash: str
    read: Callable[[], bytes]


class DataHead(NamedTuple):
    """The head of a DATA frame, checked against the header: everything that is known before the body is read."""

    block: Block
    codec: int
    group: int
    tags: Sequence[bytes]
    lengths: Sequence[int]
    total: int


def pack_data_head(group: int, codec: int, block: Block, tags: Sequence[bytes], lengths: Sequence[int]) -> bytes:
    """Frame header and head, up to where the first section starts."""
    count = len(tags)
    table = fmt.section_table(count)
    body = sum((length + 7) & ~7 for length in lengths)
    return (
        fmt.FRAME.pack(b"DATA", fmt.DATA_HEAD.size + table.size, body)
        + fmt.DATA_HEAD.pack(group, codec, count, block.start, block.tokens, 0)
        + table.pack(*(item for row in zip(tags, lengths, strict=True) for item in row))
    )


def pack_profile_head(digest: str) -> bytes:
    return fmt.canonical_json({"hash": digest})


def parse_profile_head(head: bytes) -> str:
    """The hash that the head of a ``prof`` frame tells. Raises CorruptError."""
    digest = fmt.parse_json(head, "the head of the profile").get("hash")
    if not isinstance(digest, str):
        raise CorruptError("the profile in the file does not tell its hash", code="kvz-frame")
    return digest


def check_data_size(size: fmt.FrameSize, position: int) -> None:
    """Refuses the lengths in a frame header that no DATA frame can have, before its head is read."""
    if not fmt.DATA_HEAD.size <= size.head <= MAX_HEAD or size.head & 7 or size.total > fmt.MAX_DATA_FRAME:
        raise CorruptError(
            f"the frame at byte {position} claims {size.head} + {size.body} bytes: not a DATA frame", code="kvz-frame"
        )


def parse_data_head(data: Any, at: int, size: fmt.FrameSize, header: Header, bound: Bound | None) -> DataHead:
    """The head of the frame at ``data[at:]``. Raises CorruptError when it does not fit the header or ``bound``."""
    group, codec, count, start, tokens, reserved = fmt.DATA_HEAD.unpack_from(data, at + fmt.FRAME.size)
    if size.head != fmt.DATA_HEAD.size + 8 * count or reserved or codec >= len(header.codecs):
        raise CorruptError(f"a frame of codec {codec} has {count} sections in a head of {size.head}", code="kvz-frame")
    block = header.block(group, start, tokens)
    table = fmt.section_table(count).unpack_from(data, at + TABLE_AT)
    tags, lengths = table[0::2], table[1::2]
    if len(set(tags)) != count or sum((length + 7) & ~7 for length in lengths) != size.body:
        raise CorruptError(f"{block.planes[0]}, tokens {start}:{block.stop}: sections do not fit", code="kvz-section")
    if bound is not None and sum(lengths) > (most := bound(codec, block)):
        raise CorruptError(
            f"{block.planes[0]}, tokens {start}:{block.stop}: {sum(lengths)} bytes, the codec's limit is {most}",
            code="kvz-bound",
        )
    return DataHead(block, codec, group, tags, lengths, size.total)


def open_data(buffer: np.ndarray, at: int, head: DataHead, offset: int, seed: int) -> Frame:
    """The whole frame that lies at ``buffer[at:]``, its checksum compared; ``offset`` is its place in the member."""
    end = at + head.total - fmt.CHECKSUM.size
    (stored,) = fmt.CHECKSUM.unpack_from(buffer.data, end)
    if xxhash.xxh3_64_intdigest(buffer[at:end].data, seed) != stored:
        block = head.block
        raise fmt.checksum_error(f"{block.planes[0]}, tokens {block.start}:{block.stop}: the frame", offset)
    sections: dict[str, np.ndarray] = {}
    place = at + TABLE_AT + 8 * len(head.tags)
    for tag, length in zip(head.tags, head.lengths, strict=True):
        sections[fmt.section_tag(tag)] = buffer[place : place + length]
        place += (length + 7) & ~7
    return Frame(Entry(head.block, head.codec, offset, head.total, stored, head.group), sections)


def frame_buffer(length: int) -> np.ndarray:
    """Room for ``length`` bytes at an 8-byte aligned address, with the zero bytes behind that decoders may read."""
    buffer = np.empty((length + fmt.PADDING + 7) // 8, np.uint64).view(np.uint8)
    buffer[length:] = 0
    return buffer
