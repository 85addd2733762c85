"""MLX prompt caches (``mlx_lm`` and servers built on it): ``{layer}.0`` holds the keys, ``{layer}.1`` the values.

The file's metadata is a flattened list of three: ``0.{layer}`` the state of the layer's cache object, ``1.*`` the
user's own, and ``2.{layer}`` the name of its class. Layers of recurrent state and quantized layers (``{layer}.0.0``
and so on) are no K and V.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvzip.layouts.declare import Layout, Split, layers_text
from kvzip.layouts.slabs import Role
from kvzip.tensorfile import TensorSource

_PLAIN = re.compile(r"(?:KV|RotatingKV|ChunkedKV|ConcatenateKV|BatchKV|BatchRotatingKV)Cache(?:Simple)?")
_PART = re.compile(r"(\d{1,9})\.\d+(?:\.\d+)*")
_OFFSET_AT = {"RotatingKVCache": 2, "KVCache": 0, "KVCacheSimple": 0}
"""Which of the strings under ``0.{layer}`` is the number of tokens that the layer has seen."""


@dataclass(frozen=True)
class _MlxLayout(Layout):
    partial = True

    def roles(self, source: TensorSource, split: Split) -> tuple[list[Role | None], list[str]]:
        roles, _ = super().roles(source, split)
        classes = _classes(source)
        parts = [_PART.fullmatch(tensor.name) for tensor in source.tensors]
        layers = [int(part[1]) if part else -1 for part in parts]
        plain = [layer for layer in layers if _PLAIN.fullmatch(classes.get(layer, "KVCache"))]
        kept = [role if layer in plain else None for role, layer in zip(roles, layers, strict=True)]
        return kept, _notices(source, layers, kept)


MLX = _MlxLayout(
    "mlx",
    "MLX prompt cache",
    Layout.of("", "", "{L}.{0|1}=B,H,T,D").clauses,
)
LAYOUTS = (MLX,)


def detect(source: TensorSource) -> list[Layout]:
    classes = _classes(source)
    present = {int(found[1]) for tensor in source.tensors if (found := _PART.fullmatch(tensor.name))}
    return [MLX] if (present & set(classes) if classes else MLX.fitting(source)) else []


def _classes(source: TensorSource) -> dict[int, str]:
    """Class name by layer, from the metadata."""
    found = {re.fullmatch(r"2\.(\d{1,9})", key): name for key, name in source.metadata.items()}
    return {
        int(key[1]): name for key, name in found.items() if key and name.endswith(("Cache", "CacheSimple", "CacheList"))
    }


def _notices(source: TensorSource, layers: list[int], roles: list[Role | None]) -> list[str]:
    passed = [layer for layer, role in zip(layers, roles, strict=True) if role is None and layer >= 0]
    notices = []
    if passed:
        notices.append(f"layers {layers_text(passed)} hold quantized or recurrent state: stored losslessly")
    padded = {}
    for tensor, layer, role in zip(source.tensors, layers, roles, strict=True):
        used = _offset(source, layer)
        if role is not None and used is not None and used < tensor.shape[2]:
            padded[layer] = f"{used} of {tensor.shape[2]}"
    if padded:
        counts = ", ".join(sorted(set(padded.values())))
        notices.append(
            f"layers {layers_text(list(padded))} are padded: {counts} tokens are in use, the rest is stored like them"
        )
    return notices


def _offset(source: TensorSource, layer: int) -> int | None:
    """The tokens in use of a layer, as far as its cache object told."""
    name = _classes(source).get(layer, "KVCache")
    at = _OFFSET_AT.get(name)
    text = source.metadata.get(f"0.{layer}.{at}") or (source.metadata.get(f"0.{layer}") if at == 0 else None)
    return int(text) if text and text.isdigit() and len(text) < 10 else None
