"""Small profiles, and the caches that they fit, made without torch."""

from __future__ import annotations

import numpy as np

from kvzip.profiles.profile import Geometry, Group, Profile, Seen
from kvzip.profiles.rope import Rope, rotate
from kvzip.profiles.ropes import Ropes
from kvzip.profiles.scales import KEY_UNIT, power
from tests.reference import kvtc as oracle

LAYERS, HEADS, DIM, HIDDEN = 4, 2, 32, 20
ROPE = Rope(1e4)
STEP = -19


def cache(
    seed: int, tokens: int = 300, heads: int = HEADS, dim: int = DIM, layers: int = LAYERS
) -> tuple[np.ndarray, np.ndarray]:
    """Keys, rotated, and values ``[layers, tokens, heads, dim]``, float32, that follow a few hidden numbers."""
    mix = np.random.default_rng(5).normal(size=(HIDDEN, layers * 2 * heads * dim))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, HIDDEN)) @ mix + 0.2 * rng.normal(size=(tokens, mix.shape[1])) + 2 * mix[0]
    x = x.reshape(tokens, layers, 2, heads, dim).astype(np.float32)
    return np.stack([rotate(x[:, i, 0], ROPE) for i in range(layers)]), np.moveaxis(x[:, :, 1], 0, 1)


def profile(
    *, heads: int = HEADS, dim: int = DIM, layers: int = LAYERS, group: int = 2, dtype: str = "int8", seed: int = 0
) -> Profile:
    """Learned from one cache by the formulas that docs/kvtc.md gives."""
    keys, values = cache(seed, 400, heads, dim, layers)
    exponents, scaled = [], []
    for k, v in zip(keys, values, strict=True):
        k = rotate(k, ROPE, inverse=True).reshape(len(k), -1)[1:]
        v = v.reshape(len(v), -1)[1:]
        exponents.append(oracle.key_exponent(k))
        scaled.append(
            np.hstack([k * power(-(exponents[-1] + KEY_UNIT)), v * power(-oracle.value_exponents(v))[:, None]])
        )
    groups = []
    for first in range(0, layers, group):
        own = tuple(range(first, min(first + group, layers)))
        x = np.hstack([scaled[i] for i in own]).astype(np.float64)
        variances, vectors = np.linalg.eigh(np.cov(x.T))
        deviations = np.sqrt(np.maximum(variances[::-1], 0)).astype(np.float32)
        rank = int((deviations > 0.05 * power(STEP)).sum())
        directions = vectors.T[::-1][:rank]
        scales = (np.abs(directions).max(axis=1) / 127).astype(np.float32)
        stored = np.rint(directions / scales[:, None]).astype(np.int8)
        if dtype != "int8":
            stored, scales = directions.astype(dtype), np.ones(rank, np.float32)
        groups.append(Group(own, x.mean(axis=0).astype(np.float32), stored, scales, deviations[:rank]))
    geometry = Geometry(layers, heads, dim, dim)
    return Profile(f"toy {seed}", geometry, Ropes((ROPE,)), tuple(exponents), groups, STEP, Seen(1, 399))
