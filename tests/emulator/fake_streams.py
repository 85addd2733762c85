"""Streams, events and memory pools as CUDA and CuPy have them, with work done in any order that they allow.

A stream's work waits for what was asked of the stream before, for the events that it was told to wait for and, if it
is blocking, for the default stream. Everything else is free: a schedule says what runs before somebody on the host
waits for it. Memory is handed out again the moment it is freed, as CuPy's pools do it: device memory to the stream that
took it, pinned memory to anybody. Who keeps to no order gets other bytes than expected.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar
from weakref import WeakSet, WeakValueDictionary

import numpy as np

GARBAGE = 0xA5
ALIGNMENT = 512

_lock = threading.RLock()
"""One thread at a time changes anything here, as in the driver."""


class OutOfMemoryError(MemoryError):
    pass


class CUDARuntimeError(RuntimeError):
    pass


class Work:
    """Something that a stream is to do, after others."""

    def __init__(self, stream: Stream, run: Callable[[], object], after: Iterable[Work | None]) -> None:
        self.stream = stream
        self.done = False
        self._run = run
        self._after = [work for work in after if work is not None and not work.done]

    @property
    def ready(self) -> bool:
        self._after = [work for work in self._after if not work.done]
        return not self._after

    def perform(self) -> None:
        run, self._run, self.done = self._run, lambda: None, True
        run()

    def finish(self) -> None:
        """Do it, and before it what it comes after."""
        with _lock:
            todo = [self]
            while todo:
                if todo[-1].done:
                    todo.pop()
                elif todo[-1].ready:
                    todo.pop().perform()
                else:
                    todo += todo[-1]._after


Schedule = Callable[[Sequence[Work]], Work | None]
"""Chooses what is done next of all that could be; None for nothing."""


def late(ready: Sequence[Work]) -> Work | None:
    """Nothing runs before the host waits for it."""
    return None


def copies_first(ready: Sequence[Work]) -> Work | None:
    """Non-blocking streams run as soon as they may, the others as late as they may."""
    return next((work for work in ready if work.stream.non_blocking), None)


def kernels_first(ready: Sequence[Work]) -> Work | None:
    """Blocking streams run as soon as they may, the others as late as they may."""
    return next((work for work in ready if not work.stream.non_blocking), None)


def shuffled(seed: int) -> Schedule:
    """Now this runs, now that."""
    chance = random.Random(seed)
    return lambda ready: chance.choice(ready) if ready and chance.random() < 0.6 else None


class Scheduler:
    """All streams, and what they have to do."""

    def __init__(self) -> None:
        self.schedule: Schedule = late
        self._streams: WeakValueDictionary[int, Stream] = WeakValueDictionary()
        self._count = 0

    def add(self, stream: Stream) -> None:
        self._count += 1
        self._streams[self._count] = stream

    def streams(self) -> list[Stream]:
        """In the order in which they were made, so that a seed means the same again."""
        return [stream for number in range(1, self._count + 1) if (stream := self._streams.get(number)) is not None]

    def advance(self) -> None:
        """As much as the schedule wants."""
        while (work := self.schedule([head for stream in self.streams() if (head := stream.head())])) is not None:
            work.perform()

    def finish_all(self) -> None:
        for stream in self.streams():
            stream.synchronize()


scheduler = Scheduler()


@contextlib.contextmanager
def scheduled(schedule: Schedule) -> Iterator[None]:
    """Work is done by another schedule meanwhile; what is left at the end is done."""
    before, scheduler.schedule = scheduler.schedule, schedule
    try:
        yield
    finally:
        scheduler.schedule = before
        scheduler.finish_all()


class Event:
    """A place in a stream, where that was when the event was recorded last."""

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.work: Work | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.work = (stream or current_stream()).add(lambda: None)

    @property
    def done(self) -> bool:
        return self.work is None or self.work.done

    def synchronize(self) -> None:
        with _lock:
            scheduler.advance()
            if self.work is not None:
                self.work.finish()


class Stream:
    """Work in order. A blocking stream also keeps one order with the default stream ``null``, not with its like."""

    null: ClassVar[Stream]

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.non_blocking = non_blocking
        self.last: Work | None = None
        self._pending: deque[Work] = deque()
        scheduler.add(self)

    def __enter__(self) -> Stream:
        _stack().append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        assert _stack().pop() is self

    def head(self) -> Work | None:
        """What it would do next, if that may be done."""
        while self._pending and self._pending[0].done:
            self._pending.popleft()
        return self._pending[0] if self._pending and self._pending[0].ready else None

    def add(self, run: Callable[[], object], *after: Work | None) -> Work:
        with _lock:
            if self is Stream.null:
                after = (*after, *(stream.last for stream in scheduler.streams() if not stream.non_blocking))
            elif not self.non_blocking:
                after = (*after, Stream.null.last)
            self.last = Work(self, run, (self.last, *after))
            self._pending.append(self.last)
            last = self.last
            scheduler.advance()
            return last

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.add(lambda: None, event.work)

    def synchronize(self) -> None:
        self.add(lambda: None).finish()


Stream.null = Stream(null=True)
_local = threading.local()


def _stack() -> list[Stream]:
    if not hasattr(_local, "streams"):
        _local.streams = []
    found: list[Stream] = _local.streams
    return found


def current_stream() -> Stream:
    """Of this thread."""
    return _stack()[-1] if _stack() else Stream.null


# ------------------------------------------------------------------------------------------------- memory of the device


class Memory:
    """A piece of device memory, its owner's until that is gone; then its stream's again."""

    alive: ClassVar[WeakSet[Memory]] = WeakSet()

    def __init__(self, room: np.ndarray, nbytes: int, arena: list[np.ndarray]) -> None:
        self.bytes = room[:nbytes]
        self._room, self._arena = room, arena
        Memory.alive.add(self)

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    def __del__(self) -> None:
        self._arena.append(self._room)


class MemoryPool:
    """Hands out memory as long as the device, of ``total`` bytes, has some: first what the same stream has freed."""

    total = 1 << 30
    pools: ClassVar[WeakSet[MemoryPool]] = WeakSet()

    def __init__(self) -> None:
        self._arenas: dict[Stream, list[np.ndarray]] = {}
        MemoryPool.pools.add(self)

    def malloc(self, nbytes: int) -> Memory:
        with _lock:
            stream = current_stream()
            size = -(-nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT  # nobody may touch the rest
            arena = self._arenas.setdefault(stream, [])
            fitting = [at for at in range(len(arena)) if arena[at].nbytes >= size]
            if fitting:
                # The smallest, of these the one freed last; what is left of it stays.
                room = arena.pop(min(reversed(fitting), key=lambda at: arena[at].nbytes))
                if room.nbytes > size:
                    arena.append(room[size:])
                memory = Memory(room[:size], nbytes, arena)
                stream.add(lambda: room[:size].fill(GARBAGE))  # in the stream's order, as what is launched next
                return memory
            if self.held() + nbytes > MemoryPool.total:
                self.free_all_blocks()
            if self.held() + nbytes > MemoryPool.total:
                raise OutOfMemoryError(f"{nbytes} bytes of {MemoryPool.total}")
            return Memory(_room(size), nbytes, arena)

    def free_all_blocks(self) -> None:
        """Give back to the device what is free."""
        with _lock:
            scheduler.finish_all()  # as cudaFree does
            for rooms in self._arenas.values():
                rooms.clear()

    @staticmethod
    def used() -> int:
        with _lock:
            return sum(memory.bytes.nbytes for memory in list(Memory.alive))

    @staticmethod
    def held() -> int:
        """What is used, and what is free and still the pools'."""
        with _lock:
            arenas = [arena for pool in list(MemoryPool.pools) for arena in pool._arenas.values()]
            return MemoryPool.used() + sum(room.nbytes for arena in arenas for room in arena)


def _room(nbytes: int) -> np.ndarray:
    room = np.full(nbytes + ALIGNMENT, GARBAGE, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes]


# -------------------------------------------------------------------------------------------- pinned memory of the host

_pinned: dict[int, list[ctypes.Array[ctypes.c_char]]] = {}
"""Free pinned memory by size. It is never given back: a copy that comes too late still finds it."""


@cache
def _handle(nbytes: int) -> Any:
    """A type of buffers that give their memory back to the pool."""

    def free(self: Any) -> None:
        _pinned.setdefault(nbytes, []).append(self.storage)

    return type("PinnedMemory", (ctypes.c_char * nbytes,), {"__del__": free})


def alloc_pinned_memory(nbytes: int, limit: int) -> Any:
    """Host memory that the device reads when it comes to it, not when it is told to."""
    if nbytes > limit:
        raise CUDARuntimeError("cudaErrorMemoryAllocation")
    with _lock:
        free = _pinned.get(nbytes)
        storage = free.pop() if free else (ctypes.c_char * nbytes)()
        ctypes.memset(storage, GARBAGE, nbytes)
        handle = _handle(nbytes).from_buffer(storage)
        handle.storage = storage
        return handle


def is_pinned(array: np.ndarray) -> bool:
    return _pinned_memory(array) is not None


def as_device_sees(array: np.ndarray) -> np.ndarray:
    """Pinned memory without its owner, which a copy does not keep alive; of other memory a copy."""
    memory = _pinned_memory(array)
    if memory is None:
        return array.copy()
    start = array.ctypes.data - ctypes.addressof(memory.storage)
    whole = np.frombuffer(memory.storage, np.uint8)
    return whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape)


def _pinned_memory(array: np.ndarray) -> Any:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    return base if type(base).__name__ == "PinnedMemory" else None
