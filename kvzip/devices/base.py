"""What every device has: an array module, and one verb that runs a kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
        their own type: ``np.int32``, ``np.uint32``, ``np.uint64``, ``np.float32``). Returns when the results may be used by
        the next launch or by :meth:`to_host`. Every kernel has the signature ``(first warp, last warp, arguments...)`` on
        the CPU and ``(warps, arguments...)`` under CUDA, both made by the macro ``KERNEL`` in ``kernels/warp.h``.
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
