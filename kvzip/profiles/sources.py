"""What training reads: caches, a plane at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from kvzip.errors import UsageError
from kvzip.profiles.profile import Geometry


class Source(Protocol):
    """A cache to learn from."""

    @property
    def name(self) -> str: ...

    @property
    def geometry(self) -> Geometry: ...

    @property
    def tokens(self) -> int: ...

    def plane(self, layer: int, kind: Literal["key", "value"]) -> np.ndarray:
        """One plane as it was cached: ``[tokens, heads, dim]`` of any float type."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """A source in memory: ``keys`` and ``values`` ``[layers, tokens, heads, dim]``."""

    name: str
    keys: np.ndarray
    values: np.ndarray

    @property
    def geometry(self) -> Geometry:
        layers, _, heads, key_dim = self.keys.shape
        return Geometry(layers, heads, key_dim, self.values.shape[-1])

    @property
    def tokens(self) -> int:
        return len(self.keys[0])

    def plane(self, layer: int, kind: Literal["key", "value"]) -> np.ndarray:
        plane: np.ndarray = (self.keys if kind == "key" else self.values)[layer]
        return plane


def common_geometry(sources: Sequence[Source]) -> Geometry:
    """The geometry that all have. Raises ``UsageError`` if there are none, or if they differ."""
    if not sources:
        raise UsageError("training needs at least one cache", code="train-caches")
    first = sources[0]
    for source in sources[1:]:
        if source.geometry != first.geometry:
            raise UsageError(
                f"{source.name} is {source.geometry}, {first.name} is {first.geometry}: they are of two models",
                code="train-geometry",
            )
    return first.geometry
