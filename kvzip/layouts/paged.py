"""Paged caches dumped raw, and page files: never detected, because their shapes alone do not tell them from others."""

from __future__ import annotations

from kvzip.layouts.declare import Layout
from kvzip.tensorfile import TensorSource

BLOCKS_FIRST = Layout.of("paged-blocks-first", "vLLM, FlashInfer: keys and values of each block", "N,kv,b,H,D")
LAYOUTS = (
    Layout.of("paged", "vLLM, FlashAttention: all key blocks, then all value blocks", "kv,N,b,H,D"),
    BLOCKS_FIRST,
    Layout.of("paged-heads-first", "vLLM: heads of each block, key and value fused", "N,H,b,2D"),
    Layout.of("paged-mla", "blocks of MLA latents", "N,b,A"),
    Layout.of("sglang-layer-first", "an SGLang page: layer by layer", "kv,L,T,H,D"),
    Layout.of("sglang-page-first", "an SGLang page: token by token", "kv,T,L,H,D"),
)


def detect(source: TensorSource) -> list[Layout]:
    return []
