"""LMCache's CacheGen file: a pickle of one dataclass, read without running it and written without LMCache or torch.

Source: the pickle protocol (PEP 3154, ``pickletools``) and torch's legacy serialization, as LMCache 0.5.6 writes them.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

BASICS = "lmcache.storage_backend.serde.cachegen_basics"
GLOBALS = {
    (BASICS, "CacheGenGPUEncoderOutput"),
    (BASICS, "CacheGenGPUBytestream"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("collections", "OrderedDict"),
}
STORAGES = {
    "ByteStorage": np.uint8,
    "ShortStorage": np.int16,
    "IntStorage": np.int32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "FloatStorage": np.float32,
}
LEGACY_MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001


@dataclass
class Blob:
    """What a file holds.

    ``chunks`` as ``cachegen.decode_streams`` takes them, ``cdf`` uint16 ``[2L, C, 33]``, max tensors ``[L, T, 1]`` in
    the dtype of the cache. ``storage_keys`` are the arbitrary names that torch gave the tensors, in file order.
    """

    chunks: list[tuple[bytes, np.ndarray, int]]
    cdf: np.ndarray
    max_tensors_key: np.ndarray
    max_tensors_value: np.ndarray
    num_heads: int
    head_size: int
    storage_keys: tuple[str, ...] = ()


def _walk(operations: Iterator[tuple[Any, Any, Any]]) -> Any:
    """Evaluate the few opcodes such a file needs; calls and classes become tuples, never objects.

    ``("global", module, name)``, ``("call", function, arguments)`` and ``("object", class, state)``.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        at = marks.pop()
        items = stack[at:]
        del stack[at:]
        return items

    for operation, argument, _ in operations:
        match operation.name:
            case "PROTO" | "FRAME":
                pass
            case (
                "SHORT_BINUNICODE"
                | "BINUNICODE"
                | "BININT"
                | "BININT1"
                | "BININT2"
                | "LONG1"
                | "BINBYTES"
                | "SHORT_BINBYTES"
            ):
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE" | "NONE":
                stack.append({"NEWTRUE": True, "NEWFALSE": False, "NONE": None}[operation.name])
            case "EMPTY_TUPLE" | "EMPTY_LIST" | "EMPTY_DICT":
                stack.append({"EMPTY_TUPLE": (), "EMPTY_LIST": [], "EMPTY_DICT": {}}[operation.name])
            case "MARK":
                marks.append(len(stack))
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(operation.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items = since_mark()
                stack[-1].extend(items)
            case "SETITEMS":
                items = since_mark()
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "GLOBAL" | "STACK_GLOBAL":
                where = tuple(argument.split(" ")) if argument else (stack.pop(-2), stack.pop())
                if where not in GLOBALS and where not in {("torch", name) for name in STORAGES}:
                    raise ValueError(f"the pickle asks for {'.'.join(where)}")
                stack.append(("global", *where))
            case "NEWOBJ":
                stack[-2:] = [("object", stack[-2][2], {})]
            case "BUILD":
                state = stack.pop()
                stack[-1][2].update(state)
            case "REDUCE":
                stack[-2:] = [("call", stack[-2][2], stack[-1])]
            case "BINPERSID":
                stack[-1] = ("persistent", stack[-1])
            case "STOP":
                return stack.pop()
            case name:
                raise ValueError(f"the pickle uses {name}")
    raise ValueError("the pickle has no end")


def _read_storage(data: bytes) -> tuple[str, np.ndarray]:
    """The key and the elements of one legacy ``torch.save`` of a storage."""
    stream = io.BytesIO(data)
    magic, version, _, (_, persistent), _ = (_walk(pickletools.genops(stream)) for _ in range(5))
    if (magic, version) != (LEGACY_MAGIC, LEGACY_VERSION):
        raise ValueError("not a legacy torch file")
    _, storage, key, _, count, _ = persistent
    elements = np.frombuffer(stream.read()[8:], STORAGES[storage[2]])
    if len(elements) != count:
        raise ValueError(f"storage {key} holds {len(elements)} elements, not {count}")
    return key, elements


def read(data: bytes) -> Blob:
    """Read an LMCache CacheGen file. Raises ``ValueError`` on any opcode or global that such a file has no use for."""
    keys: list[str] = []

    def tensor(call: Any) -> np.ndarray:
        _, _, ((_, _, (legacy,)), offset, size, stride, _, _) = call
        key, elements = _read_storage(legacy)
        keys.append(key)
        strides = [step * elements.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(elements[offset:], size, strides).copy()

    _, _, fields = _walk(pickletools.genops(data))
    chunks = [
        (tensor(chunk["bytestream"]).tobytes(), tensor(chunk["bytestream_lengths"]), chunk["ntokens"])
        for _, _, chunk in fields["data_chunks"]
    ]
    return Blob(
        chunks,
        tensor(fields["cdf"]).view(np.uint16),
        tensor(fields["max_tensors_key"]),
        tensor(fields["max_tensors_value"]),
        fields["num_heads"],
        fields["head_size"],
        tuple(keys),
    )


class _Global:
    """A name in a module that need not exist here."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class _Object:
    """An instance of a class that need not exist here."""

    def __init__(self, kind: _Global, **state: Any) -> None:
        self.kind, self.state = kind, state


class _Call:
    """A call that the reader of the pickle makes."""

    def __init__(self, function: _Global, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments


class _Persistent(tuple):
    """An object that torch refers to by a tuple."""


class _Pickler(pickle._Pickler):
    """The standard pickler, taught to write names, objects and calls that do not exist here."""

    def persistent_id(self, obj: Any) -> Any:
        return tuple(obj) if isinstance(obj, _Persistent) else None

    def _save_global(self, obj: _Global) -> None:
        if self.proto >= 4:
            self.save(obj.module)
            self.save(obj.name)
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        self.memoize(obj)

    def _save_object(self, obj: _Object) -> None:
        self.save(obj.kind)
        self.save(())
        self.write(pickle.NEWOBJ)
        self.memoize(obj)
        self.save(obj.state)
        self.write(pickle.BUILD)

    def _save_call(self, obj: _Call) -> None:
        self.save(obj.function)
        self.save(obj.arguments)
        self.write(pickle.REDUCE)
        self.memoize(obj)

    dispatch = pickle._Pickler.dispatch | {_Global: _save_global, _Object: _save_object, _Call: _save_call}


def _pickle(obj: Any, protocol: int) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol).dump(obj)
    return out.getvalue()


def _write_storage(array: np.ndarray, key: str) -> bytes:
    """The bytes of a legacy ``torch.save`` of a CPU storage that holds ``array``."""
    name = next(name for name, dtype in STORAGES.items() if array.dtype == dtype)
    machine = {
        "protocol_version": LEGACY_VERSION,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    storage = _Persistent(("storage", _Global("torch", name), key, "cpu", array.size, None))
    parts = [_pickle(part, 2) for part in (LEGACY_MAGIC, LEGACY_VERSION, machine, storage, [key])]
    return b"".join(parts) + struct.pack("<q", array.size) + array.tobytes()


def write(blob: Blob) -> bytes:
    """The file LMCache would write, byte for byte if ``blob.storage_keys`` are the ones it chose."""
    output, bytestream = (_Global(BASICS, f"CacheGenGPU{name}") for name in ("EncoderOutput", "Bytestream"))
    rebuild, load = _Global("torch._utils", "_rebuild_tensor_v2"), _Global("torch.storage", "_load_from_bytes")
    keys = iter(blob.storage_keys or map(str, range(4 + 2 * len(blob.chunks))))

    def tensor(array: np.ndarray) -> _Call:
        stride = tuple(step // array.itemsize for step in np.ascontiguousarray(array).strides)
        storage = _Call(load, _write_storage(array, next(keys)))
        return _Call(rebuild, storage, 0, array.shape, stride, False, OrderedDict())

    chunks = [
        _Object(
            bytestream,
            bytestream=tensor(np.frombuffer(payload, np.uint8)),
            bytestream_lengths=tensor(lengths),
            ntokens=tokens,
        )
        for payload, lengths, tokens in blob.chunks
    ]
    return _pickle(
        _Object(
            output,
            data_chunks=chunks,
            cdf=tensor(blob.cdf.view(np.int16)),
            max_tensors_key=tensor(blob.max_tensors_key),
            max_tensors_value=tensor(blob.max_tensors_value),
            num_heads=blob.num_heads,
            head_size=blob.head_size,
        ),
        4,
    )
