"""What a ``.kvz`` tells about itself from its header, index and statistics: nothing here decodes a block."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from kvzip.cache import Plane
from kvzip.container import MAGIC, Entry, Header, Reader, StreamReader, Totals
from kvzip.container import format as fmt
from kvzip.container.frames import MAX_HEAD, TABLE_AT, parse_data_head
from kvzip.errors import CorruptError, UsageError
from kvzip.kinds import foreign

SCHEMA = "kvzip-inspect/1"
"""Names the JSON's shape; the number rises when a key changes its meaning or goes away."""

SECTIONS = {
    "CNTS": "symbol counts",
    "CODE": "smallest steps",
    "COLS": "column parameters",
    "DATA": "numbers",
    "ESCP": "escaped exponents",
    "EXCT": "exact tokens",
    "FREQ": "byte frequencies",
    "HEAD": "exponent windows and tables",
    "LENS": "stream lengths",
    "MANT": "mantissas",
    "MASK": "masks of exact tokens",
    "MAXT": "max tensors",
    "MINS": "smallest values",
    "NORM": "norms",
    "OWNT": "table indexes of channels",
    "RAWB": "raw low bits",
    "REF1": "refinements to quality level 1",
    "REF2": "refinements to quality level 2",
    "ROWS": "exact tokens",
    "SCAL": "scales",
    "SPRD": "steps above the smallest",
    "STAT": "stream lengths and states",
    "STRM": "coded symbols",
    "TABL": "table indexes",
    "TOKN": "max tensors or token scales, exact masks",
    "WORD": "packed codes",
}
"""What is in a section, by its tag; no two codecs give one tag two meanings."""

MAX_TENSORS = ("CODE", "MAXT", "NORM", "SCAL", "SPRD", "TOKN")
"""The sections that hold max tensors or scales."""


@dataclass(frozen=True)
class PlaneError:
    """The recorded error of a plane: ``|x - y| / |x|``, and the largest ``|x - y|``; None if not finite."""

    plane: Plane
    relative: float | None
    max_abs: float | None

    @property
    def rank(self) -> float:
        """For comparing: what is not finite is worst."""
        return float("inf") if self.relative is None else self.relative


@dataclass(frozen=True)
class Inspection:
    """One member of a file. From a pipe only ``header`` is known: ``reader`` is None."""

    header: Header
    reader: Reader | None = None
    number: int = 0

    @property
    def planes(self) -> list[Plane]:
        """The planes that are keys, values or latents."""
        return [plane for plane in self.header.planes if plane.kind != "bytes"]

    @property
    def layer_count(self) -> int:
        return len({plane.layer for plane in self.planes})

    @property
    def elements(self) -> int:
        """Numbers in keys, values and latents."""
        return sum(plane.tokens * plane.channels for plane in self.planes)

    @property
    def original_bytes(self) -> int:
        """Bytes of the source files: their headers and tensors."""
        return sum(plane.nbytes for plane in self.header.planes) + sum(len(text) for _, text in self.header.files)

    @property
    def stored_bytes(self) -> int | None:
        return self.reader.members[self.number].length if self.reader else None

    @property
    def offset(self) -> int | None:
        return self.reader.members[self.number].offset if self.reader else None

    @property
    def ratio(self) -> float | None:
        return self.original_bytes / self.stored_bytes if self.stored_bytes else None

    @property
    def bits_per_element(self) -> float | None:
        """All bytes of the member, over the numbers in keys, values and latents."""
        return 8 * self.stored_bytes / self.elements if self.stored_bytes and self.elements else None

    @property
    def layout(self) -> str:
        return str(self.header.map.get("layout", "unknown"))

    def codecs(self) -> list[dict[str, Any]]:
        """Name and configuration of each codec that keys and values were given to."""
        used = dict.fromkeys(self.header.plane_codec[plane.index] for plane in self.planes)
        return [self.header.codecs[number] for number in used]

    @property
    def profile_hash(self) -> str | None:
        """Of the profile that the member carries."""
        return self.reader.profile.hash if self.reader and self.reader.profile else None

    def channel_specs(self) -> dict[str, list[tuple[list[int], dict[str, Any]]]]:
        """By kind: runs of layers and the spec that they share, in the order of their first layers."""
        found: dict[str, dict[str, tuple[list[int], dict[str, Any]]]] = {}
        for plane in sorted(self.planes, key=lambda plane: plane.layer):
            spec = self.header.specs[plane.index]
            layers, _ = found.setdefault(plane.kind, {}).setdefault(json.dumps(spec, sort_keys=True), ([], spec))
            if plane.layer not in layers[-1:]:
                layers.append(plane.layer)
        return {kind: list(runs.values()) for kind, runs in found.items()}

    def components(self) -> list[tuple[str, int]]:
        """What the bytes are spent on, with names for people; adds up to the member."""
        if self.reader is None:
            return []
        totals = self.reader.totals
        sections = [(f"{SECTIONS.get(tag, 'section')} ({tag})", count) for tag, count in totals.sections.items()]
        return [
            ("header", totals.header),
            ("index", totals.index),
            ("statistics", totals.statistics),
            *([("profile", totals.profile)] if totals.profile else []),
            ("framing, checksums", totals.framing),
            *sections,
        ]

    def errors(self) -> list[PlaneError]:
        """The recorded errors of lossy planes; empty where none are recorded or can be told."""
        statistics = (self.reader.statistics if self.reader else None) or {}
        relative, largest = (statistics.get(key) for key in ("relative_error", "max_abs"))
        planes = self.header.planes
        if not all(isinstance(column, list) and len(column) == len(planes) for column in (relative, largest)):
            return []
        return [
            PlaneError(plane, *map(_number, pair))
            for plane, *pair in zip(planes, relative, largest, strict=True)  # type: ignore[arg-type]
            if plane.kind != "bytes" and any(_is_number(value) or value == fmt.INFINITE for value in pair)
        ]

    def sections_of(self, entry: Entry) -> dict[str, tuple[int, int]]:
        """Offset (from the member's start) and length of each section of a block, from the head of its frame."""
        assert self.reader is not None
        data = self.reader.source.read(self.reader.base + entry.offset, min(entry.length, fmt.FRAME.size + MAX_HEAD))
        size = fmt.parse_frame(data, 0, entry.offset)
        if size.kind != b"DATA" or size.total != entry.length:
            raise CorruptError(f"the frame at byte {entry.offset} is not the one in the index", code="kvz-index")
        head = parse_data_head(data, 0, size, self.header, None)
        at = entry.offset + TABLE_AT + 8 * len(head.tags)
        places: dict[str, tuple[int, int]] = {}
        for tag, length in zip(head.tags, head.lengths, strict=True):
            places[fmt.section_tag(tag)] = (at, length)
            at += fmt.padded(length)
        return places

    def to_json(self, sections: bool = False) -> dict[str, Any]:
        """Everything as JSON values; with ``sections`` also where each section of each block lies."""
        totals = self.reader.totals if self.reader else Totals()
        errors = {error.plane.index: error for error in self.errors()}
        return {
            "offset": self.offset,
            "bytes": self.stored_bytes,
            "original_bytes": self.original_bytes,
            "ratio": self.ratio,
            "bits_per_element": self.bits_per_element,
            "producer": self.header.producer,
            "layout": self.layout,
            "identity": self.header.identity,
            "files": [path for path, _ in self.header.files],
            "layer_count": self.layer_count,
            "block_tokens": self.header.block_tokens,
            "codecs": self.header.codecs,
            "profile": self.profile_hash,
            "channel_specs": {
                kind: [{"layers": layers, **spec} for layers, spec in runs]
                for kind, runs in self.channel_specs().items()
            },
            "max_tensors": {tag: count for tag, count in totals.sections.items() if tag in MAX_TENSORS},
            "chunk_offsets": [self._chunk(entry, sections) for entry in self.reader.index] if self.reader else None,
            "bytes_per_component": {
                "header": totals.header,
                "index": totals.index,
                "statistics": totals.statistics,
                "profile": totals.profile,
                "framing": totals.framing,
                "sections": totals.sections,
            }
            if self.reader
            else None,
            "planes": [self._plane(plane, errors.get(plane.index)) for plane in self.header.planes],
        }

    def _chunk(self, entry: Entry, sections: bool) -> dict[str, Any]:
        return {
            "planes": [plane.index for plane in entry.block.planes],
            "start": entry.block.start,
            "stop": entry.block.stop,
            "offset": entry.offset,
            "length": entry.length,
            "checksum": f"{entry.checksum:016x}",
            "codec": entry.codec,
            **({"sections": self.sections_of(entry)} if sections else {}),
        }

    def _plane(self, plane: Plane, error: PlaneError | None) -> dict[str, Any]:
        return {
            "layer": plane.layer,
            "kind": plane.kind,
            "sequence": plane.sequence,
            "tokens": plane.tokens,
            "heads": plane.heads,
            "head_dim": plane.head_dim,
            "dtype": plane.dtype,
            "codec": self.header.plane_codec[plane.index],
            "spec": self.header.specs[plane.index],
            **({"relative_error": error.relative, "max_abs": error.max_abs} if error else {}),
        }


def members_of(file: BinaryIO, name: str) -> Iterator[Inspection]:
    """The members of an open ``.kvz`` file; of a pipe the first, of which only the header is read."""
    if not file.seekable():
        yield Inspection(StreamReader(file, name).header)
        return
    first = Reader.open(file)
    for number in range(len(first.members)):
        reader = first.member(number) if number else first
        yield Inspection(reader.header, reader, number)


def is_kvz(file: io.BufferedReader, name: str) -> bool:
    """Whether an open file is meant to be a ``.kvz`` (else safetensors), by its first bytes. Takes nothing from a pipe.

    Raises ``UsageError`` for a file of another kind, ``CorruptError`` for what is not known.
    """
    start = file.peek(16)[:16]
    if start[1:4] == MAGIC[1:4] or name.endswith(".kvz"):
        return True
    # A pipe may have brought little yet; an empty file is not even JSON.
    if start[8:9] == b"{" or 0 < len(start) < 9 or name.endswith(".safetensors"):
        return False
    if what := foreign(start):
        raise UsageError(f"{name} {what}", code="unknown-format")
    raise CorruptError(
        f"{name}: {f'it starts with {start!r}' if start else 'it is empty'}; expected a .kvz or safetensors file",
        code="unknown-format",
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    """As a finite float, or None; the value comes from a file."""
    try:
        number = float(value) if _is_number(value) else math.inf
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
