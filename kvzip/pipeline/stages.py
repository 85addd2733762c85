"""Three stages side by side (reading, coding, writing), a bounded amount of memory between them, one error out.

The coding stage runs in the caller's thread, so that a device's context and Ctrl-C stay there; reading and writing have
a thread each. Whatever ends first with an error stops the other two, and that error is the one raised.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np

from kvzip.devices.base import Array
from kvzip.errors import LimitError

Item = TypeVar("Item")
Result = TypeVar("Result")

WINDOWS = 6
"""Windows in memory at once: some being read, some coded, some written, and some waiting in between."""

QUEUE_DEPTH = 2
JOIN_SECONDS = 2.0
"""How long a failed run waits for its reader, which may sit in a read of a pipe that never comes."""


class Stopped(Exception):  # noqa: N818  (no error: it tells a stage that another one has ended the run)
    """Raised inside a stage that waits while another one has failed."""


class Run:
    """What the stages of one run share: its first error, and the condition on which they wait for each other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Record the first error and wake every stage that waits."""
        with self.changed:
            if self.error is None and not isinstance(error, Stopped):
                self.error = error
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait (holding ``changed``) until the condition is true; raises :class:`Stopped` once the run has failed."""
        self.changed.wait_for(lambda: self.error is not None or condition())
        if self.error is not None:
            raise Stopped


class Channel(Generic[Item]):
    """A bounded queue from one stage to the next."""

    def __init__(self, run: Run, depth: int = QUEUE_DEPTH) -> None:
        self._run = run
        self._depth = depth
        self._items: deque[Item] = deque()
        self._closed = False

    def put(self, item: Item) -> None:
        with self._run.changed:
            self._run.wait_for(lambda: len(self._items) < self._depth)
            self._items.append(item)
            self._run.changed.notify_all()

    def peek(self) -> Item | None:
        """The next item, if it is there; it stays."""
        with self._run.changed:
            return self._items[0] if self._items else None

    def close(self) -> None:
        with self._run.changed:
            self._closed = True
            self._run.changed.notify_all()

    def __iter__(self) -> Iterator[Item]:
        while True:
            with self._run.changed:
                self._run.wait_for(lambda: bool(self._items) or self._closed)
                if not self._items:
                    return
                item = self._items.popleft()
                self._run.changed.notify_all()
            yield item


def empty(nbytes: int) -> np.ndarray:
    """Plain host memory."""
    return np.empty(nbytes, np.uint8)


class BufferPool:
    """Buffers used again and again: fresh memory costs a page fault per 4 KB, more than many a kernel.

    ``take`` waits while more than ``budget`` bytes are out. One request beyond the budget is served once nothing else
    is out: a plane that must be held whole is held alone.
    """

    def __init__(self, run: Run, budget: int, allocate: Callable[[int], Array] = empty) -> None:
        self._run = run
        self._budget = budget
        self._allocate = allocate
        self._out = 0
        self._free: list[Array] = []

    def take(self, nbytes: int) -> Array:
        """A uint8 array of at least ``nbytes``, contents undefined."""
        with self._run.changed:
            self._run.wait_for(lambda: self._out == 0 or self._out + nbytes <= self._budget)
            fits = [buffer for buffer in self._free if nbytes <= buffer.nbytes <= 2 * nbytes]
            if fits:
                buffer = min(fits, key=lambda fit: fit.nbytes)
                self._free = [other for other in self._free if other is not buffer]
            else:
                self._trim(nbytes)
                buffer = self._allocate(nbytes)
            self._out += buffer.nbytes
            return buffer

    def give(self, buffer: Array) -> None:
        """Take a buffer back for the next :meth:`take`."""
        with self._run.changed:
            self._out -= buffer.nbytes
            self._free.append(buffer)
            self._trim(0)
            self._run.changed.notify_all()

    def _trim(self, nbytes: int) -> None:
        while self._free and self._out + nbytes + sum(buffer.nbytes for buffer in self._free) > self._budget:
            self._free.pop(0)


def run_stages(
    read: Callable[[BufferPool], Iterator[Item]],
    code: Callable[[Item], Result],
    write: Callable[[BufferPool, Result], Any],
    budget: int,
    allocate: Callable[[int], Array] = empty,
    prepare: Callable[[Item], Any] = lambda item: None,
) -> None:
    """Pull items from ``read``, turn each into a result with ``code``, hand it to ``write``: in order, side by side.

    ``allocate`` makes the pool's buffers, uint8 arrays; at most ``budget`` bytes of them are out at once. ``prepare``
    is called in the coding stage before ``code``: with its item, and with the one after it if that has been read.

    Raises the first error of any stage, after the others have stopped; a ``MemoryError`` becomes a ``LimitError``.
    """
    run = Run()
    pool = BufferPool(run, budget, allocate)
    items: Channel[Item] = Channel(run)
    results: Channel[Result] = Channel(run)

    def reading() -> None:
        for item in read(pool):
            items.put(item)
        items.close()

    def writing() -> None:
        for result in results:
            write(pool, result)

    reader, writer = _start(run, reading, "read"), _start(run, writing, "write")
    try:
        for item in items:
            prepare(item)
            if (following := items.peek()) is not None:
                prepare(following)
            results.put(code(item))
        results.close()
    except BaseException as error:
        run.fail(error)
    _join(run, writer, None)
    _join(run, reader, JOIN_SECONDS)
    with memory_limit():
        if run.error is not None:
            raise run.error


@contextmanager
def memory_limit() -> Iterator[None]:
    """Makes running out of memory a ``LimitError``."""
    try:
        yield
    except MemoryError as error:
        raise LimitError(
            "out of memory; close other programs, use smaller blocks (block_tokens), or decompress a part or to a file",
            code="out-of-memory",
        ) from error


def _start(run: Run, stage: Callable[[], None], name: str) -> threading.Thread:
    def guarded() -> None:
        try:
            stage()
        except BaseException as error:
            run.fail(error)

    thread = threading.Thread(target=guarded, name=f"kvzip-{name}", daemon=True)
    thread.start()
    return thread


def _join(run: Run, thread: threading.Thread, seconds: float | None) -> None:
    """Wait for a stage's end, after a failure at most ``seconds``; Ctrl-C meanwhile fails the run like any error."""
    try:
        thread.join(seconds if run.error is not None else None)
    except BaseException as error:
        run.fail(error)
        thread.join(JOIN_SECONDS)
