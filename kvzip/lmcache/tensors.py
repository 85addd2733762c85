"""torch tensors inside a pickle, without torch: the legacy format of ``torch.save``.

A tensor is the call ``torch._utils._rebuild_tensor_v2(storage, offset, size, stride, False, OrderedDict())``, a storage
the call ``torch.storage._load_from_bytes(data)``. The data are five pickles of protocol 2 (magic number, version,
machine, a reference ``("storage", type, key, device, elements, None)``, list of keys), the number of elements, the
elements.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from kvzip.errors import CorruptError, UnsupportedError
from kvzip.lmcache import pickles
from kvzip.lmcache.pickle_writing import dump
from kvzip.lmcache.pickles import Call, Name, Reference

REBUILD = Name("torch._utils", "_rebuild_tensor_v2")
LOAD = Name("torch.storage", "_load_from_bytes")
ORDERED_DICT = Name("collections", "OrderedDict")
NAMES = {(name.module, name.name) for name in (REBUILD, LOAD, ORDERED_DICT)}
"""What a pickle with tensors asks for."""

STORAGES: dict[str, Any] = {
    "ByteStorage": np.uint8,
    "ShortStorage": np.int16,
    "IntStorage": np.int32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "FloatStorage": np.float32,
}
_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_MACHINE = {
    "protocol_version": _VERSION,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}


def read_tensor(value: Any, what: str) -> np.ndarray:
    """The tensor that ``value`` (from :func:`kvzip.lmcache.pickles.load`) describes, as an array of its own.

    Raises ``CorruptError`` if it is none, or reaches beyond its storage.
    """
    match value:
        case Call(
            function=Name(name="_rebuild_tensor_v2"),
            arguments=(
                Call(function=Name(name="_load_from_bytes"), arguments=(bytes() as data,)),
                int() as offset,
                tuple() as size,
                tuple() as stride,
                *_,
            ),
        ):
            storage = _read_storage(data, what)
        case _:
            raise CorruptError(f"{what} is no tensor", code="lmcache-blob")
    numbers = (offset, *size, *stride)
    if len(size) != len(stride) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise CorruptError(f"{what} has the shape {size} and the strides {stride}", code="lmcache-blob")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if prod(size) else -1
    # No more elements than the storage has: a stride of 0 must not blow up a small file.
    if last >= len(storage) or prod(size) > len(storage):
        raise CorruptError(
            f"{what} has the shape {size}, but its storage has {len(storage)} elements", code="lmcache-blob"
        )
    strides = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, strides, writeable=False).copy()


def _read_storage(data: bytes, what: str) -> np.ndarray:
    stream = io.BytesIO(data)
    names = {("torch", name) for name in STORAGES}
    magic, version, machine, reference, _ = (pickles.load(stream, names, what) for _ in range(5))
    if (magic, version) != (_MAGIC, _VERSION):
        raise CorruptError(f"{what} is not in torch's legacy format", code="lmcache-blob")
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise UnsupportedError(f"{what} was written by a big-endian machine", code="big-endian")
    match reference:
        case Reference(key=("storage", Name() as kind, str(), str(), int() as count, None)):
            dtype = np.dtype(STORAGES[kind.name])
        case _:
            raise CorruptError(f"{what} has no storage of its own", code="lmcache-blob")
    start = stream.tell() + 8
    if len(data) != start + count * dtype.itemsize or data[start - 8 : start] != struct.pack("<q", count):
        raise CorruptError(
            f"{what} has {len(data) - start} bytes, expected {count} elements of {dtype.itemsize}", code="lmcache-blob"
        )
    return np.frombuffer(data, dtype, count, start)


@dataclass(frozen=True)
class TensorWriter:
    """Turns arrays into the records of tensors; ``keys`` name their storages, as torch does by their addresses."""

    keys: Iterator[str]

    def __call__(self, array: np.ndarray) -> Call:
        array = np.ascontiguousarray(array)
        stride = tuple(step // array.itemsize for step in array.strides)
        storage = Call(LOAD, (_write_storage(array, next(self.keys)),))
        return Call(REBUILD, (storage, 0, array.shape, stride, False, Call(ORDERED_DICT, ())))


def _write_storage(array: np.ndarray, key: str) -> bytes:
    kind = next(name for name, dtype in STORAGES.items() if array.dtype == dtype)
    reference = Reference(("storage", Name("torch", kind), key, "cpu", array.size, None))
    parts = [dump(part, 2) for part in (_MAGIC, _VERSION, _MACHINE, reference, [key])]
    return b"".join([*parts, struct.pack("<q", array.size), array.tobytes()])
