"""Small containers for the tests, and a way to change one and make its checksums right again, as an attacker would."""

from __future__ import annotations

import io
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from kvzip.cache import Block, Plane, blocks_of
from kvzip.container import Entry, Frame, Header, Reader, StreamReader, Writer

Content = dict[tuple[int, int, int], dict[str, bytes]]
"""Sections by (group, start, stop)."""


def header(**changes: Any) -> Header:
    """Two layers of 20 tokens in blocks of 8, K and V of one apart, of the other in a group; a few plain bytes."""
    keys = [Plane(2 * layer, layer, "key", 20, 2, 4, "bfloat16") for layer in range(2)]
    planes = (
        keys[0],
        replace(keys[0], index=1, kind="value"),
        keys[1],
        replace(keys[1], index=3, kind="value"),
        Plane(4, 0, "bytes", 5, 1, 1, "uint8"),
    )
    fields: dict[str, Any] = {
        "planes": planes,
        "codecs": [{"name": "raw", "config": {}}, {"name": "other", "config": {"level": 3}}],
        "plane_codec": [1, 1, 1, 1, 0],
        "specs": [{"bins": 32}, {"bins": 16}, {"bins": 32}, {"bins": 16}, {}],
        "block_tokens": 8,
        "map": {"layout": "test"},
        "files": [("kv.safetensors", b"\x10\0\0\0\0\0\0\0{}  \xff")],
        "producer": "kvzip test",
        "identity": {"model": "m"},
        "groups": ((planes[0],), (planes[4],), (planes[1],), (planes[2], planes[3])),
    }
    return Header(**{**fields, **changes})


def content(of: Header, seed: int = 0) -> Content:
    """Random sections for every block of ``of``, group by group."""
    rng = np.random.default_rng(seed)
    return {
        (number, block.start, block.stop): {tag: rng.bytes(int(rng.integers(0, 40))) for tag in ("STRM", "TABL")}
        for number, group in enumerate(of.groups)
        for block in blocks_of(group, of.block_tokens)
    }


def write(of: Header, parts: Content, sink: Any = None, statistics: dict[str, Any] | None = None) -> bytes:
    sink = io.BytesIO() if sink is None else sink
    writer = Writer(sink, of)
    for (group, start, stop), sections in parts.items():
        block = Block(of.groups[group], start, stop)
        writer.write_block(block, of.plane_codec[block.planes[0].index], sections)
    if statistics is not None:
        writer.write_statistics(statistics)
    totals = writer.close()
    data = sink.getvalue()
    assert totals.total == len(data)
    return bytes(data)


def sample() -> bytes:
    """A member with everything that a member can have, an unknown ancillary frame included: about 1.9 KB."""
    of = header()
    data = write(of, content(of), statistics={"relative_error": [0.125] * 5, "max_abs": [1.5] * 5})
    spans = frames(data)
    extra = struct.pack("<4sIQ", b"note", 5, 8) + b"hello\0\0\0" + b"ancient!"
    return insert(data, extra, spans[2][1])


def frames(data: bytes) -> list[tuple[bytes, int, int]]:
    """Type, offset and length of every frame of a one-member file."""
    found = []
    at = 16
    while at < len(data):
        kind, head, body = struct.unpack_from("<4sIQ", data, at)
        length = 24 + (head + 7) // 8 * 8 + (body + 7) // 8 * 8
        found.append((kind, at, length))
        at += length
    return found


def insert(data: bytes, frame: bytes, at: int) -> bytes:
    """``data`` with a frame (without its checksum) put in at offset ``at``; index and trailer are corrected."""
    spans = frames(data)
    length = len(frame) + 8
    out = bytearray(data[:at] + frame + bytes(8) + data[at:])
    (index,) = [start for kind, start, _ in spans if kind == b"INDX"]
    moved = index + (length if at <= index else 0)
    (count,) = struct.unpack_from("<Q", out, moved + 16)
    for row in range(moved + 32, moved + 32 + 40 * count, 40):
        (offset,) = struct.unpack_from("<Q", out, row)
        struct.pack_into("<Q", out, row, offset + (length if at <= offset else 0))
    (index_length,) = [length for kind, _, length in spans if kind == b"INDX"]
    struct.pack_into("<QQQ", out, len(out) - 32, moved, index_length, len(out))
    return reseal(bytes(out), frames(bytes(out)))


def reseal(data: bytes, spans: list[tuple[bytes, int, int]]) -> bytes:
    """All checksums of ``data`` made right for the frames at ``spans``, those in the index too."""
    out = bytearray(data)
    out[12:16] = struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:12]))[:4]
    seed, sums = 0, {}
    for kind, start, length in spans:
        end = start + length - 8
        if kind == b"INDX":
            for row in range(start + 32, end - 39, 40):
                (offset,) = struct.unpack_from("<Q", out, row)
                if offset in sums:
                    struct.pack_into("<Q", out, row + 8, sums[offset])
        value = xxhash.xxh3_64_intdigest(bytes(out[start:end]), 0 if kind in (b"HEAD", b"TAIL") else seed)
        struct.pack_into("<Q", out, end, value)
        seed = value if kind == b"HEAD" else seed
        if kind == b"DATA":
            sums[start] = value
    return bytes(out)


def key(entry: Entry) -> tuple[int, int, int]:
    return entry.group, entry.block.start, entry.block.stop


def collect(found: list[Frame]) -> Content:
    return {key(frame.entry): {tag: part.tobytes() for tag, part in frame.sections.items()} for frame in found}


def read_random(data: bytes) -> tuple[Header, Content, Any]:
    """Header, content and statistics through the index."""
    reader = Reader.open(io.BytesIO(data))
    return reader.header, collect(reader.read_frames(list(reader.index))), reader.statistics


def read_stream(data: bytes) -> tuple[Header, Content, Any]:
    """The same, front to back."""
    reader = StreamReader(io.BytesIO(data))
    found = list(reader.frames())
    return reader.header, collect(found), reader.statistics
