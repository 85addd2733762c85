"""kvtc: transform coding of KV caches. See docs/kvtc.md."""

from kvzip.codecs.kvtc.codec import KvTc

__all__ = ["KvTc"]
