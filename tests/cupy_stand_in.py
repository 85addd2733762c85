"""A module in CuPy's place, on the CPU: what the cuda device and the codecs use of it, no more.

"Device" arrays are objects of their own that numpy cannot take by accident, as CuPy's. Kernels are those of the CPU
library. Memory can run short, and launches and copies happen only when somebody waits for them: what a real GPU may do,
this one does.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvzip.devices.cpu import Cpu


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class CUDADriverError(RuntimeError):
    pass


class CompileError(Exception):
    pass


class OutOfMemoryError(MemoryError):
    pass


@dataclass
class Machine:
    """What the stand-in pretends, and what was done with it."""

    gpus: int = 1
    memory: int = 1 << 30
    cuda_version: int = 13000
    available: int = 1 << 30
    current: list[int] = field(default_factory=lambda: [0])
    pending: list[Callable[[], None]] = field(default_factory=list)
    launches: list[tuple[str, tuple[int, ...], tuple[int, ...], int]] = field(default_factory=list)
    compiled: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    fault: Exception | None = None

    def run(self, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        warps, *rest = arguments
        self.launches.append((kernel, grid, block, int(warps)))
        values = [each.memory if isinstance(each, NdArray) else each for each in rest]
        self.pending.append(lambda: Cpu(1).launch(kernel, int(warps), *values))

    def finish(self) -> None:
        while self.pending:
            self.pending.pop(0)()
        if self.fault is not None:
            raise self.fault


class NdArray:
    """A cupy.ndarray: its memory is another's, so that ``numpy`` cannot read it unasked."""

    def __init__(self, memory: np.ndarray, machine: Machine, gpu: int) -> None:
        self.memory = memory
        self._machine = machine
        self._gpu = gpu

    def __array__(self, *_: Any, **__: Any) -> None:
        raise TypeError("implicit conversion to a NumPy array is not allowed; use .get()")

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.memory, name)
        return self._wrapped(value) if not callable(value) else lambda *a, **k: self._wrapped(value(*map(bare, a), **k))

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.memory.__array_interface__["data"][0])

    @property
    def device(self) -> Any:
        return types.SimpleNamespace(id=self._gpu)

    def get(self, out: np.ndarray | None = None, blocking: bool = True) -> np.ndarray:
        out = np.empty_like(self.memory) if out is None else out
        assert out.dtype == self.memory.dtype and out.shape == self.memory.shape

        def copy() -> None:
            out[...] = self.memory

        self._machine.pending.append(copy)
        if blocking:
            self._machine.finish()
        return out

    def set(self, source: np.ndarray) -> None:
        assert type(source) is np.ndarray and source.dtype == self.memory.dtype and source.dtype.isbuiltin == 1
        later = source if _is_pinned(source) else source.copy()

        def copy() -> None:
            self.memory[...] = later

        self._machine.pending.append(copy)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, NdArray):
            self._machine.finish()
        return self._wrapped(self.memory[bare(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._machine.finish()
        self.memory[bare(key)] = bare(value)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self.memory)))

    def __len__(self) -> int:
        return len(self.memory)

    def __truediv__(self, other: Any) -> Any:
        self._machine.finish()
        return self._wrapped(self.memory / bare(other))

    def __lt__(self, other: Any) -> Any:
        self._machine.finish()
        return self._wrapped(self.memory < bare(other))

    def max(self, **options: Any) -> Any:
        self._machine.finish()
        return self._wrapped(np.asarray(self.memory.max(**options)))

    def _wrapped(self, value: Any) -> Any:
        return NdArray(value, self._machine, self._gpu) if isinstance(value, np.ndarray) else value


def bare(value: Any) -> Any:
    """The memory of a stand-in array; a numpy array must not be mixed with those."""
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError(f"Unsupported type {type(value)}")
    return value.memory if isinstance(value, NdArray) else value


class _Pinned(np.ndarray):
    """Marks memory that a copy reads late."""


def _is_pinned(array: np.ndarray) -> bool:
    base: Any = array
    while base is not None:
        if isinstance(base, _Pinned):
            return True
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return False


class _Context:
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def make(machine: Machine) -> types.ModuleType:
    """The module ``cupy`` for a machine."""
    cupy = types.ModuleType("cupy")

    class Device(_Context):
        def __init__(self, index: int = 0) -> None:
            self.id = index

        def __enter__(self) -> Any:
            machine.current.append(self.id)
            return self

        def __exit__(self, *_: object) -> None:
            machine.current.pop()

    class Stream(_Context):
        def synchronize(self) -> None:
            machine.finish()

    class MemoryPool:
        def malloc(self, nbytes: int) -> int:
            if nbytes > machine.available:
                raise OutOfMemoryError(nbytes)
            return nbytes

    allocators: list[Callable[[int], Any]] = []

    @contextmanager
    def using_allocator(allocator: Callable[[int], Any]) -> Any:
        allocators.append(allocator)
        yield
        allocators.pop()

    def empty(shape: Any, dtype: Any = float) -> NdArray:
        memory = np.empty(shape, dtype)
        if memory.dtype.isbuiltin != 1:
            raise TypeError(f"Unsupported dtype {memory.dtype}")
        if allocators:
            allocators[-1](memory.nbytes)
        memory.reshape(-1).view(np.uint8)[...] = 0xDD
        return NdArray(memory, machine, machine.current[-1])

    def on_memory(function: Callable[..., np.ndarray]) -> Callable[..., NdArray]:
        def call(*arguments: Any) -> NdArray:
            machine.finish()
            plain = [[bare(x) for x in a] if isinstance(a, list) else bare(a) for a in arguments]
            return NdArray(function(*plain), machine, machine.current[-1])

        return call

    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...], backend: str) -> None:
            assert backend == "nvrtc" and "#include" not in code.replace('#include "warp_cpu.h"', "").replace(
                "#include <immintrin.h>", ""
            )
            self._source = code, options

        def compile(self) -> None:
            machine.compiled.append(self._source)

        def get_function(self, name: str) -> Callable[..., None]:
            return lambda grid, block, arguments: machine.run(name, grid, block, arguments)

    def device_count() -> int:
        if machine.gpus < 0:
            raise CUDARuntimeError(35, "cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        return machine.gpus

    cupy.ndarray, cupy.empty, cupy.dtype, cupy.RawModule = NdArray, empty, np.dtype, RawModule
    cupy.ascontiguousarray = lambda a: a if a.memory.flags.c_contiguous else on_memory(np.ascontiguousarray)(a)
    cupy.concatenate, cupy.where = on_memory(np.concatenate), on_memory(np.where)
    cupy.cuda = types.SimpleNamespace(
        Device=Device,
        Stream=Stream,
        MemoryPool=MemoryPool,
        using_allocator=using_allocator,
        alloc_pinned_memory=lambda nbytes: np.empty(nbytes, np.uint8).view(_Pinned),
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        compiler=types.SimpleNamespace(CompileException=CompileError),
        driver=types.SimpleNamespace(CUDADriverError=CUDADriverError),
        runtime=types.SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDeviceCount=device_count,
            runtimeGetVersion=lambda: machine.cuda_version,
            getDeviceProperties=lambda index: {"name": b"Stand-in"},
            memGetInfo=lambda: (machine.available, machine.memory),
        ),
    )
    return cupy
