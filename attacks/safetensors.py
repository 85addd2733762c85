"""Attacks by way of safetensors files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from attacks.make import Attack


def attacks() -> Iterator[Attack]:
    """Every attack, in the order of the README."""
    for name, code, reason, data in [*lengths(), *texts(), *entries(), *ranges()]:
        yield Attack(f"safetensors/{name}.safetensors", code, 4 if code == "safetensors-dtype" else 3, reason, data)
    for name, code, reason, data in names():
        yield Attack(f"safetensors/{name}.safetensors", code, 2 if code else 0, reason, data)


Row = tuple[str, str, str, bytes]


def lengths() -> Iterator[Row]:
    """The first eight bytes, and how many follow."""
    yield "empty", "safetensors-truncated", "no bytes at all", b""
    yield "short", "safetensors-truncated", "ends inside the length of its header", b"\x10\0\0"
    yield (
        "length-2-63",
        "safetensors-header-length",
        "a header of 8 EiB: a reader that trusts it allocates that",
        (struct.pack("<Q", 1 << 63) + b"{}"),
    )
    yield (
        "length-negative",
        "safetensors-header-length",
        "a length that is -1 when taken as signed",
        b"\xff" * 8 + b"{}",
    )
    yield (
        "length-over-cap",
        "safetensors-header-length",
        "one byte more than the safetensors library allows",
        (struct.pack("<Q", 100_000_001) + b"{}"),
    )
    yield (
        "length-beyond-file",
        "safetensors-truncated",
        "a header of 90 MB in a file of 10 bytes",
        (struct.pack("<Q", 90_000_000) + b"{}"),
    )
    yield "length-zero", "safetensors-json", "an empty header is no JSON", bytes(8)


def texts() -> Iterator[Row]:
    """What the header says as a text."""
    tensor = '{"dtype":"F16","shape":[1],"data_offsets":[0,2]}'
    yield "no-json", "safetensors-json", "not JSON", raw(b"{'a': 1}")
    yield "array", "safetensors-json", "JSON, but no object", raw(b"[1,2,3]")
    yield "blank-first", "safetensors-json", "blanks before the brace, which the format forbids", raw(b"   {}")
    yield "nul-inside", "safetensors-json", "a zero byte, where C would end the text", raw(b'{"a\0":{}}')
    yield "not-utf8", "safetensors-utf8", "bytes that are no UTF-8", raw(b'{"\xff\xfe":{}}')
    yield (
        "surrogate",
        "safetensors-utf8",
        "half a character, which breaks printing and writing of the name",
        raw(f'{{"\\ud800":{tensor}}}'.encode(), b"\0\0"),
    )
    yield (
        "deep",
        "safetensors-json",
        "40,000 nested lists, never closed, exhaust the stack of a recursive parser",
        raw(b'{"a":' + b"[" * 40000),
    )
    yield (
        "digits",
        "safetensors-json",
        "a number of 30,000 digits: its conversion takes quadratic time",
        raw(b'{"a":{"dtype":"F16","shape":[' + b"9" * 30000 + b'],"data_offsets":[0,2]}}', b"\0\0"),
    )
    yield (
        "nan",
        "safetensors-json",
        "NaN, which JSON lacks and Python reads",
        raw(b'{"a":{"dtype":"F16","shape":[NaN],"data_offsets":[0,2]}}', b"\0\0"),
    )
    yield (
        "infinite",
        "safetensors-json",
        "1e999, which becomes infinity",
        raw(b'{"a":{"dtype":"F16","shape":[1e999],"data_offsets":[0,2]}}', b"\0\0"),
    )
    yield (
        "name-twice",
        "safetensors-json",
        "two tensors of one name: readers differ in which one they take",
        raw(f'{{"a":{tensor},"a":{tensor}}}'.encode(), b"\0\0"),
    )
    yield (
        "key-twice",
        "safetensors-json",
        "two shapes in one entry: one is checked, the other used",
        raw(b'{"a":{"dtype":"F16","shape":[1],"shape":[9999],"data_offsets":[0,2]}}', b"\0\0"),
    )


def entries() -> Iterator[Row]:
    """What an entry says of its tensor."""
    bad: list[tuple[str, str, str, Any]] = [
        ("entry-list", "safetensors-entry", "an entry that is a list", ["F16", [1], [0, 2]]),
        ("entry-null", "safetensors-entry", "an entry that is null", None),
        ("shape-negative", "safetensors-entry", "a negative size", {"shape": [-1, -1]}),
        ("shape-fraction", "safetensors-entry", "a size of 1.0", {"shape": [1.0]}),
        ("shape-true", "safetensors-entry", "a size of true, which Python takes for 1", {"shape": [True]}),
        ("shape-text", "safetensors-entry", "sizes as a text", {"shape": "1"}),
        ("shape-2-64", "safetensors-entry", "a size beyond 64 bits", {"shape": [1 << 64]}),
        ("shape-overflow", "safetensors-overflow", "a product that is 0 modulo 2^64", {"shape": [1 << 32, 1 << 32]}),
        ("shape-overflow-zero", "safetensors-overflow", "overflows before a size of 0 makes it harmless", {
            "shape": [1 << 63, 2, 0]
        }),
        ("shape-dimensions", "safetensors-overflow", "10,000 dimensions: no array has those", {"shape": [2] * 10000}),
        ("shape-too-large", "safetensors-size", "a shape of 2 TB over two bytes of data", {"shape": [1 << 40]}),
        ("dtype-unknown", "safetensors-dtype", "a dtype that does not exist", {"dtype": "F128"}),
        ("dtype-list", "safetensors-entry", "a dtype that is a list", {"dtype": ["F16"]}),
        ("dtype-4-bit", "safetensors-size", "three 4-bit numbers: half a byte", {"dtype": "F4", "shape": [3]}),
        ("offsets-three", "safetensors-entry", "three offsets", {"data_offsets": [0, 2, 4]}),
        ("offsets-negative", "safetensors-entry", "begins before the file", {"data_offsets": [-2, 0]}),
        ("offsets-text", "safetensors-entry", "offsets as texts", {"data_offsets": ["0", "2"]}),
        ("offsets-missing", "safetensors-entry", "no offsets", {"data_offsets": None}),
    ]  # fmt: skip
    for name, code, reason, change in bad:
        entry = {"dtype": "F16", "shape": [1], "data_offsets": [0, 2], **change} if isinstance(change, dict) else change
        yield name, code, reason, header({"a": entry}, b"\0\0")
    yield "metadata-number", "safetensors-metadata", "metadata that are no texts", header({"__metadata__": {"a": 1}})
    yield "metadata-list", "safetensors-metadata", "metadata that are a list", header({"__metadata__": []})


def ranges() -> Iterator[Row]:
    """Where tensors lie."""

    def two(first: list[int], second: list[int], size: int) -> bytes:
        return header(
            {name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
             for name, (begin, end) in (("a", first), ("b", second))},
            bytes(size),
        )  # fmt: skip

    yield (
        "overlap",
        "safetensors-overlap",
        "two tensors share bytes: a small file claims to hold much",
        two([0, 8], [4, 8], 8),
    )
    yield (
        "same-range",
        "safetensors-overlap",
        "a thousand names for the same bytes",
        header({f"t{n}": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} for n in range(1000)}, bytes(8)),
    )
    yield "hole", "safetensors-hole", "bytes of no tensor between two, where anything can hide", two([0, 2], [6, 8], 8)
    yield "hole-first", "safetensors-hole", "bytes of no tensor in front", two([4, 6], [6, 8], 8)
    yield (
        "backwards",
        "safetensors-hole",
        "ends before it begins",
        header({"a": {"dtype": "U8", "shape": [4], "data_offsets": [8, 4]}}, bytes(8)),
    )
    yield (
        "beyond-2-63",
        "safetensors-hole",
        "offsets that are negative when taken as signed",
        header({"a": {"dtype": "U8", "shape": [2], "data_offsets": [(1 << 64) - 4, (1 << 64) - 2]}}, bytes(8)),
    )
    yield "truncated", "safetensors-truncated", "half of its data is missing", two([0, 4], [4, 8], 4)
    yield (
        "appended",
        "safetensors-trailing-bytes",
        "a second file behind the first: readers differ in which they see",
        (two([0, 4], [4, 8], 8) + b"PK\3\4 and an archive"),
    )
    yield "claims-terabytes", "safetensors-truncated", "8 TB of consistent tensors over no data", header(
        {f"layers.{n}.key": {"dtype": "F16", "shape": [1 << 30, 1, 128], "data_offsets": [n << 38, n + 1 << 38]}
         for n in range(32)}
    )  # fmt: skip


def names() -> Iterator[Row]:
    """Sound files whose names and shapes attack what comes behind the reader."""
    yield (
        "layer-number",
        "layout-undetected",
        "a layer number of 30 digits: a list of all layers up to it",
        kv(f"layers.{10**30}"),
    )
    yield (
        "layer-gap",
        "layer-missing",
        "layers 0 and 99,999: a list of all those between",
        kv("layers.0", "layers.99999"),
    )
    yield "layer-far", "", "layer 999,999,999 alone: nothing may count up to it", kv("layers.999999999")
    yield "dimensions", "layout-undetected", "keys of 70 dimensions: more than any array has", header({
        f"layers.0.{kind}": {"dtype": "F16", "shape": [1] * 70, "data_offsets": [at, at + 2]}
        for kind, at in (("key", 0), ("value", 2))
    }, bytes(4))  # fmt: skip
    yield "escape-names", "", "names with terminal escapes and paths: shown harmlessly, never used as paths", header({
        "layers.0.key": {"dtype": "F16", "shape": [1, 2, 4], "data_offsets": [0, 16]},
        "layers.0.value": {"dtype": "F16", "shape": [1, 2, 4], "data_offsets": [16, 32]},
        "../../../tmp/evil\x1b]0;owned\x07": {"dtype": "U8", "shape": [1], "data_offsets": [32, 33]},
    }, bytes(33))  # fmt: skip
    yield "long-name", "", "a name of 60,000 characters", header({
        "n" * 60000: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
    }, bytes(1))  # fmt: skip
    yield "empty-tensors", "kvz-header", "2^40 heads of no tokens: nothing may be counted through", header({
        f"layers.0.{kind}": {"dtype": "F16", "shape": [1 << 40, 0, 8], "data_offsets": [0, 0]}
        for kind in ("key", "value")
    })  # fmt: skip


def raw(text: bytes, data: bytes = b"") -> bytes:
    """A file whose header is any text."""
    return struct.pack("<Q", len(text)) + text + data


def header(entries: dict[str, Any], data: bytes = b"") -> bytes:
    """A file with these entries, right or wrong."""
    return raw(json.dumps(entries, separators=(",", ":")).encode(), data)


def kv(*layers: str) -> bytes:
    """A small cache of such layers."""
    tensors = [f"{layer}.{kind}" for layer in layers for kind in ("key", "value")]
    rows = {
        name: {"dtype": "F16", "shape": [1, 2, 4], "data_offsets": [16 * n, 16 * n + 16]}
        for n, name in enumerate(tensors)
    }
    return header(rows, bytes(16 * len(tensors)))
