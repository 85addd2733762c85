"""How far restored numbers are from the original ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvzip.codecs.base import Errors

if TYPE_CHECKING:
    from kvzip.pipeline.report import PlaneErrors

PIECE = 1 << 18
"""Numbers compared at a time: in double precision they stay in the cache of a core."""


def differences(original: np.ndarray, restored: np.ndarray) -> Errors:
    """Squared error, energy and largest difference of two arrays ``[tokens, heads, head_dim]``, in double precision.

    Equal infinities and NaN in the same places count as no difference; any other that is not finite counts as infinite.
    """
    squared = energy = largest = 0.0
    rows = max(1, PIECE // max(1, math.prod(original.shape[1:])))
    for start in range(0, len(original), rows):
        with np.errstate(invalid="ignore", over="ignore"):
            x, y = (array[start : start + rows].astype(np.float64) for array in (original, restored))
            same = (x == y) | (np.isnan(x) & np.isnan(y))
            gap = np.abs(np.where(same, 0.0, x - y))
            gap[np.isnan(gap)] = math.inf
            squared += float(np.square(gap).sum())
            energy += float(np.square(np.where(np.isfinite(x), x, 0.0)).sum())
        largest = max(largest, float(gap.max(initial=0.0)))
    return Errors(squared, energy, largest)


def worst(errors: Iterable[PlaneErrors]) -> dict[str, PlaneErrors]:
    """The plane with the largest relative error of each kind, keys first."""
    found: dict[str, PlaneErrors] = {}
    for error in sorted(errors, key=lambda error: (error.plane.kind, error.plane.index)):
        kind = error.plane.kind
        if kind not in found or error.relative > found[kind].relative:
            found[kind] = error
    return found


def to_json(error: PlaneErrors) -> dict[str, Any]:
    """One plane's error as JSON values; what is not finite becomes null."""
    return {
        "layer": error.plane.layer,
        "kind": error.plane.kind,
        "sequence": error.plane.sequence,
        "relative_error": error.relative if math.isfinite(error.relative) else None,
        "max_abs": error.max_abs if math.isfinite(error.max_abs) else None,
    }
