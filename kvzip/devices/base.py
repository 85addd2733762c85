"""What every device has: an array module, and one verb that runs a kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import cached_property
from math import prod
from types import ModuleType
from typing import Any

Array = Any
"""A numpy array on the CPU, a cupy array on a GPU."""


class Device(ABC):
    """A place where kernels run.

    Codecs allocate with ``device.xp`` (numpy or cupy) and call :meth:`launch`; they never ask which device they are on.
    """

    name: str
    xp: ModuleType

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
    def to_host(self, array: Array) -> Any:
        """An array of this device as a numpy array; no copy on the CPU."""

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """A reusable array for what lives no longer than one call of a codec; its contents are undefined.

        The next call with the same name gets the same memory, grown where needed. Not for results that are handed on.
        """
        dtype = self.xp.dtype(dtype)
        nbytes = prod(shape) * dtype.itemsize
        buffer = self._scratch.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._scratch[name] = self.xp.empty(max(nbytes, 64), self.xp.uint8)
        return buffer[:nbytes].view(dtype).reshape(shape)

    def constant(self, key: Hashable, make: Callable[[], Any]) -> Array:
        """The numpy array that ``make`` gives, on this device; made once per key and kept."""
        if key not in self._constants:
            self._constants[key] = self.to_device(make())
        return self._constants[key]

    @cached_property
    def _scratch(self) -> dict[str, Array]:
        return {}

    @cached_property
    def _constants(self) -> dict[Hashable, Array]:
        return {}
