"""vLLM's ExampleConnector (formerly SharedStorageConnector): a folder per prompt, a file per layer, several forms."""

from __future__ import annotations

from kvzip.layouts.declare import Layout
from kvzip.layouts.slabs import misfit
from kvzip.tensorfile import TensorSource

_NAME = "*layers.{L}.*/kv_cache"

FLAT = Layout.of("vllm-flat", "vLLM connector folder, older: keys, then values", f"{_NAME}=kv,T,C")
TRITON = Layout.of("vllm-triton", "vLLM connector folder, Triton: key and value of each token", f"{_NAME}=T,kv,H,D")
FUSED = Layout.of("vllm-fused", "vLLM connector folder, newer: key and value fused per head", f"{_NAME}=T,H,2D")
MLA = Layout.of("vllm-mla", "vLLM connector folder, MLA latents", f"{_NAME}=T,A")
TOKEN_FLAT = Layout.of("vllm-token-flat", "vLLM connector folder: flat key and value of each token", f"{_NAME}=T,kv,C")
KV_HEADS = Layout.of("vllm-kv-heads", "vLLM connector folder: keys, then values, heads apart", f"{_NAME}=kv,T,H,D")
LAYOUTS = (FLAT, TRITON, FUSED, MLA, TOKEN_FLAT, KV_HEADS)


def detect(source: TensorSource) -> list[Layout]:
    """The forms that fit every layer, less those that another one explains better.

    T is a multiple of the block size, so a first axis of 2 is that of keys and values; a second axis of 2 may be a
    model's two heads, and then nothing but the user can tell.
    """
    layers = [tensor for tensor in source.tensors if FLAT.clauses[0].match(tensor)]
    fits = [la for la in LAYOUTS if layers and not any(misfit(tensor, la.clauses[0].axes) for tensor in layers)]
    if any(tensor.shape[0] == 2 for tensor in layers if tensor.shape):
        fits = [layout for layout in fits if layout not in (FUSED, TOKEN_FLAT)]
    return fits
