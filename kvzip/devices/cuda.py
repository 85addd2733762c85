"""A GPU as a device: the same kernels compiled by NVRTC through CuPy, CuPy's arrays, a stream and two lanes of copies.

A launch returns before the kernel has run. What is launched and allocated here is in the order of one stream, so memory
may be freed and used again while kernels are still at work; :meth:`Cuda.to_host` waits. The uploads and downloads of
:mod:`kvzip.devices.cuda_copies` run beside it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np

from kvzip.devices import cuda_source
from kvzip.devices.base import OUT_OF_DEVICE_MEMORY, SECTION_PADDING, Array, Arrival, Device
from kvzip.devices.cuda_compile import CompileError, compiled
from kvzip.devices.cuda_copies import Lane, Prefetched
from kvzip.devices.cuda_setup import NoGpuError, open_cupy
from kvzip.devices.runs import gathered
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
            self._up, self._down = Lane(self._cupy, self._stream), Lane(self._cupy, self._stream)
            properties = self._cupy.cuda.runtime.getDeviceProperties(index)
            free, self.memory = self._cupy.cuda.runtime.memGetInfo()
        self._model = properties["name"].decode()
        self.batch_bytes = min(BATCH_BYTES, max(free // 16, 1 << 20))
        self._pool = self._cupy.cuda.MemoryPool()
        self._prefetched: WeakSet[Prefetched] = WeakSet()
        self._lock = threading.Lock()
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
            self._up.finish()
            self._down.finish()
            self._stream.synchronize()

    def to_device(self, array: Any) -> Array:
        """An array of this device: a copy of a numpy array; the bits of a CuPy array or torch tensor, where they are.

        A copy from pinned memory (:meth:`host_buffer`) may still be under way: keep the source and do not change it
        before the next :meth:`to_host` or :meth:`synchronize`.
        """
        with self.activate():
            if isinstance(array, self._cupy.ndarray) or _on_a_gpu(array):
                return self._adopt(array)
            host = np.ascontiguousarray(_plain(np.asarray(array)))
            device = self._empty(host.nbytes).view(host.dtype).reshape(host.shape)
            if host.nbytes:
                device.set(host)
            return device

    def begin_upload(self, arrays: Sequence[Any]) -> Arrival:
        with self.activate():
            if any(isinstance(array, self._cupy.ndarray) or _on_a_gpu(array) for array in arrays):
                here = [self.to_device(array) for array in arrays]
                return lambda: here
            packed, places = self._in_one_piece([_as_bytes(array) for array in arrays])
            prefetched = self._prefetch(packed)

        def arrive() -> list[Array]:
            with self.activate():
                array = prefetched.take(self._stream) if prefetched else None
                if array is None:
                    array = self._empty(packed.nbytes)
                    self._stream.wait_event(self._send(packed, array))
                return [array[place] for place in places]

        return arrive

    def _prefetch(self, packed: np.ndarray) -> Prefetched | None:
        """A copy in memory that nothing else wants."""
        self._up.tidy()
        try:
            memory = self._take(packed.nbytes + SECTION_PADDING)
        except self._cupy.cuda.memory.OutOfMemoryError:
            return None
        array = self._cupy.ndarray((packed.nbytes,), np.uint8, memory)
        prefetched = Prefetched(array, self._send(packed, array))
        with self._lock:
            self._prefetched.add(prefetched)
        return prefetched

    def _send(self, packed: np.ndarray, array: Array) -> Any:
        """Begin a copy to the device; returns the event of its end."""

        def copy(stream: Any) -> None:
            if packed.nbytes:
                array.set(packed, stream)

        return self._up.begin(copy, packed, array)

    def _in_one_piece(self, hosts: Sequence[np.ndarray]) -> tuple[np.ndarray, list[slice]]:
        """Host memory that holds all the arrays, and where in it: what they lie in, or a copy if that is scattered."""
        span = _span(hosts)
        if span is not None:
            return span
        starts = _places([host.nbytes for host in hosts])
        packed = self.host_buffer(starts[-1])
        places = [slice(start, start + host.nbytes) for start, host in zip(starts, hosts, strict=False)]
        for host, place in zip(hosts, places, strict=True):
            packed[place] = host
        return packed, places

    def to_host(self, array: Array, out: np.ndarray | None = None) -> Any:
        with self.activate():
            source = self._cupy.ascontiguousarray(array)
            host = _shaped(self.host_buffer(source.nbytes), source) if out is None else out
            target = _as_target(host, source)
            if source.nbytes:
                source.get(out=target)
            self._up.tidy()
            self._down.tidy()
            return host

    def begin_download(self, arrays: Sequence[Array], out: Sequence[np.ndarray] | None = None) -> Arrival:
        with self.activate():
            sources = [self._cupy.ascontiguousarray(array) for array in arrays]
            if out is None:
                whole, places = gathered(sources, self)
                room = self.host_buffer(whole.nbytes)
                hosts = [_shaped(room[place], source) for place, source in zip(places, sources, strict=True)]
                sources, targets = [whole], [room]
            else:
                hosts = list(out)
                targets = [_as_target(host, source) for host, source in zip(hosts, sources, strict=True)]

            def copy(stream: Any) -> None:
                for source, target in zip(sources, targets, strict=True):
                    if source.nbytes:
                        source.get(stream, out=target, blocking=False)

            done = self._down.begin(copy, sources, targets)

        def arrive() -> list[Any]:
            with self.activate():
                done.synchronize()
                self._up.tidy()
                self._down.tidy()
            return hosts

        return arrive

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

    def _take(self, nbytes: int) -> Any:
        """From the pool, which frees what it keeps before it gives up. Raises CuPy's OutOfMemoryError."""
        return self._pool.malloc(nbytes)

    def _allocate(self, nbytes: int) -> Any:
        """What CuPy's arrays are made of while this device is active."""
        out_of_memory = self._cupy.cuda.memory.OutOfMemoryError
        try:
            return self._take(nbytes)
        except out_of_memory:
            self._make_room()
        try:
            return self._take(nbytes)
        except out_of_memory as error:
            free, total = self._cupy.cuda.runtime.memGetInfo()
            raise LimitError(
                f"out of memory on {self}: {nbytes >> 20} MiB asked for, {free >> 20} of {total >> 20} MiB free; "
                "end other programs on it, use smaller blocks (--block-tokens), or --device cpu",
                code=OUT_OF_DEVICE_MEMORY,
            ) from error

    def _make_room(self) -> None:
        """Free what can be had again or is soon done with: what was brought ahead, what waits for the bus.

        torch keeps what it has freed, too.
        """
        with self._lock:
            for prefetched in self._prefetched:
                prefetched.give_up()
        self._up.finish()
        self._down.finish()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

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


def _as_bytes(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _as_target(out: np.ndarray, source: Array) -> np.ndarray:
    """Host memory as what an array of the device can be copied to."""
    if not out.flags.c_contiguous:
        raise ValueError(f"cannot copy into an array that is not C-contiguous, of strides {out.strides}")
    return _shaped(_plain(out), source)


def _shaped(host: np.ndarray, source: Array) -> np.ndarray:
    """Host memory of as many bytes with the shape and dtype of an array of the device."""
    shaped: np.ndarray = host.view(source.dtype).reshape(source.shape)
    return shaped


def _span(hosts: Sequence[np.ndarray]) -> tuple[np.ndarray, list[slice]] | None:
    """Where in one buffer all these byte arrays lie, and the piece of it from the first to the last; None if it is not
    one, or if much of it is something else.
    """
    owners = [_owner(host) for host in hosts]
    if not owners or any(owner is not owners[0] for owner in owners) or not owners[0].flags.c_contiguous:
        return None
    origin = _address(owners[0])
    starts = np.array([_address(host) - origin for host in hosts])
    ends = starts + [host.nbytes for host in hosts]
    first, last = int(starts.min()), int(ends.max())
    if ((starts - first) % 8).any() or last - first > 2 * sum(host.nbytes for host in hosts):
        return None
    places = [slice(start, end) for start, end in zip((starts - first).tolist(), (ends - first).tolist(), strict=True)]
    return owners[0].reshape(-1).view(np.uint8)[first:last], places


def _owner(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


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
