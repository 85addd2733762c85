"""kvzip: zstd for KV caches.

report = kvzip.compress("kv.safetensors", "kv.safetensors.kvz")
tensors = kvzip.decompress("kv.safetensors.kvz", tokens=slice(0, 1024))
with kvzip.open("kv.safetensors.kvz") as cache:
    keys = cache.key(layer=3)
"""

from __future__ import annotations

from kvzip._version import __version__

TYPE_CHECKING = False  # here is what every start of the command loads first
if TYPE_CHECKING:
    from typing import Any

    from kvzip.api import Cache, compress, decompress, open
    from kvzip.codecs import available_codecs, get_codec, register_codec
    from kvzip.codecs.base import Codec
    from kvzip.errors import KvzipError
    from kvzip.pipeline import Report

__all__ = [
    "Cache",
    "Codec",
    "KvzipError",
    "Report",
    "__version__",
    "available_codecs",
    "compress",
    "decompress",
    "get_codec",
    "open",
    "register_codec",
]

_HOMES = {
    "Cache": "kvzip.api",
    "Codec": "kvzip.codecs.base",
    "KvzipError": "kvzip.errors",
    "Report": "kvzip.pipeline",
    "available_codecs": "kvzip.codecs",
    "compress": "kvzip.api",
    "decompress": "kvzip.api",
    "get_codec": "kvzip.codecs",
    "open": "kvzip.api",
    "register_codec": "kvzip.codecs",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are used: ``kvzip --version`` needs none of them, nor numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvzip' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
