"""LMCache's serde package, by the same names: code written for it ports by changing its import.

    from kvzip.serde import CreateSerde
    serializer, deserializer = CreateSerde("cachegen", config, metadata)
    data = serializer.to_bytes(kv)          # [layers, 2, tokens, heads, head_size], torch or numpy
    kv = deserializer.from_bytes(data)

``cachegen`` writes and reads LMCache 0.5.6's own blobs, bit for bit, without running what they say; ``kvzip`` holds the
same numbers in ``.kvz`` files, smaller by a third or more. torch is needed only by those who pass its tensors or ask
for them.
"""

from __future__ import annotations

from typing import Any

from kvzip.serde.base import Deserializer, Serializer
from kvzip.serde.cachegen import CacheGenDeserializer, CacheGenSerializer
from kvzip.serde.config import CacheGenConfig, QuantizationSpec, UnknownModelError, UnknownSerdeError
from kvzip.serde.kvz import KvzipDeserializer, KvzipSerializer

__all__ = [
    "CacheGenConfig",
    "CacheGenDeserializer",
    "CacheGenSerializer",
    "CreateSerde",
    "Deserializer",
    "KvzipDeserializer",
    "KvzipSerializer",
    "QuantizationSpec",
    "Serializer",
    "UnknownModelError",
    "UnknownSerdeError",
]


def CreateSerde(  # noqa: N802  (LMCache's name)
    serde_type: str, config: Any = None, metadata: Any = None
) -> tuple[Serializer, Deserializer]:
    """The two ends of ``"cachegen"`` or ``"kvzip"``.

    Args:
        config, metadata: LMCache's objects, in either order (LMCache has changed it): of them only
            ``metadata.model_name`` and, if it is there, ``metadata.kv_dtype`` are looked at. Or a
            :class:`CacheGenConfig` alone.

    Raises:
        UnknownSerdeError: another type; a ``UsageError`` and, as in LMCache, a ``ValueError``.
        UnknownModelError: a model of unknown layer count.
    """
    if hasattr(config, "model_name"):
        config, metadata = metadata, config
    dtype = getattr(metadata, "kv_dtype", None)
    match serde_type:
        case "cachegen":
            return CacheGenSerializer(config, metadata), CacheGenDeserializer(config, metadata, dtype)
        case "kvzip":
            return KvzipSerializer(), KvzipDeserializer(dtype)
    raise UnknownSerdeError(f"invalid serde type {serde_type!r}: expected cachegen or kvzip", code="serde-type")
