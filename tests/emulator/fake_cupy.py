"""What ``kvzip.devices.cuda`` uses of CuPy, without a GPU: device memory that is the host's, kernels that are emulated.

Stricter than a GPU where that finds mistakes: host and device arrays do not mix; memory begins as garbage, and kernels
may touch no memory but what is allocated; what is asynchronous there runs in any order that ``fake_streams`` allows.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvzip.devices.build import BuildError
from kvzip.devices.cuda_compile import CompileError
from tests.emulator import building, fake_streams
from tests.emulator.fake_streams import (
    CUDARuntimeError,
    Event,
    Memory,
    MemoryPool,
    OutOfMemoryError,
    Stream,
    current_stream,
    is_pinned,
)
from tests.emulator.module import Buffer, Module


class CUDADriverError(RuntimeError):
    pass


class ndarray:  # noqa: N801  (CuPy's name)
    """A numpy array in device memory."""

    __array_priority__ = 1000

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.float64, memptr: Memory | None = None) -> None:
        dtype = np.dtype(dtype)
        assert dtype.isbuiltin == 1, f"CuPy has no {dtype}"
        nbytes = int(np.prod(shape)) * dtype.itemsize
        self._memory = cuda.allocator(nbytes) if memptr is None else memptr
        self._here = self._memory.bytes[:nbytes].view(dtype).reshape(shape)

    @classmethod
    def _view(cls, memory: Memory, here: np.ndarray) -> ndarray:
        view = cls.__new__(cls)
        view._memory, view._here = memory, here
        return view

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

    def set(self, arr: np.ndarray, stream: Stream | None = None) -> None:
        assert (arr.shape, arr.dtype) == (self.shape, self.dtype)
        source, target = fake_streams.as_device_sees(arr), self._here
        (stream or current_stream()).add(lambda: target.__setitem__(..., source))

    def get(
        self, stream: Stream | None = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True
    ) -> np.ndarray:
        result = np.empty_like(self._here) if out is None else out
        assert (result.shape, result.dtype) == (self.shape, self.dtype)
        stream, source = stream or current_stream(), self._here
        target = fake_streams.as_device_sees(result) if is_pinned(result) else result
        stream.add(lambda: target.__setitem__(..., source))
        if blocking or not is_pinned(result):
            stream.synchronize()
        return result


_LAZY = (np.ndarray.view, np.ndarray.reshape, np.ndarray.transpose, np.ndarray.__getitem__, np.ascontiguousarray)
"""They need not wait for what an array will hold, unless they have to copy it."""

_LATER = (np.ndarray.__setitem__, np.ndarray.fill)
"""They give nothing back, and are done when the stream comes to them."""


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
        if function in _LATER:
            current_stream().add(lambda: function(*arguments, **options))
            return None
        current_stream().synchronize()
        result = function(*arguments, **options)
        if not isinstance(result, np.ndarray | np.generic):
            return result
        view = _as_view(result, sources)
        return _copied(np.asarray(result)) if view is None else view

    return call


def _as_view(result: Any, sources: list[ndarray]) -> ndarray | None:
    for source in sources:
        if isinstance(result, np.ndarray) and (not result.size or np.may_share_memory(result, source._memory.bytes)):
            return ndarray._view(source._memory, result)
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
    return ndarray(shape if isinstance(shape, tuple) else (shape,), dtype)


def _copied(host: np.ndarray) -> ndarray:
    array = empty(host.shape, host.dtype)
    array.set(host)
    return array


def asarray(array: Any) -> ndarray:
    return array if isinstance(array, ndarray) else _copied(np.asarray(array))


class RawModule:
    """Kernels of a source, emulated."""

    def __init__(self, code: str) -> None:
        self.code = code

    def get_function(self, name: str) -> Callable[..., None]:
        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            values = [np.uint64(x.data.ptr) if isinstance(x, ndarray) else x for x in arguments]
            # What is allocated now; freed meanwhile, it may be others' by then, but it is still there.
            rooms = [memory.bytes for memory in list(Memory.alive)]

            def run() -> None:
                buffers = [Buffer(room.ctypes.data, room.ctypes.data + room.nbytes, True) for room in rooms]
                _module(self.code).launch(name, *grid, *block, values, buffers)

            current_stream().add(run)

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


class _Cuda:
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
        memGetInfo=lambda: (MemoryPool.total - MemoryPool.used(), MemoryPool.total),
    )
    pinned_limit = 1 << 30

    @property
    def allocator(self) -> Callable[[int], Memory]:
        """Of this thread."""
        return getattr(_local, "allocator", _default_allocator)

    @contextlib.contextmanager
    def using_allocator(self, allocator: Callable[[int], Memory]) -> Iterator[None]:
        before, _local.allocator = self.allocator, allocator
        try:
            yield
        finally:
            _local.allocator = before

    def alloc_pinned_memory(self, nbytes: int) -> Any:
        return fake_streams.alloc_pinned_memory(nbytes, self.pinned_limit)

    @staticmethod
    def Device(index: int) -> contextlib.AbstractContextManager[None]:  # noqa: N802  (CuPy's name)
        assert index == 0
        return contextlib.nullcontext()


_local = threading.local()
_default_allocator = MemoryPool().malloc
cuda = _Cuda()


def __getattr__(name: str) -> Any:
    """Everything else is numpy's, on device arrays."""
    found = getattr(np, name)
    if isinstance(found, type) or not callable(found):
        return found
    return _applied(found)


cupy = sys.modules[__name__]
