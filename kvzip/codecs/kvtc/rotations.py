"""Angles as kernels want them: per position and channel of a head, cosine, sine with its sign, and the partner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from kvzip.devices.base import Array, Device
from kvzip.profiles.rope import Rope, cos_sin


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
        key = ("kvtc.rotation", rope, head_dim, start, tokens, whole, inverse)
        cosines = device.constant((*key, "cos"), lambda: _tables(rope, head_dim, start, tokens, whole, inverse)[0])
        sines = device.constant((*key, "sin"), lambda: _tables(rope, head_dim, start, tokens, whole, inverse)[1])
        partners = device.constant((*key, "partners"), lambda: _partners(rope, head_dim))
        return cls(cosines, sines, partners)


def _partners(rope: Rope, head_dim: int) -> np.ndarray:
    first, second = rope.pairs(head_dim)
    partners = np.arange(head_dim, dtype=np.uint32)
    partners[first], partners[second] = second, first
    return partners


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
