"""Hugging Face transformers: a tensor of keys and one of values per layer, saved by hand under many names."""

from __future__ import annotations

from kvzip.layouts.axes import Grid
from kvzip.layouts.declare import Layout
from kvzip.tensorfile import TensorSource

_NAMES = (
    "*.{L}.{kv}",
    "*layers.{L}.*.{kv}",
    "past_key_values.{L}.{0|1}",
    "{kv}.{L}",
    "{kv}_{L}",
    "{kv}{L}",
    "{kv}.layers.{L}",
    "layer_{L}_{kv}",
    "layer_{L}.{kv}",
    "{L}.{kv}",
    "{L}_{kv}",
    "cache_{kv}_l{L}",
)

PER_LAYER = Layout.of(
    "per-layer",
    "transformers' DynamicCache and its like: keys and values of each layer, heads before tokens",
    *(f"{name}={axes}" for name in _NAMES for axes in ("B,H,T,D", "H,T,D", "T,C")),
)
TOKENS_FIRST = Layout.of(
    "per-layer-tokens-first",
    "the same names, tokens before heads",
    *(f"{name}={axes}" for name in _NAMES for axes in ("B,T,H,D", "T,H,D", "T,C")),
)
LAYOUTS = (PER_LAYER, TOKENS_FIRST)


def detect(source: TensorSource) -> list[Layout]:
    grids = [grid for _, grid in PER_LAYER.fitting(source)]
    if not grids:
        return []
    return [PER_LAYER, TOKENS_FIRST] if any(map(_doubtful, grids)) else [PER_LAYER]


def _doubtful(grid: Grid) -> bool:
    """More heads than models have, and more of them than tokens: probably the axes stand the other way round."""
    return grid.size("H") > max(32, grid.tokens) and grid.tokens > 1
