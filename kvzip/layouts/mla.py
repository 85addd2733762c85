"""MLA models (DeepSeek): one latent of compressed keys and values per layer and token, whatever its width."""

from __future__ import annotations

from kvzip.layouts.declare import Layout
from kvzip.tensorfile import TensorSource

_WORDS = ("latent", "latents", "kv_latent", "compressed_kv", "c_kv", "kv_c", "ckv")

MLA = Layout.of(
    "mla",
    "MLA latents, a tensor per layer",
    *(
        f"{name}={axes}"
        for word in _WORDS
        for name in (f"*layers.{{L}}.{word}", f"layer_{{L}}_{word}", f"{word}.{{L}}", f"{word}_{{L}}")
        for axes in ("B,T,A", "T,A")
    ),
)
LAYOUTS = (MLA,)


def detect(source: TensorSource) -> list[Layout]:
    return [MLA] if MLA.fitting(source) else []
