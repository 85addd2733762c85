"""What every part of the check is given: the devices, until when, and a way to go on after a failure."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvzip.devices.build import Target
from kvzip.devices.cpu import Cpu
from kvzip.devices.cuda import Cuda
from kvzip.devices.levels import runnable_levels
from kvzip.errors import UnsupportedError

MARK = "\x1e"
"""Begins a line that tells which item a part has begun, for whoever started its process."""

DIFFERS, UNFINISHED, BROKEN = 8, 9, 10
"""Exit codes of a part: something is wrong; there was no time for all; the GPU answers this process no more."""


@dataclass
class Check:
    """One part's run.

    Attributes:
        index: which GPU.
        quick: fewer trials and sizes.
        seconds: how long the part may take.
        first: the items before this one are done, by a process that did not survive the last of them.
        failures, unfinished: what became of it: how much was wrong, and whether time was too short for some items.
        kernel: which one was launched last.
    """

    index: int = 0
    quick: bool = False
    seconds: float = 60.0
    first: int = 0
    failures: int = 0
    unfinished: bool = False
    kernel: str = ""

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds

    @cached_property
    def gpu(self) -> Cuda:
        gpu = Cuda(self.index)
        launch = gpu.launch

        def remember(kernel: str, warps: int, *arguments: Any) -> None:
            self.kernel = kernel
            launch(kernel, warps, *arguments)

        gpu.launch = remember  # type: ignore[method-assign]
        return gpu

    @cached_property
    def cpu(self) -> Cpu:
        return ready_cpu()

    def heads(self, *cells: str) -> None:
        """Begin a table; texts are flush left, what begins with # (not printed) flush right."""
        if not self.first:
            print(f"| {' | '.join(cell.lstrip('#') for cell in cells)} |")
            print("|" + "|".join("--:" if cell.startswith("#") else "---" for cell in cells) + "|", flush=True)

    def each(self, items: Sequence[str], work: Callable[[str, float], int]) -> None:
        """Call ``work`` with each item and the moment by which it should be done; it returns how much was wrong.

        What it throws is one failure, and costs the other items nothing, even if the GPU goes with it: then this
        process ends, and another one goes on behind the item.
        """
        for number in range(self.first, len(items)):
            left = self._end - time.monotonic()
            if left <= 0:
                self.unfinished = True
                print(f"\nLeft out, no time: {', '.join(items[number:])}", flush=True)
                return
            print(f"{MARK}{number}", flush=True)
            try:
                self.failures += work(items[number], time.monotonic() + left / (len(items) - number))
            except Exception as error:
                self.failures += 1
                print(f"| {items[number]} | **failed**: {words(error)} |", flush=True)
                self.survive()

    def survive(self, where: str = "") -> None:
        """End this process if the GPU does not answer it any more."""
        try:
            self.gpu.synchronize()
        except Exception as error:
            launched = f"the last kernel launched was {self.kernel}" if self.kernel else "no kernel was launched"
            print(f"\nThe GPU is lost to this process{where}: {words(error)}; {launched}", flush=True)
            sys.exit(BROKEN)


def ready_cpu() -> Cpu:
    """The CPU at the best level whose kernels are compiled, or can be: a machine with a GPU may have no compiler."""
    faults = []
    for level in reversed(runnable_levels(Target.host())):
        try:
            return Cpu(level=level)
        except UnsupportedError as error:
            faults.append(error)
    raise faults[0]


def words(error: BaseException) -> str:
    """An exception on one line that a table can hold."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".replace("|", "/")[:300]


def until(end: float, most: int) -> Iterator[int]:
    """Numbers from 0 to ``most`` - 1 as long as there is time, at least one."""
    for number in range(most):
        if number and time.monotonic() > end:
            return
        yield number
