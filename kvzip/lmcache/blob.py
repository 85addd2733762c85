"""LMCache's CacheGen file: the pickled ``CacheGenGPUEncoderOutput``, read without running it, written as LMCache does.

It says nothing of dtype, model, bins or token range. Layout after LMCache 0.5.6,
``lmcache/storage_backend/serde/cachegen_basics.py``.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvzip.coding.range_coder import STREAM_BYTES, STREAM_TOKENS, SYMBOLS
from kvzip.errors import CorruptError
from kvzip.lmcache import pickles
from kvzip.lmcache.pickle_writing import dump
from kvzip.lmcache.pickles import Instance, Name
from kvzip.lmcache.tensors import NAMES, TensorWriter, read_tensor

_MODULE = "lmcache.storage_backend.serde.cachegen_basics"
_OUTPUT, _BYTESTREAM = Name(_MODULE, "CacheGenGPUEncoderOutput"), Name(_MODULE, "CacheGenGPUBytestream")
_NAMES = NAMES | {(name.module, name.name) for name in (_OUTPUT, _BYTESTREAM)}


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """Streams of up to 256 tokens, uint8, plane after plane, channel after channel; ``lengths``: int32 ``[2L, C]``."""

    streams: np.ndarray
    lengths: np.ndarray
    tokens: int


@dataclass(frozen=True, slots=True)
class CacheGenBlob:
    """A checked file: whatever it holds can be decoded.

    Planes are the keys of all layers, then the values. ``tables``: uint16 ``[2L, C, 33]``; ``key_maxima``,
    ``value_maxima``: ``[L, T, 1]`` in the dtype of the cache.
    """

    chunks: tuple[StreamChunk, ...]
    tables: np.ndarray
    key_maxima: np.ndarray
    value_maxima: np.ndarray
    heads: int
    head_dim: int

    @property
    def layers(self) -> int:
        return len(self.key_maxima)

    @property
    def tokens(self) -> int:
        return int(self.key_maxima.shape[1])


def read_blob(data: bytes, what: str = "the blob") -> CacheGenBlob:
    """Read an LMCache CacheGen file. Nothing in it is executed.

    Raises:
        UnsupportedError: the pickle uses an opcode or a name that no such file has use for.
        CorruptError: it is no such file, or its parts do not fit together.
    """
    stream = io.BytesIO(data)
    output = pickles.load(stream, _NAMES, what)
    if stream.tell() != len(data):
        raise CorruptError(f"{what}: {len(data) - stream.tell()} bytes follow the pickle", code="lmcache-blob")
    fields = _state(output, _OUTPUT, what)
    chunks = []
    for number, item in enumerate(_field(fields, "data_chunks", list, what)):
        where = f"{what}, chunk {number}"
        chunk = _state(item, _BYTESTREAM, where)
        chunks.append(
            StreamChunk(
                _tensor(chunk, "bytestream", (np.uint8,), 1, where),
                _tensor(chunk, "bytestream_lengths", (np.int32,), 2, where),
                _field(chunk, "ntokens", int, where),
            )
        )
    floats = ("bfloat16", "float16", "float32")
    blob = CacheGenBlob(
        tuple(chunks),
        _tensor(fields, "cdf", (np.int16,), 3, what).view(np.uint16),
        _tensor(fields, "max_tensors_key", floats, 3, what),
        _tensor(fields, "max_tensors_value", floats, 3, what),
        _field(fields, "num_heads", int, what),
        _field(fields, "head_size", int, what),
    )
    _check(blob, what)
    return blob


def write_blob(blob: CacheGenBlob, keys: Iterable[str] | None = None) -> bytes:
    """The file that LMCache 0.5.6 loads, byte for byte its own if ``keys`` name the storages as torch did."""
    tensor = TensorWriter(map(str, itertools.count()) if keys is None else iter(keys))
    chunks = [
        Instance(
            _BYTESTREAM,
            {
                "bytestream": tensor(chunk.streams),
                "bytestream_lengths": tensor(chunk.lengths),
                "ntokens": chunk.tokens,
            },
        )
        for chunk in blob.chunks
    ]
    state = {
        "data_chunks": chunks,
        "cdf": tensor(blob.tables.view(np.int16)),
        "max_tensors_key": tensor(blob.key_maxima),
        "max_tensors_value": tensor(blob.value_maxima),
        "num_heads": blob.heads,
        "head_size": blob.head_dim,
    }
    return dump(Instance(_OUTPUT, state), 4)


def _state(value: Any, kind: Name, what: str) -> dict[str, Any]:
    if not isinstance(value, Instance) or str(value.kind) != str(kind):
        raise CorruptError(f"{what} is no {kind.name}", code="lmcache-blob")
    return value.state


def _field(fields: dict[str, Any], name: str, kind: type, what: str) -> Any:
    value = fields.get(name)
    if type(value) is not kind:
        raise CorruptError(f"{what}: {name} should be of type {kind.__name__}", code="lmcache-blob")
    return value


def _tensor(fields: dict[str, Any], name: str, dtypes: Iterable[Any], axes: int, what: str) -> np.ndarray:
    array = read_tensor(fields.get(name), f"{what}: {name}")
    if array.dtype not in [np.dtype(dtype) for dtype in dtypes] or array.ndim != axes or not array.size:
        raise CorruptError(f"{what}: {name} is {array.dtype}{list(array.shape)}", code="lmcache-blob")
    return array


def _check(blob: CacheGenBlob, what: str) -> None:
    """Raises ``CorruptError`` unless all parts fit together."""
    layers, tokens, _ = blob.key_maxima.shape
    channels = blob.tables.shape[1]
    wrong = None
    if blob.key_maxima.shape != (layers, tokens, 1) or blob.value_maxima.shape != (layers, tokens, 1):
        wrong = f"max tensors of shapes {blob.key_maxima.shape} and {blob.value_maxima.shape}"
    elif blob.key_maxima.dtype != blob.value_maxima.dtype:
        wrong = f"max tensors of {blob.key_maxima.dtype} and {blob.value_maxima.dtype}"
    elif blob.tables.shape != (2 * layers, channels, SYMBOLS + 1):
        wrong = f"tables of shape {blob.tables.shape} for {layers} layers"
    elif blob.heads < 1 or blob.head_dim < 1 or blob.heads * blob.head_dim != channels:
        wrong = f"{blob.heads} heads of {blob.head_dim} for {channels} channels"
    elif sum(chunk.tokens for chunk in blob.chunks) != tokens:
        wrong = f"chunks of {[chunk.tokens for chunk in blob.chunks][:8]} tokens for {tokens}"
    elif not all(0 < chunk.tokens <= STREAM_TOKENS for chunk in blob.chunks):
        wrong = f"a chunk of more than {STREAM_TOKENS} tokens or none"
    if wrong:
        raise CorruptError(f"{what}: {wrong}", code="lmcache-blob")
    # The coder takes the last entry of a table for 65536, whatever it is.
    if blob.tables[..., 0].any() or (np.diff(blob.tables[..., :-1].astype(np.int32)) < 1).any():
        raise CorruptError(f"{what}: a table does not rise from 0", code="lmcache-table")
    for number, chunk in enumerate(blob.chunks):
        # Every stream has a byte at least, which also keeps small files from announcing large caches.
        fit = chunk.lengths.shape == (2 * layers, channels) and chunk.lengths.min() > 0
        if not fit or chunk.lengths.max() > STREAM_BYTES or chunk.lengths.sum(dtype=np.int64) != len(chunk.streams):
            raise CorruptError(
                f"{what}, chunk {number}: the lengths of the streams do not add up to {len(chunk.streams)} bytes",
                code="lmcache-lengths",
            )
