"""All layers stacked in one tensor of keys and one of values."""

from __future__ import annotations

from kvzip.layouts.axes import Grid
from kvzip.layouts.declare import Layout
from kvzip.tensorfile import TensorSource

_NAMES = ("{kv}", "past_{kv}", "cache_{kv}", "cache.{kv}")
_MOST_HEADS = 128

HEADS_FIRST = Layout.of(
    "stacked",
    "one tensor of keys and one of values for all layers, heads before tokens",
    *(f"{name}={axes}" for name in _NAMES for axes in ("L,B,H,T,D", "L,H,T,D", "L,T,C")),
)
TOKENS_FIRST = Layout.of(
    "stacked-tokens-first",
    "one tensor of keys and one of values for all layers, tokens before heads",
    *(f"{name}={axes}" for name in _NAMES for axes in ("L,B,T,H,D", "L,T,H,D", "L,T,C")),
)
LAYOUTS = (HEADS_FIRST, TOKENS_FIRST)


def detect(source: TensorSource) -> list[Layout]:
    grids = [grid for _, grid in HEADS_FIRST.fitting(source)]
    if not grids:
        return []
    orders = [_order(grid) for grid in grids if "H" in grid.axes] or [HEADS_FIRST]
    return [orders[0]] if orders[0] and all(order is orders[0] for order in orders) else [HEADS_FIRST, TOKENS_FIRST]


def _order(grid: Grid) -> Layout | None:
    """Which of the two middle axes is the tokens': the much longer one; None where neither is."""
    first, second = grid.size("H"), grid.size("T")
    fewer, more = sorted((first, second))
    if more < 2 * fewer or (fewer <= 1 and more <= _MOST_HEADS):  # one token of many heads, or many tokens of one head?
        return None
    return HEADS_FIRST if second == more else TOKENS_FIRST
