"""``.kvz`` files behind the interface of LMCache's serializers: smaller, checksummed, and they tell their own shape."""

from __future__ import annotations

from typing import Any

from kvzip import api
from kvzip.codecs.base import Codec
from kvzip.devices.base import Device
from kvzip.errors import CorruptError
from kvzip.lmcache.convert import TENSOR
from kvzip.serde.base import Deserializer, Serializer, as_cache, like_dtype, numpy_dtype


class KvzipSerializer(Serializer):
    """Writes ``.kvz`` files of one chunk.

    Args:
        codec: as for :func:`kvzip.compress`. By default CacheGen without exact first tokens: most chunks are from the
            middle of a prompt.
        device: where the kernels run.
    """

    def __init__(self, codec: str | Codec = "cachegen:sinks=0", *, device: str | Device = "cpu") -> None:
        self._codec = codec
        self._device = device

    def to_bytes(self, t: Any) -> bytes:
        return api.compress({TENSOR: as_cache(t)}, codec=self._codec, layout="lmcache-blob", device=self._device)


class KvzipDeserializer(Deserializer):
    """Reads them; ``dtype`` as for :class:`kvzip.serde.Deserializer`."""

    def __init__(self, dtype: Any = None, *, device: str | Device = "cpu") -> None:
        super().__init__(dtype)
        self._device = device

    def from_bytes(self, bs: bytes) -> Any:
        tensors = api.decompress(bytes(bs), device=self._device)
        if TENSOR not in tensors:
            raise CorruptError(
                f"the file holds {', '.join(tensors) or 'no tensor'}, not a chunk that KvzipSerializer wrote",
                code="serde-tensor",
            )
        kv, dtype = tensors[TENSOR], numpy_dtype(self.dtype)
        return like_dtype(kv if dtype is None or kv.dtype == dtype else kv.astype(dtype), self.dtype)
