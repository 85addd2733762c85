"""What every device has: an array module, and one verb that runs a kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

Array = Any
"""A numpy array on the CPU, a cupy array on a GPU."""

Arrival = Callable[[], list[Any]]
"""A copy that is under way. Called, once, it gives the copied arrays to whoever may use them then."""

SECTION_PADDING = 128
"""Readable bytes behind the last section of a block: coders look ahead."""


OUT_OF_DEVICE_MEMORY = "out-of-gpu-memory"
"""The code of the LimitError after which less at a time may still do."""


class Device(ABC):
    """A place where kernels run.

    Codecs allocate with ``device.xp`` (numpy or cupy) and call :meth:`launch`; they never ask which device they are on.
    """

    name: str
    xp: ModuleType
    batch_bytes: int = 16 << 20
    """What one launch should have to do: enough for all cores, little enough for the caches between two kernels."""

    def activate(self) -> AbstractContextManager[None]:
        """Make this device the one on which the calling thread's arrays are allocated; cheap, and may be nested.

        Around all work on a device that is not the first of its kind.
        """
        return nullcontext()

    @abstractmethod
    def launch(self, kernel: str, warps: int, *arguments: Array | int | float) -> None:
        """Run ``kernel`` for warps ``0..warps-1``.

        Arguments are device arrays (passed as pointers; must be C-contiguous) and numpy scalars (passed by value with
        their own type: ``np.int32``, ``np.uint32``, ``np.uint64``, ``np.float32``). Returns when the results may be
        used by the next launch or by :meth:`to_host`. Every kernel has the signature ``(first warp, last warp,
        arguments...)`` on the CPU and ``(warps, arguments...)`` under CUDA, both made by the macro ``KERNEL`` in
        ``kernels/warp.h``.
        """

    @abstractmethod
    def address(self, array: Array) -> int:
        """The address of the first element of ``array``, for descriptors that hold pointers."""

    @abstractmethod
    def to_device(self, array: Any) -> Array:
        """A numpy array as an array of this device; no copy if it is one already."""

    @abstractmethod
    def to_host(self, array: Array, out: np.ndarray | None = None) -> Any:
        """An array of this device as a numpy array, in ``out`` (C-contiguous, of as many bytes) if that is given.

        Without ``out`` there is no copy on the CPU. Waits for what was launched before.
        """

    def begin_upload(self, arrays: Sequence[Any]) -> Arrival:
        """Begin to bring byte arrays here by one copy, while kernels run that were launched before.

        What it returns gives them to kernels that are launched after its call. Each starts at a multiple of 8 bytes,
        SECTION_PADDING follows the last. The sources must stay as they are until results that depend on them are on
        the host. Takes no memory that other work needs: then the copy begins when it is asked for.
        """
        return lambda: [self.to_device(array) for array in arrays]

    def begin_download(self, arrays: Sequence[Array], out: Sequence[np.ndarray] | None = None) -> Arrival:
        """Begin to bring arrays to the host, in ``out`` if that is given as for :meth:`to_host`, when they are done.

        Kernels that are launched later run meanwhile, and must not write to them. What it returns waits for the copy,
        in whichever thread it is called.
        """
        hosts = [self.to_host(array, None if out is None else out[at]) for at, array in enumerate(arrays)]
        return lambda: hosts

    def to_device_all(self, arrays: Sequence[Any]) -> list[Array]:
        """Many byte arrays by one copy; each starts at a multiple of 8 bytes, SECTION_PADDING follows the last."""
        return self.begin_upload(arrays)()

    def to_host_all(self, arrays: Sequence[Array]) -> list[Any]:
        """Many arrays, waiting once."""
        return self.begin_download(arrays)()

    def synchronize(self) -> None:  # noqa: B027  (most devices have nothing to wait for)
        """Wait until everything that was launched has run."""

    def host_buffer(self, nbytes: int) -> np.ndarray:
        """Host memory, uint8, contents undefined, that this device copies from and to fast."""
        return np.empty(nbytes, np.uint8)

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """A reusable array for what lives no longer than one call of a codec; its contents are undefined.

        The next call with the same name gets the same memory, grown where needed. Not for results that are handed on.
        """
        dtype = np.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        buffer = self._scratch.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            with self.activate():
                buffer = self._scratch[name] = self.xp.empty(max(nbytes, 64), np.uint8)
        return buffer[:nbytes].view(dtype).reshape(shape)

    def constant(self, key: Hashable, make: Callable[[], Any]) -> Array:
        """The numpy array that ``make`` gives, on this device; made once per key and kept."""
        if key not in self._constants:
            self._constants[key] = self.to_device(make())
        return self._constants[key]

    def use_less(self, nbytes: int) -> None:
        """Memory was too little for a batch of ``nbytes``: from now on batches are half as large at most."""
        self.batch_bytes = max(min(self.batch_bytes, nbytes) // 2, 1)
        self._scratch.clear()

    @cached_property
    def _scratch(self) -> dict[str, Array]:
        return {}

    @cached_property
    def _constants(self) -> dict[Hashable, Array]:
        return {}
