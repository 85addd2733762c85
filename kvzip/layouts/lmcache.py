"""LMCache: the classic blob and 0.1 disk chunks, and the memory formats of v1 with its GDS files.

Memory formats: LMCache, ``lmcache/v1/memory_management.py``; GDS files write the format's number as ``fmt``.
"""

from __future__ import annotations

from collections import Counter

from kvzip.layouts.declare import Layout
from kvzip.layouts.paged import BLOCKS_FIRST
from kvzip.layouts.slabs import misfit
from kvzip.tensorfile import TensorInfo, TensorSource

BLOB = Layout.of("lmcache-blob", "LMCache's classic blob and its 0.1 disk chunks", "L,kv,T,H,D")
BLOB_HEADS_FIRST = Layout.of("blob-heads-first", "the blob with heads before tokens", "L,kv,H,T,D")
KV_FIRST = Layout.of("kv-first", "keys of all layers, then values", "kv,L,T,H,D")
KV_2LTD = Layout.of("lmcache-2ltd", "LMCache v1: all keys, then all values", "kv,L,T,C")
FUSED = Layout.of("lmcache-fused", "LMCache v1 with kv_size 1: keys and values side by side", "1,L,T,2C")
MLA = Layout.of("lmcache-mla", "LMCache v1, MLA latents of all layers", "1,L,T,A")
KV_2TD = Layout.of("lmcache-2td", "LMCache v1, one layer a tensor: keys, then values", "kv,T,C")
KV_T2D = Layout.of("lmcache-t2d", "LMCache v1, one layer a tensor: key and value of each token", "T,kv,C")
LAYOUTS = (BLOB, BLOB_HEADS_FIRST, KV_FIRST, KV_2LTD, FUSED, MLA, KV_2TD, KV_T2D)

_FORMATS = {1: KV_2LTD, 2: KV_T2D, 3: KV_2TD, 6: MLA}
_V1_NAME = "kvcache"
_BLOB_NAMES = ("kv_chunk",)


def detect(source: TensorSource) -> list[Layout]:
    by_fmt = {_FORMATS[number].name: _FORMATS[number] for number in _formats(source) if number in _FORMATS}
    fitting = [layout for layout in by_fmt.values() if layout.fitting(source)]
    return fitting or _detect_v1(source) or _detect_blob(source)


def _formats(source: TensorSource) -> list[int]:
    return [number for tensor in source.tensors if type(number := tensor.extra.get("fmt")) is int]


def _detect_v1(source: TensorSource) -> list[Layout]:
    """By LMCache's own tensor name; which layouts fit is a matter of the shape, and may leave a doubt."""
    named = [tensor for tensor in source.tensors if tensor.name == _V1_NAME]
    layouts = (KV_2LTD, FUSED, MLA, KV_2TD, KV_T2D)
    return [layout for layout in layouts if named and all(_fits(layout, tensor) for tensor in named)]


def _detect_blob(source: TensorSource) -> list[Layout]:
    blobs = [tensor for tensor, _ in BLOB.fitting(source)]
    if not blobs:
        return []
    fits = [BLOB]
    if all(tensor.name in _BLOB_NAMES for tensor in blobs):
        return fits
    if max(Counter(tensor.file for tensor in blobs).values()) > 1 or any("layer" in tensor.label for tensor in blobs):
        fits.append(BLOCKS_FIRST)  # a tensor a layer: the first axis is hardly that of the layers
    if any(_fits(KV_FIRST, tensor) for tensor in blobs):
        fits.append(KV_FIRST)
    if any(tensor.shape[3] > max(32, tensor.shape[2]) and tensor.shape[2] > 1 for tensor in blobs):
        fits.append(BLOB_HEADS_FIRST)
    return fits


def _fits(layout: Layout, tensor: TensorInfo) -> bool:
    return not misfit(tensor, layout.clauses[0].axes)
