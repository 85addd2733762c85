"""What a run did: sizes, times and the errors that it caused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Errors
from kvzip.container import Totals


@dataclass(frozen=True, slots=True)
class PlaneErrors:
    """The error of one plane as stored: ``|x - y| / |x|`` over all its elements, and the largest ``|x - y|``."""

    plane: Plane
    relative: float
    max_abs: float


@dataclass(repr=False)
class Report:
    """The result of a compression, decompression or verification.

    Attributes:
        original_bytes: of the files with the tensors (those written, when a part was decompressed).
        stored_bytes: of the whole ``.kvz``.
        blocks: how many were coded.
        seconds: wall time.
        errors: one entry for each plane of a lossy codec, where they were measured.
        codecs: names of those that keys, values and latents were given to, where they were compressed.
        totals: the ``.kvz``'s bytes by component.
    """

    original_bytes: int = 0
    stored_bytes: int = 0
    blocks: int = 0
    seconds: float = 0.0
    errors: list[PlaneErrors] = field(default_factory=list)
    codecs: list[str] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    def __repr__(self) -> str:
        return (
            f"Report(original_bytes={self.original_bytes}, stored_bytes={self.stored_bytes}, blocks={self.blocks}, "
            f"seconds={self.seconds:.3f}, {len(self.errors)} errors)"
        )

    @property
    def ratio(self) -> float:
        return self.original_bytes / self.stored_bytes if self.stored_bytes else math.nan


class Tally:
    """Sums the errors of blocks per plane. Exact sums: the result does not depend on how blocks met in batches."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Errors]] = {}
        self._planes: dict[int, Plane] = {}

    def add(self, block: Block, errors: Sequence[Errors]) -> None:
        for plane, error in zip(block.planes, errors, strict=bool(errors)):
            self._planes[plane.index] = plane
            self._parts.setdefault(plane.index, []).append(error)

    def totals(self) -> list[PlaneErrors]:
        return [self._total(self._planes[index], parts) for index, parts in sorted(self._parts.items())]

    def statistics(self, planes: int) -> dict[str, list[float | None]]:
        """The columns of a statistics frame, one entry per plane; empty if no codec was lossy."""
        found = {total.plane.index: total for total in self.totals()}
        if not found:
            return {}
        rows = [found.get(index) for index in range(planes)]
        return {
            "relative_error": [row.relative if row else None for row in rows],
            "max_abs": [row.max_abs if row else None for row in rows],
        }

    @staticmethod
    def _total(plane: Plane, parts: list[Errors]) -> PlaneErrors:
        squared, energy = _sum(part.squared_error for part in parts), _sum(part.energy for part in parts)
        relative = math.sqrt(squared / energy) if energy else math.sqrt(squared)
        return PlaneErrors(plane, relative, max(part.max_abs for part in parts))


def _sum(values: Iterable[float]) -> float:
    """``math.fsum``, with infinities and overflow as infinity rather than as an exception."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.inf
