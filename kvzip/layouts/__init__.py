"""How real files hold KV caches: one small module per producer, and detection that refuses to guess."""

from kvzip.layouts.detect import LAYOUTS, find_layout, map_cache
from kvzip.layouts.maps import CacheMap
from kvzip.layouts.restrict import Origin, Restriction, restrict, spelt
from kvzip.layouts.slabs import Role, Slab, TensorMap

__all__ = [
    "LAYOUTS",
    "CacheMap",
    "Origin",
    "Restriction",
    "Role",
    "Slab",
    "TensorMap",
    "find_layout",
    "map_cache",
    "restrict",
    "spelt",
]
