"""Constants and small parsers of the ``.kvz`` format: prologue, frame headers, limits, JSON. See ``docs/format.md``."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvzip.errors import CorruptError, KvzipError, UnsupportedError, UsageError
from kvzip.kinds import foreign

MAGIC = b"\x8bKVZ\r\n\x1a\n"
VERSION = 0
"""Files say 0 while the format grows; 1 will be frozen."""

PROLOGUE = struct.Struct("<8sHHI")
FRAME = struct.Struct("<4sIQ")
CHECKSUM = struct.Struct("<Q")
DATA_HEAD = struct.Struct("<IHHQII")
INDEX_HEAD = struct.Struct("<QII")
TAIL = struct.Struct("<4sIQQQQQ")

ENTRY = np.dtype(
    [
        ("offset", "<u8"),
        ("checksum", "<u8"),
        ("start", "<u8"),
        ("length", "<u4"),
        ("count", "<u4"),
        ("group", "<u4"),
        ("codec", "<u2"),
        ("reserved", "<u2"),
    ]
)
SECTION_TOTAL = np.dtype([("tag", "S4"), ("reserved", "<u4"), ("bytes", "<u8")])

MAX_JSON = 16 << 20
MAX_HEADER = 128 << 20
MAX_DEPTH = 64
MAX_PLANES = 1 << 20
MAX_CODECS = 1 << 16
MAX_SECTIONS = 256
MAX_DATA_FRAME = (1 << 32) - 8
MAX_INDEX = 1 << 32
MAX_PROFILE = 1 << 30
MAX_BLOCK_BYTES = (1 << 32) - 1
MAX_CACHE_BYTES = 1 << 62
SIZE_LIMITS = {
    b"HEAD": (MAX_JSON, MAX_HEADER),
    b"stat": (MAX_JSON, 0),
    b"prof": (4096, MAX_PROFILE),
    b"INDX": (INDEX_HEAD.size, MAX_INDEX),
    b"TAIL": (24, 0),
}
"""The longest head and body of the frames that are read whole."""
CRITICAL = (b"HEAD", b"DATA", b"INDX", b"TAIL")
PADDING = 128
"""Readable zero bytes behind the last section of every buffer that a decoder gets."""

DTYPES = frozenset(
    {
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "bfloat16"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }
)

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_ZEROS = [bytes(n) for n in range(8)]


class FrameSize(NamedTuple):
    """Lengths of a frame's unpadded head and body, in bytes."""

    kind: bytes
    head: int
    body: int

    @property
    def total(self) -> int:
        """Bytes of the whole frame: header, padded head and body, checksum."""
        return FRAME.size + padded(self.head) + padded(self.body) + CHECKSUM.size

    @property
    def ancillary(self) -> bool:
        return self.kind[0] >= 0x61


def padded(length: int) -> int:
    """The next multiple of 8."""
    return (length + 7) & ~7


def zeros(length: int) -> bytes:
    """The zero bytes that pad ``length`` bytes to a multiple of 8."""
    return _ZEROS[-length & 7]


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Puts the file's name in front of the message of every error of ours that leaves the block."""
    try:
        yield
    except KvzipError as error:
        if not str(error).startswith(name):
            error.args = (f"{name}: {error}",)
        raise


def pack_prologue(flags: int = 0) -> bytes:
    first = PROLOGUE.pack(MAGIC, VERSION, flags, 0)[:12]
    return first + (xxhash.xxh3_64_intdigest(first) & 0xFFFFFFFF).to_bytes(4, "little")


def check_kind(start: bytes) -> None:
    """Raises UsageError for the first bytes of a file of another kind that is known."""
    if what := foreign(start, "kvz"):
        raise UsageError(f"the file {what}", code="not-kvz")


def check_prologue(data: bytes) -> None:
    """Accept the first 16 bytes of a member. Raises CorruptError; UnsupportedError for version or reserved flags."""
    if not data:
        raise CorruptError("the file is empty; a .kvz file was expected", code="kvz-magic")
    if data[:8] != MAGIC[: len(data)]:
        if data[1:4] == MAGIC[1:4]:
            raise CorruptError(
                "the magic bytes are damaged the way a text-mode transfer does it; copy the file again in binary mode",
                code="kvz-magic",
            )
        raise CorruptError(f"not a .kvz file: it starts with {data[:8]!r}, expected {MAGIC!r}", code="kvz-magic")
    if len(data) < PROLOGUE.size:
        raise CorruptError(f"the file ends after {len(data)} bytes, inside its prologue", code="kvz-truncated")
    _, version, flags, checksum = PROLOGUE.unpack(data)
    if checksum != xxhash.xxh3_64_intdigest(data[:12]) & 0xFFFFFFFF:
        raise CorruptError("the prologue (first 16 bytes) fails its checksum", code="kvz-checksum")
    if version != VERSION:
        raise UnsupportedError(
            f"format version {version}; this kvzip reads version {VERSION}: use the kvzip that wrote the file",
            code="kvz-version",
        )
    if flags & 0xFF:
        raise UnsupportedError(
            f"reserved flag bits {flags & 0xFF:#04x} are set: the file needs a newer kvzip", code="kvz-reserved"
        )


def pack_tail(index_offset: int, index_length: int, member_length: int) -> bytes:
    first = TAIL.pack(b"TAIL", 24, 0, index_offset, index_length, member_length, 0)[:-8]
    return first + CHECKSUM.pack(xxhash.xxh3_64_intdigest(first))


def parse_tail(data: bytes, end: int) -> tuple[int, int, int]:
    """Index offset, index length and member length, from the 48 bytes before ``end``, where a member ends."""
    if len(data) != TAIL.size or data[:16] != FRAME.pack(b"TAIL", 24, 0):
        raise CorruptError(
            "no trailer where the file ends: it is truncated ('kvzip repair' saves what is there), or bytes were added",
            code="kvz-truncated",
        )
    _, _, _, offset, length, member, checksum = TAIL.unpack(data)
    if checksum != xxhash.xxh3_64_intdigest(data[:-8]):
        raise checksum_error("the trailer", end - TAIL.size)
    fits = PROLOGUE.size <= offset and offset + length <= member - TAIL.size and member <= end
    if not fits or (offset | length | member) & 7:
        raise CorruptError("the trailer's offsets do not fit the file", code="kvz-trailer")
    return offset, length, member


def parse_frame(data: Any, at: int, position: int) -> FrameSize:
    """The frame header at ``data[at:at + 16]``; ``position`` is its offset in the member, for messages."""
    size = FrameSize(*FRAME.unpack_from(data, at))
    if not (size.kind.isalpha() and size.kind.isascii()):
        raise CorruptError(f"no frame at byte {position}: found {size.kind!r}", code="kvz-frame")
    return size


def check_size(size: FrameSize, position: int) -> None:
    """Refuses frames that are read whole, and claim more than such a frame may have."""
    head, body = SIZE_LIMITS.get(size.kind, (size.head, size.body))
    if size.head > head or size.body > body or (size.kind == b"HEAD" and size.head + size.body > MAX_HEADER):
        raise CorruptError(
            f"the {size.kind.decode()} frame at byte {position} claims {size.head} + {size.body} bytes",
            code="kvz-limit",
        )


def split_frame(data: memoryview, size: FrameSize, position: int, seed: int) -> tuple[bytes, bytes]:
    """Head and body of a whole frame, its checksum compared."""
    end = size.total - CHECKSUM.size
    if CHECKSUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[:end], seed):
        raise checksum_error(f"the {size.kind.decode()} frame", position)
    body = FRAME.size + padded(size.head)
    return bytes(data[FRAME.size : FRAME.size + size.head]), bytes(data[body : body + size.body])


def unknown_frame(kind: bytes, position: int) -> UnsupportedError:
    return UnsupportedError(
        f"frame {kind.decode()!r} at byte {position} is critical and unknown here: the file needs a newer kvzip",
        code="kvz-critical-frame",
    )


def checksum_error(what: str, position: int) -> CorruptError:
    return CorruptError(
        f"{what} at byte {position} fails its checksum: the file is damaged ('kvzip repair' saves what is intact)",
        code="kvz-checksum",
    )


@lru_cache(maxsize=1024)
def section_tag(tag: bytes) -> str:
    """A section's tag as text: four ASCII letters or digits."""
    if not (len(tag) == 4 and tag.isalnum() and tag.isascii()):
        raise CorruptError(f"section tag {tag!r} is not four ASCII letters or digits", code="kvz-section")
    return tag.decode()


@lru_cache(maxsize=1024)
def encode_tag(tag: str) -> bytes:
    """The stored form of a section's tag. Raises ValueError for anything but four ASCII letters or digits."""
    if not (len(tag) == 4 and tag.isalnum() and tag.isascii()):
        raise ValueError(f"section tag {tag!r} is not four ASCII letters or digits")
    return tag.encode()


@lru_cache(maxsize=MAX_SECTIONS + 1)
def section_table(count: int) -> struct.Struct:
    """The ``(tag, length)`` rows of a DATA frame with ``count`` sections."""
    return struct.Struct("<" + "4sI" * count)


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys, no spaces, UTF-8: the same value gives the same bytes. Raises ValueError or TypeError."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


INFINITE = "inf"
"""What is recorded in place of a number that is not finite."""


def rounded(value: Any) -> Any:
    """JSON values with floats cut to 6 significant digits; what JSON lacks, not finite, becomes :data:`INFINITE`."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else INFINITE
    return value


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object without repeated keys, NaN, infinities or lone surrogates. Raises CorruptError."""
    try:
        if _depth(data) > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
        canonical_json(value)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what} is not valid JSON: {error}", code="kvz-json") from None
    if not isinstance(value, dict):
        raise CorruptError(f"{what} is not a JSON object", code="kvz-json")
    return value


def _depth(data: bytes) -> int:
    """The deepest nesting, found without recursion, since a parser's own limit differs between Python versions."""
    text = np.frombuffer(_STRING.sub(b"", data), np.uint8)
    opened = (text == ord("[")) | (text == ord("{"))
    closed = (text == ord("]")) | (text == ord("}"))
    steps = opened.astype(np.int32) - closed.astype(np.int32)
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object repeats a key")
    return found
