"""How long work takes: several runs, after one that does not count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")

RUNS = 3
"""How often work is repeated at least."""

LONG = 5.0
"""Seconds after which one run is enough: what takes so long varies little, and people wait."""


@dataclass(frozen=True)
class Timing:
    """The times of several runs of the same work, seconds."""

    times: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def quartiles(self) -> tuple[float, float]:
        """What a quarter of the runs is faster than, and what a quarter is slower than."""
        if len(self.times) == 1:
            return self.times[0], self.times[0]
        low, _, high = statistics.quantiles(self.times, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, as a share of the median."""
        low, high = self.quartiles
        return (high - low) / 2 / self.median

    def speed(self, nbytes: int) -> float:
        """GB/s by the median."""
        return nbytes / self.median / 1e9


def timed(work: Callable[[], Result], seconds: float) -> tuple[Result, Timing]:
    """Run ``work`` once, to make memory and tables ready, then for so many seconds and at least :data:`RUNS` times.

    Returns the last result and the times.
    """
    begin = time.perf_counter()
    result = work()
    least = RUNS if time.perf_counter() - begin < LONG else 1
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        start = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - start)
    return result, Timing(tuple(times))
