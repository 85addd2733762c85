"""What ``kvzip.devices.cuda`` uses of CuPy, without a GPU: device memory that is the host's, kernels that are emulated.

Stricter than a GPU where that finds mistakes: host and device arrays do not mix; memory begins as garbage, and kernels
may touch no memory but what is allocated; what is asynchronous there runs as late as it may here, when somebody waits.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from kvzip.devices.build import BuildError
from kvzip.devices.cuda_compile import CompileError
from tests.emulator import building
from tests.emulator.module import Buffer, Module

GARBAGE = 0xA5
ALIGNMENT = 512


class OutOfMemoryError(MemoryError):
    pass


class CUDARuntimeError(RuntimeError):
    pass


class CUDADriverError(RuntimeError):
    pass


class Memory:
    """A piece of device memory."""

    alive: ClassVar[weakref.WeakSet[Memory]] = weakref.WeakSet()

    def __init__(self, nbytes: int) -> None:
        room = np.full(nbytes + ALIGNMENT, GARBAGE, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        self.bytes = room[start : start + nbytes]
        Memory.alive.add(self)

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data


class PinnedMemory(bytearray):
    """Host memory that the device reads when it comes to it, not when it is told to."""


class MemoryPool:
    """Hands out memory as long as the device, of ``total`` bytes, has some."""

    total = 1 << 30

    def malloc(self, nbytes: int) -> Memory:
        if self.used() + nbytes > MemoryPool.total:
            Stream.synchronize()  # what was freed behind work that was still to be done
        if self.used() + nbytes > MemoryPool.total:
            raise OutOfMemoryError(f"{nbytes} bytes of {MemoryPool.total}")
        return Memory(nbytes)

    @staticmethod
    def used() -> int:
        return sum(memory.bytes.nbytes for memory in Memory.alive)


class Stream:
    """Work that is done when somebody waits for it. Blocking streams keep one order with the default one: one list."""

    pending: ClassVar[list[Callable[[], None]]] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    @staticmethod
    def synchronize() -> None:
        while Stream.pending:
            Stream.pending.pop(0)()


class Event:
    """A moment in the order of the work."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        Stream.synchronize()


class ndarray:  # noqa: N801  (CuPy's name)
    """A numpy array in device memory."""

    __array_priority__ = 1000

    def __init__(self, memory: Memory, here: np.ndarray) -> None:
        self._memory, self._here = memory, here

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._here, name)
        return _applied(getattr(np.ndarray, name), self) if callable(value) else value

    def __array__(self, *arguments: Any, **options: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self._here.__array_interface__["data"][0])

    @property
    def device(self) -> SimpleNamespace:
        return SimpleNamespace(id=0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def set(self, host: np.ndarray) -> None:
        assert (host.shape, host.dtype) == (self.shape, self.dtype)
        source = host if _is_pinned(host) else host.copy()
        Stream.pending.append(lambda: self._here.__setitem__(..., source))

    def get(self, out: np.ndarray | None = None, blocking: bool = True) -> np.ndarray:
        target = np.empty_like(self._here) if out is None else out
        assert (target.shape, target.dtype) == (self.shape, self.dtype)
        Stream.pending.append(lambda: target.__setitem__(..., self._here))
        if blocking or not _is_pinned(target):
            Stream.synchronize()
        return target


_LAZY = (np.ndarray.view, np.ndarray.reshape, np.ndarray.transpose, np.ndarray.__getitem__)
"""They need not wait for what an array will hold, unless they have to copy it."""


def _applied(function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A numpy function as one on device arrays: after all that was asked for before it, its results on the device."""

    def call(*rest: Any, **options: Any) -> Any:
        sources: list[ndarray] = []
        arguments = [_here(argument, sources) for argument in (*first, *rest)]
        options = {name: _here(option, sources) for name, option in options.items()}
        if function in _LAZY and len(sources) == 1:
            view = _as_view(function(*arguments, **options), sources)
            if view is not None:
                return view
        Stream.synchronize()
        result = function(*arguments, **options)
        if not isinstance(result, np.ndarray | np.generic):
            return result
        view = _as_view(result, sources)
        return _copied(np.asarray(result)) if view is None else view

    return call


def _as_view(result: Any, sources: list[ndarray]) -> ndarray | None:
    for source in sources:
        if isinstance(result, np.ndarray) and (not result.size or np.may_share_memory(result, source._memory.bytes)):
            return ndarray(source._memory, result)
    return None


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: _applied(getattr(np.ndarray, name), self)(*others)


for _name in (
    *(
        "getitem",
        "setitem",
        "add",
        "radd",
        "sub",
        "rsub",
        "mul",
        "rmul",
        "iadd",
        "isub",
        "truediv",
        "floordiv",
        "mod",
        "and",
        "or",
        "xor",
    ),
    *("lshift", "rshift", "invert", "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne"),
):
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))


def _here(argument: Any, sources: list[ndarray]) -> Any:
    if isinstance(argument, ndarray):
        sources.append(argument)
        return argument._here
    if isinstance(argument, np.ndarray) and argument.ndim:
        raise TypeError(f"Unsupported type {type(argument)}")
    if isinstance(argument, list | tuple):
        return type(argument)(_here(one, sources) for one in argument)
    return argument


def empty(shape: int | tuple[int, ...], dtype: Any = np.float64) -> ndarray:
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = cuda.allocator(max(nbytes, 1))
    return ndarray(memory, memory.bytes[:nbytes].view(dtype).reshape(shape))


def _copied(host: np.ndarray) -> ndarray:
    array = empty(host.shape, host.dtype)
    array._here[...] = host
    return array


def asarray(array: Any) -> ndarray:
    return array if isinstance(array, ndarray) else _copied(np.asarray(array))


def _is_pinned(array: np.ndarray) -> bool:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, PinnedMemory)


class RawModule:
    """Kernels of a source, emulated."""

    def __init__(self, code: str) -> None:
        self.code = code

    def get_function(self, name: str) -> Callable[..., None]:
        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            values = [np.uint64(x.data.ptr) if isinstance(x, ndarray) else x for x in arguments]
            # Memory that is freed before the kernel runs is not given away before it has run.
            memory = list(Memory.alive)

            def run() -> None:
                buffers = [Buffer(one.address, one.address + one.bytes.nbytes, True) for one in memory]
                _module(self.code).launch(name, *grid, *block, values, buffers)

            Stream.pending.append(run)

        return launch


def emulated(code: str) -> RawModule:
    """What ``RawModule(path=...)`` gives for the compiled source."""
    try:
        _module(code)
    except BuildError as error:
        raise CompileError(str(error)) from error
    return RawModule(code)


@cache
def _module(code: str) -> Module:
    return Module(building.from_cuda(code, "raw-module"))


class _Cuda(SimpleNamespace):
    """The namespace ``cupy.cuda``."""

    Stream = Stream
    Event = Event
    MemoryPool = MemoryPool
    memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    driver = SimpleNamespace(CUDADriverError=CUDADriverError)
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: 1,
        runtimeGetVersion=lambda: 13000,
        getDeviceProperties=lambda index: {"name": b"Emulated GPU"},
        memGetInfo=lambda: (MemoryPool.total - sum(one.bytes.nbytes for one in Memory.alive), MemoryPool.total),
    )
    pinned_limit = 1 << 30

    def __init__(self) -> None:
        super().__init__(allocator=MemoryPool().malloc)

    @contextlib.contextmanager
    def using_allocator(self, allocator: Callable[[int], Memory]) -> Iterator[None]:
        before, self.allocator = self.allocator, allocator
        try:
            yield
        finally:
            self.allocator = before

    def alloc_pinned_memory(self, nbytes: int) -> PinnedMemory:
        if nbytes > self.pinned_limit:
            raise CUDARuntimeError("cudaErrorMemoryAllocation")
        return PinnedMemory(bytes([GARBAGE]) * nbytes)

    @staticmethod
    def Device(index: int) -> contextlib.AbstractContextManager[None]:  # noqa: N802  (CuPy's name)
        assert index == 0
        return contextlib.nullcontext()


cuda = _Cuda()


def __getattr__(name: str) -> Any:
    """Everything else is numpy's, on device arrays."""
    found = getattr(np, name)
    if isinstance(found, type) or not callable(found):
        return found
    return _applied(found)


cupy = sys.modules[__name__]
