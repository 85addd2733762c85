"""Copies between the host and a GPU beside its kernels: one lane each way, a stream of its own.

What keeps them right:

- All memory of the device belongs to the stream of the kernels: what is freed is used again by what is launched next.
  So a copy begins when all has run that was launched before it.
- Kernels wait for the copy that brings what they read.
- What a copy reads or writes, on the device and on the host, is kept until the copy is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from kvzip.devices.base import Array


class Lane:
    """Copies in one direction, one after the other.

    Two are under way at most: one that runs and one that follows it without a gap. So copies hold a bounded amount of
    memory, however far the host is ahead.

    Args:
        kernels: the stream on which kernels are launched and memory is allocated; its device must be current.
    """

    def __init__(self, cupy: Any, kernels: Any) -> None:
        self._cupy, self._kernels = cupy, kernels
        # Non-blocking: what a caller does on the default stream concerns kernels, which copies wait for.
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._under_way: deque[tuple[Any, tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()

    def begin(self, copy: Callable[[Any], None], *memory: Any) -> Any:
        """Call ``copy`` with the stream on which it is to copy between ``memory``; returns the event of its end.

        ``copy`` must not allocate: making room for that waits for copies.
        """
        with self._lock:
            self._stream.wait_event(self._kernels.record(self._event()))
            copy(self._stream)
            done = self._stream.record(self._event())
            self._under_way.append((done, memory))
        self.finish(but=1)
        return done

    def finish(self, but: int = 0) -> None:
        """Wait for all copies ``but`` the newest few, and let go of their memory."""
        with self._lock:
            while len(self._under_way) > but:
                self._under_way[0][0].synchronize()
                self._under_way.popleft()

    def tidy(self) -> None:
        """Let go of the memory of those that are done."""
        with self._lock:
            while self._under_way and self._under_way[0][0].done:
                self._under_way.popleft()

    def _event(self) -> Any:
        # Blocking: who waits for it leaves the core to others.
        return self._cupy.cuda.Event(block=True, disable_timing=True)


class Prefetched:
    """An array that a copy fills, until it is taken or its memory is wanted for something else."""

    def __init__(self, array: Array, done: Any) -> None:
        self._held = [(array, done)]

    def take(self, kernels: Any) -> Array | None:
        """The array, for what is launched on ``kernels`` from now on; None if it is gone."""
        try:
            array, done = self._held.pop()
        except IndexError:
            return None
        kernels.wait_event(done)
        return array

    def give_up(self) -> None:
        """Free the memory once the copy is done."""
        self._held.clear()
