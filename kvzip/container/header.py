"""The HEAD frame: geometry, codecs and channel specs, layout map, and the source files' own header bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast, get_args

from kvzip.cache import BLOCK_TOKENS, Block, Kind, Plane
from kvzip.container import format as fmt
from kvzip.errors import CorruptError, UnsupportedError

_KINDS = get_args(Kind)
_KNOWN = frozenset(("block_tokens", "codecs", "files", "groups", "identity", "map", "planes", "producer"))


@dataclass
class Header:
    """What a reader must know before the first frame.

    ``codecs`` are ``{"name", "config"}``; ``plane_codec[i]`` and ``specs[i]`` (of ``Codec.describe``) belong to
    ``planes[i]``. ``groups`` are the plane tuples that frames hold: single planes if not given. ``map`` is the layout's
    JSON. ``files`` holds ``(relative path, exact header bytes)`` of each source file; ``identity`` names the model and
    the tokens. Keys that a newer writer added are kept in ``extra``.
    """

    planes: tuple[Plane, ...]
    codecs: list[dict[str, Any]]
    plane_codec: list[int]
    specs: list[dict[str, Any]]
    block_tokens: int = BLOCK_TOKENS
    map: dict[str, Any] = field(default_factory=dict)
    files: list[tuple[str, bytes]] = field(default_factory=list)
    producer: str = ""
    identity: dict[str, Any] = field(default_factory=dict)
    groups: Sequence[tuple[Plane, ...]] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.groups:
            self.groups = tuple((plane,) for plane in self.planes)

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The number of the group that holds each plane, by plane index."""
        return {plane.index: number for number, group in enumerate(self.groups) for plane in group}

    def block(self, group: int, start: int, count: int) -> Block:
        """Tokens ``start:start + count`` of a group, checked against the geometry and the format's limits."""
        if group >= len(self.groups):
            raise CorruptError(f"group {group} does not exist: the header has {len(self.groups)}", code="kvz-geometry")
        planes = self.groups[group]
        block = Block(planes, start, start + count)
        if not 0 < count <= planes[0].tokens - start or (count > self.block_tokens and planes[0].kind != "bytes"):
            raise CorruptError(
                f"{planes[0]}: a block of tokens {start}:{start + count}, expected up to {self.block_tokens} tokens"
                f" within 0:{planes[0].tokens}",
                code="kvz-geometry",
            )
        if block.nbytes > fmt.MAX_BLOCK_BYTES:
            raise CorruptError(
                f"{planes[0]}: a block of {block.nbytes} bytes, at most {fmt.MAX_BLOCK_BYTES} are allowed",
                code="kvz-geometry",
            )
        return block

    def to_bytes(self) -> tuple[bytes, bytes]:
        """The frame's head (canonical JSON) and body (the source files' header bytes, one after the other)."""
        value: dict[str, Any] = {
            **self.extra,
            "block_tokens": self.block_tokens,
            "codecs": self.codecs,
            "files": [[path, len(text)] for path, text in self.files],
            "map": self.map,
            "planes": self._columns(),
            "producer": self.producer,
        }
        if self.identity:
            value["identity"] = self.identity
        if any(len(group) != 1 or group[0].index != number for number, group in enumerate(self.groups)):
            indices = [[plane.index for plane in group] for group in self.groups]
            value["groups"] = [group[0] if len(group) == 1 else group for group in indices]
        return fmt.canonical_json(value), b"".join(text for _, text in self.files)

    def _columns(self) -> dict[str, Any]:
        """Planes differ in their layer and little else: each names its class, so that a plane costs about 5 bytes."""
        classes: dict[bytes, int] = {}
        table: list[dict[str, Any]] = []
        numbers = []
        for plane, codec, spec in zip(self.planes, self.plane_codec, self.specs, strict=True):
            row = {
                "codec": codec,
                "dtype": plane.dtype,
                "head_dim": plane.head_dim,
                "heads": plane.heads,
                "kind": plane.kind,
                "spec": spec,
                "tokens": plane.tokens,
            }
            number = classes.setdefault(fmt.canonical_json(row), len(table))
            if number == len(table):
                table.append(row)
            numbers.append(number)
        columns: dict[str, Any] = {"class": numbers, "classes": table, "layer": [plane.layer for plane in self.planes]}
        if any(plane.sequence for plane in self.planes):
            columns["sequence"] = [plane.sequence for plane in self.planes]
        return columns

    @classmethod
    def from_bytes(cls, head: bytes, body: bytes) -> Header:
        """Parse and check both parts. Raises CorruptError; UnsupportedError for a kind or dtype that is unknown."""
        value = fmt.parse_json(head, "the header")
        codecs = _codecs(_get(value, "codecs", list))
        planes, plane_codec, specs = _planes(_get(value, "planes", dict), len(codecs))
        return cls(
            planes=planes,
            codecs=codecs,
            plane_codec=plane_codec,
            specs=specs,
            block_tokens=_integer(value, "block_tokens", 1, fmt.MAX_BLOCK_BYTES),
            map=_get(value, "map", dict),
            files=_files(_get(value, "files", list), body),
            producer=_get(value, "producer", str),
            identity=_get(value, "identity", dict) if "identity" in value else {},
            groups=_groups(_get(value, "groups", list), planes, plane_codec) if "groups" in value else (),
            extra={key: item for key, item in value.items() if key not in _KNOWN},
        )


def _bad(message: str) -> CorruptError:
    return CorruptError(f"the header is invalid: {message}", code="kvz-header")


def _get(value: Any, key: str, kind: type) -> Any:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, kind) or isinstance(found, bool):
        raise _bad(f"{key!r} must be a JSON {kind.__name__}, found {type(found).__name__}")
    return found


def _integer(value: Any, key: str, low: int, high: int) -> int:
    number: int = _get(value, key, int)
    if not low <= number <= high:
        raise _bad(f"{key!r} is {number}, expected {low} to {high}")
    return number


def _codecs(rows: list[Any]) -> list[dict[str, Any]]:
    if len(rows) > fmt.MAX_CODECS:
        raise _bad(f"{len(rows)} codecs, at most {fmt.MAX_CODECS} are allowed")
    return [{"name": _get(row, "name", str), "config": _get(row, "config", dict)} for row in rows]


def _column(value: dict[str, Any], key: str, high: int, count: int | None = None) -> list[int]:
    column = _get(value, key, list)
    if count is not None and len(column) != count:
        raise _bad(f"column {key!r} has {len(column)} entries, expected {count}")
    if not all(type(item) is int and 0 <= item <= high for item in column):
        raise _bad(f"column {key!r} holds something else than integers from 0 to {high}")
    return list(column)


def _planes(value: dict[str, Any], codecs: int) -> tuple[tuple[Plane, ...], list[int], list[dict[str, Any]]]:
    rows = [_class(row, codecs) for row in _get(value, "classes", list)]
    numbers = _column(value, "class", len(rows) - 1)
    if len(numbers) > fmt.MAX_PLANES:
        raise _bad(f"{len(numbers)} planes, at most {fmt.MAX_PLANES} are allowed")
    layers = _column(value, "layer", (1 << 31) - 1, len(numbers))
    sequences = _column(value, "sequence", (1 << 31) - 1, len(numbers)) if "sequence" in value else [0] * len(numbers)
    planes = tuple(
        replace(rows[number][0], index=index, layer=layer, sequence=sequence)
        for index, (layer, number, sequence) in enumerate(zip(layers, numbers, sequences, strict=True))
    )
    if sum(plane.nbytes for plane in planes) > fmt.MAX_CACHE_BYTES:
        raise _bad("the planes hold more than 2^62 bytes")
    return planes, [rows[number][1] for number in numbers], [rows[number][2] for number in numbers]


def _class(row: Any, codecs: int) -> tuple[Plane, int, dict[str, Any]]:
    """What the planes of a class share: a plane to copy, its codec and its spec."""
    kind, dtype = _get(row, "kind", str), _get(row, "dtype", str)
    if kind not in _KINDS:
        raise UnsupportedError(f"planes of kind {kind!r} need a newer kvzip", code="kvz-kind")
    if dtype not in fmt.DTYPES:
        raise UnsupportedError(f"planes of dtype {dtype!r} need a newer kvzip", code="kvz-dtype")
    tokens = _integer(row, "tokens", 0, fmt.MAX_CACHE_BYTES)
    heads, head_dim = (_integer(row, key, 0, (1 << 31) - 1) for key in ("heads", "head_dim"))
    plane = Plane(0, 0, cast(Kind, kind), tokens, heads, head_dim, dtype)
    return plane, _integer(row, "codec", 0, codecs - 1), _get(row, "spec", dict)


def _groups(rows: list[Any], planes: tuple[Plane, ...], plane_codec: list[int]) -> tuple[tuple[Plane, ...], ...]:
    groups = [row if isinstance(row, list) else [row] for row in rows]
    flat = [index for group in groups for index in group]
    if not all(type(index) is int for index in flat) or sorted(flat) != list(range(len(planes))):
        raise _bad("'groups' must name every plane exactly once")
    for group in groups:
        if len({(planes[index].tokens, plane_codec[index]) for index in group}) != 1:
            raise _bad(f"the planes of group {group} differ in tokens or codec, or there are none")
    return tuple(tuple(planes[index] for index in group) for group in groups)


def _files(rows: list[Any], body: bytes) -> list[tuple[str, bytes]]:
    files: list[tuple[str, bytes]] = []
    at = 0
    for row in rows:
        if not (isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and type(row[1]) is int):
            raise _bad("an entry of 'files' is not [path, length]")
        path, length = row
        _check_path(path)
        if not 0 <= length <= len(body) - at:
            raise _bad(f"file {path!r} claims {length} header bytes, {len(body) - at} are left")
        files.append((path, body[at : at + length]))
        at += length
    if at != len(body):
        raise _bad(f"{len(body) - at} bytes of the header belong to no file")
    if len({path for path, _ in files}) != len(files):
        raise _bad("two files have the same path")
    return files


def _check_path(path: str) -> None:
    """Only paths that stay inside the folder that a reader restores to. Empty: the source had no name (a pipe)."""
    outside = path and any(part in ("", ".", "..") for part in path.split("/"))
    if outside or re.search(r"[\x00-\x1f\\]|^[A-Za-z]:", path):
        raise _bad(f"path {path!r} is not a plain relative path")
