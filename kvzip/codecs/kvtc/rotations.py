"""Angles as kernels want them: per position and channel of a head, cosine, sine with its sign, and the partner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np

from kvzip.devices.base import Array, Device
from kvzip.profiles.rope import Rope, cos_sin

KEPT = 128
"""Rotations that are kept for the next layer: of so many blocks, there and back."""

OF_LENGTH = ("dynamic", "longrope")
"""Scalings that look at how long the whole prompt is."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """``y[d] = x[d] * cosines[t, d] + x[partners[d]] * sines[t, d]``: float32 ``[tokens, head_dim]``, uint32
    ``[head_dim]``.
    """

    cosines: Array
    sines: Array
    partners: Array

    @classmethod
    def of(
        cls, rope: Rope, head_dim: int, start: int, tokens: int, whole: int, device: Device, *, inverse: bool
    ) -> Self:
        """The rotation of tokens ``start : start + tokens`` of a cache of ``whole`` tokens, or its inverse."""
        if rope.scaling is None or rope.scaling.kind not in OF_LENGTH:
            whole = 0
        found: Self = _on_device(rope, head_dim, start, tokens, whole, device, inverse)  # type: ignore[assignment]
        return found


@lru_cache(maxsize=KEPT)
def _on_device(
    rope: Rope, head_dim: int, start: int, tokens: int, whole: int, device: Device, inverse: bool
) -> Rotation:
    cosines, sines = _tables(rope, head_dim, start, tokens, whole, inverse)
    first, second = rope.pairs(head_dim)
    partners = np.arange(head_dim, dtype=np.uint32)
    partners[first], partners[second] = second, first
    return Rotation(*map(device.to_device, (cosines, sines, partners)))


def _tables(
    rope: Rope, head_dim: int, start: int, tokens: int, whole: int, inverse: bool
) -> tuple[np.ndarray, np.ndarray]:
    cos, sin = cos_sin(rope.frequencies(head_dim, whole), rope.start + start, tokens)
    if inverse:
        sin = -sin
    first, second = rope.pairs(head_dim)
    cosines = np.ones((tokens, head_dim), np.float32)
    sines = np.zeros((tokens, head_dim), np.float32)
    cosines[:, first] = cosines[:, second] = cos
    sines[:, first], sines[:, second] = -sin, sin
    return cosines, sines
