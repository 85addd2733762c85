"""A GPU as a device: the same kernels compiled by NVRTC through CuPy, CuPy's arrays, one stream.

A launch returns before the kernel has run. What is launched, copied and allocated here is in the order of one stream,
so memory may be freed and used again while kernels are still at work; :meth:`Cuda.to_host` waits.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvzip.devices import cuda_source
from kvzip.devices.base import OUT_OF_DEVICE_MEMORY, SECTION_PADDING, Array, Device
from kvzip.devices.cuda_compile import CompileError, compiled
from kvzip.devices.cuda_setup import NoGpuError, open_cupy
from kvzip.errors import KvzipError, LimitError, UnsupportedError

BATCH_BYTES = 128 << 20
"""A warp decodes its 1024 tokens one after the other: to hide latency a GPU needs thousands of warps, 64 KB each."""

PINNED_FROM = 1 << 16
"""Smaller copies are staged by the driver as fast."""

_SCALARS = (np.int32, np.uint32, np.int64, np.uint64, np.float32)
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


class Cuda(Device):
    """GPU number ``index``.

    Arrays of dtypes that CuPy has not (bfloat16, float8) are unsigned integers of the same size that carry their bits,
    and arrays of descriptors are bytes. Any number of threads may use the device; their work is done in one order.

    Raises:
        NoGpuError: no driver, no CuPy, no NVRTC, or versions that do not go together; an UnsupportedError.
        UsageError: there is no GPU of that number.
    """

    name = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.xp = self._cupy = open_cupy(index)
        self.index = index
        self._gpu = self._cupy.cuda.Device(index)
        with self._gpu:
            # A blocking stream: what a caller does on CuPy's default stream meanwhile stays in order with it.
            self._stream = self._cupy.cuda.Stream()
            properties = self._cupy.cuda.runtime.getDeviceProperties(index)
            free, self.memory = self._cupy.cuda.runtime.memGetInfo()
        self._model = properties["name"].decode()
        self.batch_bytes = min(BATCH_BYTES, max(free // 16, 1 << 20))
        self._pool = self._cupy.cuda.MemoryPool()
        self._active = threading.local()
        self._modules: dict[str, Any] = {}
        self._kernels: dict[str, Any] = {}

    def __str__(self) -> str:
        return f"cuda:{self.index}, {self._model}, {self.memory / 2**30:.0f} GiB"

    @contextmanager
    def activate(self) -> Iterator[None]:
        if getattr(self._active, "here", False):
            yield
            return
        with self._gpu, self._stream, self._cupy.cuda.using_allocator(self._allocate):
            self._active.here = True
            try:
                yield
            except (self._cupy.cuda.runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError) as error:
                raise _fault(self, error) from error
            finally:
                self._active.here = False

    def launch(self, kernel: str, warps: int, *arguments: Array | int | float) -> None:
        """Run ``kernel`` for warps ``0..warps-1``; returns at once, what follows on this device waits for it.

        Raises:
            UnsupportedError: there is no such kernel, or it does not compile for this GPU.
            TypeError: an argument is neither an array of this device nor a numpy scalar of a type that kernels take.
            ValueError: an array is not C-contiguous.
        """
        function = self._kernels.get(kernel) or self._find(kernel)
        for at, argument in enumerate(arguments):
            self._check(argument, kernel, at)
        if warps <= 0:
            return
        blocks = -(-warps // cuda_source.WARPS_PER_BLOCK)
        with self.activate():
            function((blocks,), (cuda_source.BLOCK_THREADS,), (np.int32(warps), *arguments))

    def address(self, array: Array) -> int:
        return int(array.data.ptr)

    def synchronize(self) -> None:
        with self.activate():
            self._stream.synchronize()

    def to_device(self, array: Any) -> Array:
        """An array of this device: a copy of a numpy array; the bits of a CuPy array or torch tensor, where they are.

        A copy from pinned memory (:meth:`host_buffer`) may still be under way: change the source only after the next
        :meth:`to_host` or :meth:`synchronize`.
        """
        with self.activate():
            if isinstance(array, self._cupy.ndarray) or _on_a_gpu(array):
                return self._adopt(array)
            host = np.ascontiguousarray(_plain(np.asarray(array)))
            device = self._empty(host.nbytes).view(host.dtype).reshape(host.shape)
            if host.nbytes:
                device.set(host)
            return device

    def to_device_all(self, arrays: Sequence[Any]) -> list[Array]:
        hosts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        starts = _places([host.nbytes for host in hosts])
        packed = self.host_buffer(starts[-1])
        for host, start in zip(hosts, starts[:-1], strict=True):
            packed[start : start + host.nbytes] = host
        joined = self.to_device(packed)
        # The packed copy is pinned and would be used again while it is being read.
        self.synchronize()
        return [joined[start : start + host.nbytes] for host, start in zip(hosts, starts[:-1], strict=True)]

    def to_host(self, array: Array, out: np.ndarray | None = None) -> Any:
        if out is not None and not out.flags.c_contiguous:
            raise ValueError(f"cannot copy into an array that is not C-contiguous, of strides {out.strides}")
        with self.activate():
            source = self._cupy.ascontiguousarray(array)
            if out is None:
                out = self.host_buffer(source.nbytes).view(source.dtype).reshape(source.shape)
            if source.nbytes:
                source.get(out=_plain(out).view(source.dtype).reshape(source.shape))
            return out

    def to_host_all(self, arrays: Sequence[Array]) -> list[Any]:
        with self.activate():
            sources = [self._cupy.ascontiguousarray(array) for array in arrays]
            starts = _places([source.nbytes for source in sources])
            packed = self.host_buffer(starts[-1])
            hosts = []
            for source, start in zip(sources, starts[:-1], strict=True):
                host = packed[start : start + source.nbytes].view(source.dtype).reshape(source.shape)
                if source.nbytes:
                    source.get(out=host, blocking=False)
                hosts.append(host)
            self._stream.synchronize()
            return hosts

    def host_buffer(self, nbytes: int) -> np.ndarray:
        """Pinned memory, which the GPU reads and writes by itself at the full rate of its bus; pooled."""
        if nbytes >= PINNED_FROM:
            try:
                # Powers of two: the pool hands memory out again only for an equal size.
                memory = self._cupy.cuda.alloc_pinned_memory(1 << (nbytes - 1).bit_length())
                return np.frombuffer(memory, np.uint8, nbytes)
            except self._cupy.cuda.runtime.CUDARuntimeError:
                pass  # the system lets no more memory be pinned: other memory is slower, no less right
        return np.empty(nbytes, np.uint8)

    def _empty(self, nbytes: int) -> Array:
        """``nbytes`` that a kernel may overread by what codecs are promised behind their sections."""
        return self._cupy.empty(nbytes + SECTION_PADDING, np.uint8)[:nbytes]

    def _allocate(self, nbytes: int) -> Any:
        """From the pool, which frees what it keeps before it gives up; torch keeps what it has freed, too."""
        out_of_memory = self._cupy.cuda.memory.OutOfMemoryError
        try:
            return self._pool.malloc(nbytes)
        except out_of_memory:
            if "torch" in sys.modules:
                sys.modules["torch"].cuda.empty_cache()
        try:
            return self._pool.malloc(nbytes)
        except out_of_memory as error:
            free, total = self._cupy.cuda.runtime.memGetInfo()
            raise LimitError(
                f"out of memory on {self}: {nbytes >> 20} MiB asked for, {free >> 20} of {total >> 20} MiB free; "
                "end other programs on it, use smaller blocks (--block-tokens), or --device cpu",
                code=OUT_OF_DEVICE_MEMORY,
            ) from error

    def _adopt(self, array: Any) -> Array:
        if type(array).__module__.partition(".")[0] == "torch":
            # DLPack between two libraries that do not know the same dtypes: integers go through all of them.
            torch = sys.modules["torch"]
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[array.element_size()]
            array = array.detach().view(bits)
        if not isinstance(array, self._cupy.ndarray):
            array = self._cupy.from_dlpack(array)
        if array.device.id != self.index:
            array = self._cupy.asarray(array)
        return array.view(f"u{array.itemsize}")

    def _check(self, argument: Any, kernel: str, at: int) -> None:
        if isinstance(argument, self._cupy.ndarray):
            if not argument.flags.c_contiguous:
                raise ValueError(
                    f"argument {at} of kernel {kernel!r} is not C-contiguous: shape {argument.shape}, "
                    f"strides {argument.strides}; pass its address and strides in a descriptor, or a copy"
                )
        elif type(argument) not in _SCALARS:
            raise TypeError(
                f"argument {at} of kernel {kernel!r} is a {type(argument).__name__}: expected a cupy array or one of "
                + ", ".join(f"np.{known.__name__}" for known in _SCALARS)
            )

    def compile(self, file: str) -> Any:
        """The kernels of a ``.cu`` file as a CuPy module: compiled for this GPU, or as they were kept on disk.

        A launch does it by itself.
        """
        if file not in self._modules:
            with self.activate():
                try:
                    self._modules[file] = self._load(file)
                except CompileError as error:
                    raise UnsupportedError(
                        f"the kernels of {file} do not compile for {self}: {error}; --device cpu needs no compiler",
                        code="cuda-compile",
                    ) from error
        return self._modules[file]

    def _load(self, file: str) -> Any:
        module = self._cupy.RawModule(path=str(compiled(file, int(self._gpu.compute_capability))))
        module.compile()
        return module

    def _find(self, kernel: str) -> Any:
        self._kernels[kernel] = self.compile(cuda_source.file_of(kernel)).get_function(kernel)
        return self._kernels[kernel]


def _plain(array: np.ndarray) -> np.ndarray:
    """The same memory with a dtype that CuPy has: integers for ml_dtypes' numbers, bytes for structures."""
    if array.dtype.names:
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}")


def _on_a_gpu(array: Any) -> bool:
    return hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] in _DLPACK_CUDA


def _places(sizes: Sequence[int]) -> list[int]:
    """Where arrays of these sizes start in one buffer, at multiples of 64 bytes, and the buffer's size."""
    return [0, *np.cumsum([-(-size // 64) * 64 for size in sizes], dtype=np.int64).tolist()]


def _fault(device: Cuda, error: Exception) -> KvzipError:
    return KvzipError(
        f"{device} failed: {error}; this process cannot use it any more, --device cpu gives the same bytes",
        code="cuda-fault",
    )


__all__ = ["Cuda", "NoGpuError"]
