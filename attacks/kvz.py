"""Attacks by way of ``.kvz`` files. Nearly all have right checksums: an attacker can make those."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import xxhash

import kvzip
from attacks.make import Attack
from fuzz.files import Frame, assemble, frames
from kvzip.container import MAGIC
from kvzip.container import format as fmt
from kvzip.devices import get_device

EXIT_CODES = {
    "kvz-version": 4,
    "kvz-reserved": 4,
    "kvz-critical-frame": 4,
    "kvz-kind": 4,
    "kvz-dtype": 4,
    "codec-unknown": 4,
}
HIDDEN = ("codec-unknown", "codec-config", "codec-block", "kvz-bound", "corrupt-block", "raw-length")
"""Errors that only decoding meets: structure and checksums are those of a sound file."""

Row = tuple[str, str, str, bytes]
HEAD, FIRST, INDEX, TAIL = 0, 2, -2, -1  # the second block: the first is of the integers


def attacks() -> Iterator[Attack]:
    """Every attack, in the order of the README."""
    for name, code, reason, data in [*starts(), *headers(), *planes(), *blocks(), *indexes(), *sections(), *harmless()]:
        exit_code = EXIT_CODES.get(code, 3) if code else 0
        yield Attack(f"kvz/{name}.kvz", code, exit_code, reason, data, code in HIDDEN)


# ------------------------------------------------------------------------------------------------------ sound files


@cache
def sound(codec: str = "raw") -> bytes:
    """A layer of 20 tokens in blocks of 16, and 9 integers."""
    values = np.random.default_rng(0).standard_normal((2, 2, 20, 8)).astype(np.float16)
    arrays = {"layers.0.key": values[0], "layers.0.value": values[1], "ids": np.arange(9)}
    return kvzip.compress(arrays, codec=codec, block_tokens=16, device=get_device("cpu", 1), sinks=2) if (
        codec == "cachegen"
    ) else kvzip.compress(arrays, codec=codec, block_tokens=16, device=get_device("cpu", 1))  # fmt: skip


def forged(change: Callable[[list[Frame]], object], codec: str = "raw", **mend: bool) -> bytes:
    """A sound file after a change to its frames, checksums right again, and index and trailer unless told otherwise."""
    parts = frames(sound(codec))
    change(parts)
    return assemble(parts, **{"index": True, "trailer": True, **mend})


def replaced(number: int, head: Callable[[bytes], bytes], **mend: bool) -> bytes:
    """The head of one frame changed."""

    def change(parts: list[Frame]) -> None:
        kind, old, body = parts[number]
        parts[number] = (kind, head(old), body)

    return forged(change, **mend)


def rejson(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The header's JSON changed."""

    def head(old: bytes) -> bytes:
        value = json.loads(old)
        change(value)
        return fmt.canonical_json(value)

    return replaced(HEAD, head)


def text(old: str, new: str) -> bytes:
    """A text in the header's JSON replaced."""
    assert old in frames(sound())[HEAD][1].decode()
    return replaced(HEAD, lambda head: head.decode().replace(old, new, 1).encode())


# ---------------------------------------------------------------------------------------------------------- attacks


def starts() -> Iterator[Row]:
    """The prologue and the first frame."""
    data = sound()
    yield "empty", "kvz-magic", "no bytes at all", b""
    yield "magic-alone", "kvz-truncated", "ends inside its prologue", MAGIC
    yield (
        "text-mode",
        "kvz-magic",
        "line ends converted by a transfer in text mode",
        MAGIC.replace(b"\r\n", b"\n") + data[8:],
    )
    yield (
        "flipped-bit",
        "kvz-checksum",
        "one bit changed in a block",
        (data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]),
    )
    for name, code, at, value, reason in (
        ("version-next", "kvz-version", 8, fmt.VERSION + 1, "a version from the future"),
        ("reserved-flag", "kvz-reserved", 10, 1, "a reserved flag"),
    ):
        start = bytearray(data[:12])
        start[at] = value
        yield (
            name,
            code,
            reason,
            bytes(start) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(start)))[:4] + data[16:],
        )
    yield "truncated", "kvz-truncated", "its second half is missing", data[: len(data) // 16 * 8]
    yield (
        "appended",
        "kvz-truncated",
        "an archive behind the file: readers differ in what they see",
        data + b"PK\3\4" * 20,
    )
    yield "no-header", "kvz-frame", "begins with a block", forged(lambda parts: parts.pop(HEAD))
    yield (
        "second-header",
        "kvz-index",
        "a second header among the blocks",
        forged(lambda parts: parts.insert(2, parts[0])),
    )
    yield (
        "critical-frame",
        "kvz-critical-frame",
        "a frame that a reader must know and does not",
        forged(lambda parts: parts.insert(1, (b"Evil", b"", b""))),
    )
    yield (
        "frame-claims-16-eib",
        "kvz-frame",
        "a frame whose padded length overflows 64 bits",
        (data[:16] + struct.pack("<4sIQ", b"HEAD", (1 << 32) - 1, (1 << 64) - 1) + data[32:]),
    )
    yield (
        "header-claims-127-mib",
        "kvz-frame",
        "a header of 127 MiB in a file of a kilobyte",
        (data[:16] + struct.pack("<4sIQ", b"HEAD", 100, 127 << 20) + data[32:]),
    )


def headers() -> Iterator[Row]:
    """The header's JSON, its paths and its codecs."""
    yield (
        "json-deep",
        "kvz-json",
        "20,000 nested lists exhaust the stack of a recursive parser",
        replaced(HEAD, lambda head: b'{"a":' + b"[" * 20000 + b"]" * 20000 + b"," + head[1:]),
    )
    yield (
        "json-digits",
        "kvz-json",
        "a number of 30,000 digits: its conversion takes quadratic time",
        replaced(HEAD, lambda head: b'{"a":' + b"9" * 30000 + b"," + head[1:]),
    )
    yield (
        "json-twice",
        "kvz-json",
        "a key twice: readers differ in which one they take",
        replaced(HEAD, lambda head: b'{"block_tokens":16,' + head[1:]),
    )
    yield (
        "json-infinite",
        "kvz-json",
        "1e999, which becomes infinity",
        replaced(HEAD, lambda head: b'{"a":1e999,' + head[1:]),
    )
    yield (
        "json-surrogate",
        "kvz-json",
        "half a character, which breaks printing",
        replaced(HEAD, lambda head: b'{"a":"\\ud800",' + head[1:]),
    )
    paths = {
        "up": "../evil",
        "absolute": "/tmp/evil",
        "drive": "C:evil",
        "backslash": "a\\\\..\\\\..\\\\evil",
        "control": "a\\nb",
    }
    for name, path in paths.items():
        yield (
            f"path-{name}",
            "kvz-header",
            f"restores a file to {path.encode().decode('unicode_escape')!r}",
            text('"files":[["",', f'"files":[["{path}",'),
        )
    yield (
        "header-length",
        "kvz-header",
        "a source header longer than what is there",
        rejson(lambda h: h["files"][0].append(h["files"][0].pop() + 1)),
    )
    yield (
        "codec-missing",
        "codec-unknown",
        "a codec that is not here: nothing may be imported by its name",
        text('"name":"raw"', '"name":"os.system"'),
    )
    yield (
        "codec-options",
        "codec-config",
        "options that the codec does not have",
        text('"config":{}', '"config":{"a":1}'),
    )
    yield (
        "codec-type",
        "codec-config",
        "an option of another type",
        forged(lambda parts: _rewrite(parts, HEAD, '"k_bins":"', '"k_bins":7,"x_bins":"'), "cachegen"),
    )
    yield (
        "identity-list",
        "kvz-header",
        "an identity that is no object",
        rejson(lambda header: header.update(identity=[])),
    )


def planes() -> Iterator[Row]:
    """Geometry: what a reader would allocate."""
    yield "tokens-2-62", "kvz-header", "2^62 tokens and one more", text('"tokens":20', '"tokens":4611686018427387905')
    yield "tokens-negative", "kvz-header", "a negative number of tokens", text('"tokens":20', '"tokens":-20')
    yield "heads-true", "kvz-header", "true for a number, which Python takes for 1", text('"heads":2', '"heads":true')
    yield (
        "petabytes",
        "kvz-index",
        "10^15 tokens, of which 20 are there",
        text('"tokens":20', '"tokens":1000000000000000'),
    )
    yield "kind", "kvz-kind", "a kind of plane that is unknown", text('"kind":"key"', '"kind":"kay"')
    yield "dtype", "kvz-dtype", "a dtype that is unknown", text('"dtype":"float16"', '"dtype":"float128"')
    yield (
        "heads-swapped",
        "layout-map",
        "geometry of equal size that is not that of the map",
        text('"head_dim":8,"heads":2', '"head_dim":2,"heads":8'),
    )
    yield (
        "map-size",
        "safetensors-trailing-bytes",
        "a file of 2^50 bytes by its map, of a kilobyte by its tensors",
        rejson(lambda header: header["map"].update(sizes=[1 << 50])),
    )
    yield "map-empty", "layout-map", "no map", rejson(lambda header: header.update(map={}))
    yield "map-axes", "layout-map", "axes that repeat", text('"axes":["', '"axes":["T,T,T,')
    yield "map-planes", "layout-map", "a tensor without data that makes 2^19 planes", _many_planes()
    yield "groups", "kvz-header", "a plane in two groups", rejson(lambda header: header.update(groups=[[0, 1], [1, 2]]))
    yield "group-of-two", "codec-block", "planes of different shapes in one frame", _grouped()


def blocks() -> Iterator[Row]:
    """DATA frames."""

    def field(at: int, fmt_: str, value: int) -> bytes:
        def head(old: bytes) -> bytes:
            new = bytearray(old)
            struct.pack_into(fmt_, new, at, value)
            return bytes(new)

        return replaced(FIRST, head)

    yield "group-number", "kvz-index", "a block of planes that do not exist", field(0, "<I", 1 << 31)
    yield "codec-number", "kvz-index", "a codec that does not exist", field(4, "<H", 9)
    yield "sections-65535", "kvz-frame", "65,535 sections in a head of one", field(6, "<H", 65535)
    yield "start-2-63", "kvz-index", "a first token that is negative when taken as signed", field(8, "<Q", 1 << 63)
    yield (
        "count-0",
        "kvz-index",
        "a block of no tokens: a reader that waits for its end never stops",
        field(16, "<I", 0),
    )
    yield "count-2-32", "kvz-index", "a block of 2^32 - 1 tokens", field(16, "<I", (1 << 32) - 1)
    yield "section-length", "kvz-section", "a section longer than its frame", field(28, "<I", (1 << 32) - 1)
    yield "section-tag", "kvz-section", "a tag with a line end, for whoever prints it", field(24, "<I", 0x0A0A0A0A)
    yield "oversized", "kvz-bound", "more bytes than the codec can make of such a block", forged(_oversized)
    yield "foreign", "kvz-checksum", "a block of another file in its place, with that one's checksum", _foreign()


def indexes() -> Iterator[Row]:
    """INDX and TAIL, which lead a reader around."""
    data = sound()

    def entry(number: int, at: int, fmt_: str, value: int) -> bytes:
        def change(parts: list[Frame]) -> None:
            kind, head, body = parts[INDEX]
            new = bytearray(body)
            struct.pack_into(fmt_, new, 40 * number + at, value)
            parts[INDEX] = (kind, head, bytes(new))

        return forged(change, index=False)

    yield "index-offset", "kvz-index", "a block beyond the end", entry(1, 0, "<Q", 1 << 62)
    yield "index-overlap", "kvz-index", "two entries for the same bytes", entry(1, 0, "<Q", 16)
    yield "index-overflow", "kvz-index", "offset plus length is small modulo 2^64", entry(1, 0, "<Q", (1 << 64) - 8)
    yield "index-tokens", "kvz-index", "the same tokens twice", entry(2, 16, "<Q", 0)
    yield (
        "index-count",
        "kvz-index",
        "2^61 entries: their size is small modulo 2^64",
        replaced(INDEX, lambda head: struct.pack("<QII", 1 << 61, 1, 0), index=False),
    )
    yield (
        "index-tags",
        "kvz-index",
        "2^32 - 1 section totals",
        replaced(INDEX, lambda head: head[:8] + b"\xff\xff\xff\xff" + head[12:], index=False),
    )
    yield "index-hides", "kvz-index", "a block that the index leaves out", forged(_hidden_block, index=False)
    for name, at, value, reason in (
        ("trailer-self", 0, len(data) - 48, "the trailer says that it is the index"),
        ("trailer-far", 0, 1 << 62, "an index beyond the end"),
        ("trailer-zero", 16, 0, "a member of no bytes: a reader that steps back by it never stops"),
        ("trailer-before", 16, 1 << 40, "a member that begins before the file"),
    ):
        tail = bytearray(frames(data)[TAIL][1])
        struct.pack_into("<Q", tail, at, value)
        yield name, "kvz-trailer", reason, replaced(TAIL, lambda _, tail=tail: bytes(tail), trailer=False)
    yield (
        "statistics-twice",
        "kvz-frame",
        "two statistics frames",
        forged(lambda parts: (parts[3:3] and None) or parts.__setitem__(slice(3, 3), [(b"stat", b"{}", b"")] * 2)),
    )
    yield (
        "statistics-json",
        "kvz-json",
        "statistics that are no JSON",
        forged(lambda parts: parts.insert(3, (b"stat", b"{", b""))),
    )


def sections() -> Iterator[Row]:
    """What only the codec can notice."""
    yield (
        "raw-short",
        "raw-length",
        "fewer numbers than the block has",
        forged(lambda parts: _resized(parts, FIRST, {b"DATA": -8})),
    )
    yield (
        "fp8-short",
        "corrupt-block",
        "fewer codes than the block has",
        forged(lambda parts: _resized(parts, FIRST, {b"DATA": -8}), "fp8"),
    )
    yield (
        "fp8-extra",
        "corrupt-block",
        "a section that the codec does not know",
        forged(lambda parts: _renamed(parts, FIRST, b"DATA", b"DATB"), "fp8"),
    )
    for tag, code, fill, reason in (
        (b"TOKN", "corrupt-block", 0xFF, "all tokens exact, and none of them there"),
        (b"STAT", "corrupt-block", 0xFF, "streams of 4 billion words, read from far outside"),
        (b"STRM", "corrupt-block", 0x00, "streams that end elsewhere than they must"),
    ):
        yield (
            f"cachegen-{tag.decode().lower()}",
            code,
            reason,
            forged(lambda parts, tag=tag, fill=fill: _filled(parts, FIRST, tag, fill), "cachegen"),
        )
    yield (
        "cachegen-rows",
        "corrupt-block",
        "one exact token less than the masks say",
        forged(lambda parts: _resized(parts, FIRST, {b"ROWS": -32}), "cachegen"),
    )


def harmless() -> Iterator[Row]:
    """What looks dangerous and must not be."""
    yield (
        "escape-producer",
        "",
        "terminal escapes in the header: shown harmlessly",
        rejson(lambda header: header.update(producer="\x1b]0;owned\x07\x1b[2J", identity={"model": "\x1b[31m"})),
    )
    yield (
        "ancillary-frame",
        "",
        "an unknown frame that may be skipped",
        forged(lambda parts: parts.insert(2, (b"note", b"hello", b"x" * 99))),
    )
    yield (
        "statistics-lie",
        "",
        "statistics with numbers that no float can hold",
        forged(
            lambda parts: parts.insert(
                3, (b"stat", b'{"relative_error":[1' + b"0" * 400 + b',null,3],"max_abs":[1,2,3]}', b"")
            )
        ),
    )


# ---------------------------------------------------------------------------------------------------------- changes


def _rewrite(parts: list[Frame], number: int, old: str, new: str) -> None:
    kind, head, body = parts[number]
    assert old in head.decode()
    parts[number] = (kind, head.decode().replace(old, new, 1).encode(), body)


def _table(head: bytes) -> list[tuple[bytes, int]]:
    count = struct.unpack_from("<H", head, 6)[0]
    return [struct.unpack_from("<4sI", head, 24 + 8 * n) for n in range(count)]


def _parts(parts: list[Frame], number: int) -> dict[bytes, bytes]:
    _, head, body = parts[number]
    found, at = {}, 0
    for tag, length in _table(head):
        found[tag] = body[at : at + length]
        at += fmt.padded(length)
    return found


def _put(parts: list[Frame], number: int, sections: dict[bytes, bytes]) -> None:
    head = parts[number][1]
    table = b"".join(struct.pack("<4sI", tag, len(part)) for tag, part in sections.items())
    body = b"".join(part + fmt.zeros(len(part)) for part in sections.values())
    parts[number] = (b"DATA", head[:6] + struct.pack("<H", len(sections)) + head[8:24] + table, body)


def _resized(parts: list[Frame], number: int, changes: dict[bytes, int]) -> None:
    found = _parts(parts, number)
    for tag, by in changes.items():
        found[tag] = found[tag][:by] if by < 0 else found[tag] + bytes(by)
    _put(parts, number, found)


def _renamed(parts: list[Frame], number: int, old: bytes, new: bytes) -> None:
    _put(parts, number, {new if tag == old else tag: part for tag, part in _parts(parts, number).items()})


def _filled(parts: list[Frame], number: int, tag: bytes, value: int) -> None:
    found = _parts(parts, number)
    _put(parts, number, {**found, tag: bytes([value]) * len(found[tag])})


def _oversized(parts: list[Frame]) -> None:
    _resized(parts, FIRST, {b"DATA": 4096})


def _hidden_block(parts: list[Frame]) -> None:
    """One more block behind the others; the index stays as it was, and true."""
    parts.insert(len(parts) - 2, parts[len(parts) - 3])


def _foreign() -> bytes:
    ours, theirs = sound(), text('"producer":"', '"producer":"x')
    start = 16 + 24 + sum(fmt.padded(len(part)) for part in frames(ours)[HEAD][1:])
    there = 16 + 24 + sum(fmt.padded(len(part)) for part in frames(theirs)[HEAD][1:])
    length = 24 + sum(fmt.padded(len(part)) for part in frames(ours)[FIRST][1:])
    return ours[:start] + theirs[there : there + length] + ours[start + length :]


def _grouped() -> bytes:
    """The first two planes in one group, of which the second is of another shape."""

    def change(parts: list[Frame]) -> None:
        _, head, body = parts[HEAD]
        header = json.loads(head)
        classes = header["planes"]["classes"]
        kv = next(n for n, row in enumerate(classes) if row["kind"] == "key")
        value = next(n for n, row in enumerate(classes) if row["kind"] == "value")
        keys = [n for n, row in enumerate(header["planes"]["class"]) if row in (kv, value)]
        others = [n for n in range(len(header["planes"]["class"])) if n not in keys]
        header["groups"] = [keys, *others]
        parts[HEAD] = (b"HEAD", fmt.canonical_json(header), body)
        del parts[1 : len(parts) - 2]
        for group, start, tokens in ((0, 0, 16), (0, 16, 4), (1, 0, 72)):
            head = struct.pack("<IHHQII4sI", group, 0, 1, start, tokens, 0, b"DATA", 8)
            parts.insert(len(parts) - 2, (b"DATA", head, bytes(8)))
        parts[INDEX] = (b"INDX", fmt.INDEX_HEAD.pack(0, 1, 0), struct.pack("<4sIQ", b"DATA", 0, 24))

    return forged(change, "cachegen")


def _many_planes() -> bytes:
    """A source header with one tensor of 2^18 x 2 empty planes, and no blocks."""
    entry = {"dtype": "F16", "shape": [1 << 18, 2, 0, 1, 8], "data_offsets": [0, 0]}
    source = json.dumps({"kv": entry}, separators=(",", ":")).encode()
    source = struct.pack("<Q", len(source)) + source
    header = {
        "block_tokens": 16,
        "codecs": [],
        "files": [["", len(source)]],
        "map": {"axes": ["L,kv,T,H,D"], "layout": "x", "sizes": [len(source)], "tensors": [[0, 0, None, 0, 0]]},
        "planes": {"class": [], "classes": [], "layer": []},
        "producer": "x",
    }
    index = (b"INDX", fmt.INDEX_HEAD.pack(0, 0, 0), b"")
    return assemble(
        [(b"HEAD", fmt.canonical_json(header), source), index, (b"TAIL", bytes(24), b"")], index=True, trailer=True
    )
