"""RoPE found in the keys themselves.

A rotation spreads the means of two channels over both. Undone with the right base, the channels' variances fall: the
mean of half their log2, what an entropy coder pays, has one sharp minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvzip.profiles.rope import Rope, rotate

Item = TypeVar("Item")

THETAS = (1e4, 1e5, 5e5, 1e6, 5e6)
"""Bases that models in use have. Others must be told."""

GAIN = 0.05
"""Bits a number that undoing the rotation must save, at the least, before it is believed."""

LEAD = 0.02
"""Bits by which it must save more than any other candidate."""

TOKENS = 1024
LAYERS = 4
LEAST_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Detection:
    """The best candidate, the bits a number that it saves over the keys as they are, and its lead over the rest."""

    rope: Rope
    gain: float
    lead: float

    @property
    def certain(self) -> bool:
        return self.gain >= GAIN and self.lead >= LEAD


def detect(keys: Sequence[np.ndarray]) -> Detection | None:
    """The rotation of ``keys``, one array ``[T, heads, head_dim]`` a layer; None if nothing stands out.

    A few layers and at most 1024 tokens are looked at; layers of fewer than 32 tokens, with NaN or Inf, or with heads
    of one channel, which cannot turn, are not.
    """
    # The first token is the attention sink: it is like no other.
    samples = [array[1 : TOKENS + 1].astype(np.float32) for array in sample_of(keys)]
    samples = [x for x in samples if len(x) >= LEAST_TOKENS and x.shape[-1] > 1 and np.isfinite(x).all()]
    if not samples:
        return None
    candidates = [
        Rope(theta, rotary=rotary, interleaved=interleaved)
        for theta in THETAS
        for interleaved in (False, True)
        for rotary in _widths(min(x.shape[-1] for x in samples))
    ]
    unchanged = float(np.mean([spread(x) for x in samples]))
    gains = []
    for rope in candidates:
        turned = [spread(rotate(x, rope, inverse=True, first=1)) for x in samples]
        gains.append(unchanged - float(np.mean(turned)))
    order = np.argsort(gains)[::-1]
    best, second = int(order[0]), int(order[1])
    found = Detection(candidates[best], gains[best], gains[best] - gains[second])
    return found if found.certain else None


def sample_of(layers: Sequence[Item]) -> list[Item]:
    """A few of many, the first and the last among them."""
    return [layers[i] for i in sorted({round(i) for i in np.linspace(0, len(layers) - 1, min(LAYERS, len(layers)))})]


def spread(x: np.ndarray) -> float:
    """Mean over channels of half the log2 variance, of ``[T, heads, head_dim]``: bits a number, but for a constant."""
    variance = x.reshape(len(x), -1).var(axis=0, dtype=np.float64)
    live = variance[variance > 0]
    return float(np.log2(live).mean() / 2) if live.size else 0.0


def _widths(head_dim: int) -> list[int | None]:
    """All of a head, half or a quarter of it."""
    return [None, *(head_dim // part for part in (2, 4) if head_dim % (2 * part) == 0)]
