"""The safetensors header: eight bytes of length, JSON, and the rules that make it trustworthy.

Written after the format's description (https://github.com/huggingface/safetensors); the library itself is the oracle of
the tests. Stricter in three points: duplicate keys, blanks before ``{`` and entries written as arrays are refused. More
lenient in one: LMCache's spelling ``F8E4M3FN`` is known.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)

from kvzip.errors import CorruptError, UnsupportedError, UsageError
from kvzip.kinds import foreign

HEADER_CAP = 100_000_000
"""The longest JSON that the safetensors library accepts, in bytes."""

RAW_BYTES = "; of raw bytes kvzip compress and verify take the --shape"
"""What to do where a file without a header was meant."""

_U64 = 2**64


class Dtype(NamedTuple):
    """A dtype of the format: its width, and the numpy or ml_dtypes name (uint8 where numpy has none)."""

    bits: int
    numpy: str


DTYPES: dict[str, Dtype] = {
    "BOOL": Dtype(8, "bool"),
    "F4": Dtype(4, "uint8"),
    "F6_E2M3": Dtype(6, "uint8"),
    "F6_E3M2": Dtype(6, "uint8"),
    "U8": Dtype(8, "uint8"),
    "I8": Dtype(8, "int8"),
    "F8_E5M2": Dtype(8, "float8_e5m2"),
    "F8_E4M3": Dtype(8, "float8_e4m3fn"),
    "F8E4M3FN": Dtype(8, "float8_e4m3fn"),
    "F8_E8M0": Dtype(8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": Dtype(8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": Dtype(8, "float8_e5m2fnuz"),
    "I16": Dtype(16, "int16"),
    "U16": Dtype(16, "uint16"),
    "F16": Dtype(16, "float16"),
    "BF16": Dtype(16, "bfloat16"),
    "I32": Dtype(32, "int32"),
    "U32": Dtype(32, "uint32"),
    "F32": Dtype(32, "float32"),
    "C64": Dtype(64, "complex64"),
    "F64": Dtype(64, "float64"),
    "I64": Dtype(64, "int64"),
    "U64": Dtype(64, "uint64"),
}

TAGS = {dtype.numpy: tag for tag, dtype in DTYPES.items() if tag not in ("F4", "F6_E2M3", "F6_E3M2", "F8E4M3FN")}
"""The tag to write for a numpy dtype name."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as its file declares it.

    ``tag`` is the dtype as spelt in the file; ``dtype`` its numpy or ml_dtypes name. ``offset`` is where the data
    begin in file number ``file``, counted from the file's first byte. ``extra`` holds an entry's unknown keys
    (LMCache's ``fmt``).
    """

    name: str
    tag: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: int = 0
    path: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def label(self) -> str:
        """The name that tells it from every other tensor of its source: with its file's path, in a folder."""
        return f"{self.path}/{self.name}" if self.path and self.path != self.name else self.name

    def __str__(self) -> str:
        return f"{self.label} {self.tag} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source: its path relative to the folder ("" if it stands alone), the exact bytes before its data,
    and its size in bytes. An empty header means raw bytes."""

    path: str
    header: bytes = field(repr=False)
    size: int


def read_length(prefix: bytes, name: str) -> int:
    """The length of the JSON, from a file's first eight bytes."""
    if len(prefix) < 8:
        found = "is empty" if not prefix else f"has only {len(prefix)} bytes"
        raise CorruptError(f"{name}: no safetensors file, it {found}", code="safetensors-truncated")
    (length,) = struct.unpack("<Q", prefix[:8])
    if length > HEADER_CAP:
        if what := foreign(prefix, "safetensors"):
            raise UsageError(f"{name} {what}", code="not-safetensors")
        raise CorruptError(
            f"{name} is no safetensors file, or damaged: its first 8 bytes declare a header of {length} bytes "
            f"(at most {HEADER_CAP} are allowed){RAW_BYTES}",
            code="safetensors-header-length",
        )
    return int(length)


def parse_header(header: bytes, name: str, *, file: int = 0, path: str = "") -> tuple[list[TensorInfo], dict[str, str]]:
    """Tensors, in the order of their data, and ``__metadata__`` of a header (length prefix included).

    Raises ``CorruptError`` naming ``name`` and the tensor for whatever the safetensors library refuses: bad UTF-8 or
    JSON, holes, overlaps, shapes that overflow or do not fit their byte range.
    """
    length = read_length(header, name)
    if len(header) != 8 + length:
        raise CorruptError(
            f"{name}: the header should have {length} bytes, but only {len(header) - 8} are there",
            code="safetensors-truncated",
        )
    entries = _parse_json(header[8:], name)
    metadata = _metadata(entries.pop("__metadata__", None), name)
    ranged = [(*_range(key, entry, name), key, entry) for key, entry in entries.items()]
    ranged.sort(key=lambda item: item[:3])
    tensors = []
    position = 0
    for begin, end, key, entry in ranged:
        if begin != position or end < begin:
            problem = "overlaps the one before" if begin < position else "leaves a hole before it"
            problem = "ends before it begins" if end < begin else problem
            raise CorruptError(
                f"{name}: tensor {key!r} at bytes {begin}:{end} {problem} (expected to begin at {position})",
                code="safetensors-overlap" if begin < position else "safetensors-hole",
            )
        position = end
        tensors.append(_tensor(key, entry, begin, end, name, 8 + length, file, path))
    return tensors, metadata


def data_size(tensors: Sequence[TensorInfo]) -> int:
    """Bytes of data that the tensors of one header declare."""
    return sum(tensor.nbytes for tensor in tensors)


def raw_tensor(path: str, size: int, *, file: int = 0) -> TensorInfo:
    """The one tensor of a raw file: all its bytes, under its path (or ``kv``, if it stands alone)."""
    return TensorInfo(path or "kv", "U8", "uint8", (size,), 0, size, file, path)


def tensors_of(files: Sequence[SourceFile]) -> tuple[tuple[TensorInfo, ...], dict[str, str]]:
    """Tensors in (file, offset) order and metadata of some files, from their headers alone, checked against their
    sizes.

    Raises ``CorruptError``: the headers may come from a ``.kvz`` and are not trusted.
    """
    tensors: list[TensorInfo] = []
    metadata: dict[str, str] = {}
    for index, file in enumerate(files):
        if not file.header:
            tensors.append(raw_tensor(file.path, file.size, file=index))
            continue
        name = file.path or "source header"
        found, its_metadata = parse_header(file.header, name, file=index, path=file.path)
        check_size(name, len(file.header), found, file.size)
        tensors += found
        metadata = {**its_metadata, **metadata}
    return tuple(tensors), metadata


def check_size(name: str, header: int, tensors: Sequence[TensorInfo], size: int) -> None:
    """Raise ``CorruptError`` unless a file of ``size`` bytes is exactly its header and the declared data."""
    expected = header + data_size(tensors)
    if size != expected:
        truncated = size < expected
        problem = "truncated" if truncated else "longer than declared"
        raise CorruptError(
            f"{name} is {problem}: its header declares {expected} bytes in all, the file has {size}",
            code="safetensors-truncated" if truncated else "safetensors-trailing-bytes",
        )


def header_bytes(tensors: Iterable[TensorInfo], metadata: Mapping[str, str], alignment: int = 8) -> bytes:
    """A canonical header, length prefix included, for tensors whose data follow each other in the given order.

    Only ``name``, ``tag``, ``shape`` and ``nbytes`` count. The JSON is padded with blanks to a multiple of
    ``alignment``.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for tensor in tensors:
        offsets = [position, position + tensor.nbytes]
        entries[tensor.name] = {"dtype": tensor.tag, "shape": list(tensor.shape), "data_offsets": offsets}
        position += tensor.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % alignment)
    return struct.pack("<Q", len(text)) + text


def no_json(name: str) -> CorruptError:
    return CorruptError(
        f"{name}: no safetensors file: its header does not start with '{{'{RAW_BYTES}", code="safetensors-json"
    )


def _parse_json(text: bytes, name: str) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise no_json(name)
    try:
        entries: dict[str, Any] = json.loads(
            text.decode(), object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
        )
    except UnicodeError as error:
        raise CorruptError(f"{name}: the safetensors header is not UTF-8: {error}", code="safetensors-utf8") from error
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"{name}: the safetensors header is no valid JSON: {error}", code="safetensors-json"
        ) from error
    return entries


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice!r} appears twice")
    for key, value in pairs:  # json lets lone surrogates through, which no UTF-8 text can hold
        key.encode()
        if isinstance(value, str):
            value.encode()
    return result


def _integer(digits: str) -> int | float:
    return -0.0 if digits == "-0" else int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"number {digits} is out of range")
    return value


def _constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _metadata(value: Any, name: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CorruptError(f"{name}: __metadata__ must map names to strings", code="safetensors-metadata")
    return value


def _unsigned(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _U64


def _range(key: str, entry: Any, name: str) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_unsigned, offsets)):
        raise CorruptError(
            f"{name}: tensor {key!r} needs data_offsets of two whole numbers, found {offsets!r}",
            code="safetensors-entry",
        )
    return offsets[0], offsets[1]


def _tensor(
    key: str, entry: dict[str, Any], begin: int, end: int, name: str, data: int, file: int, path: str
) -> TensorInfo:
    tag, shape = entry.get("dtype"), entry.get("shape")
    if not isinstance(shape, list) or not all(map(_unsigned, shape)):
        raise CorruptError(
            f"{name}: tensor {key!r} needs a shape of whole numbers, found {shape!r}", code="safetensors-entry"
        )
    if not isinstance(tag, str):
        raise CorruptError(f"{name}: tensor {key!r} needs a dtype, found {tag!r}", code="safetensors-entry")
    if tag not in DTYPES:
        raise UnsupportedError(f"{name}: tensor {key!r} has the unknown dtype {tag!r}", code="safetensors-dtype")
    elements = 1
    for size in shape:  # as 64-bit arithmetic would: an overflow counts even if a later size is 0
        elements *= size
        if elements >= _U64:
            break
    bits = elements * DTYPES[tag].bits
    if bits >= _U64:
        raise CorruptError(f"{name}: tensor {key!r} of shape {shape} is too large", code="safetensors-overflow")
    if bits != 8 * (end - begin):
        raise CorruptError(
            f"{name}: tensor {key!r}, {tag} {shape}, needs {bits / 8:g} bytes, but its data_offsets span {end - begin}",
            code="safetensors-size",
        )
    extra = {word: value for word, value in entry.items() if word not in ("dtype", "shape", "data_offsets")}
    return TensorInfo(key, tag, DTYPES[tag].numpy, tuple(shape), data + begin, end - begin, file, path, extra)
