"""Where kernels run: ``cpu`` and ``cuda``, behind an array module and one verb."""

from __future__ import annotations

from kvzip.devices.base import Array, Device
from kvzip.errors import UnsupportedError, UsageError

__all__ = ["Array", "Device", "get_device"]


def get_device(spec: str = "auto", threads: int | None = None) -> Device:
    """The device that ``spec`` names.

    Args:
        spec: ``"cpu"``; ``"cuda"`` or ``"cuda:N"``; ``"auto"`` for the first GPU if one can be used, else the CPU.
            ``str()`` of the result says on one line what was taken.
        threads: how many threads the CPU may use; all that this process may run on if None.

    Raises:
        UsageError: ``spec`` is none of these, or there is no GPU of that number.
        UnsupportedError: the device is not here; the message says what is missing.
    """
    kind, _, number = spec.partition(":")
    if spec == "cpu":
        return _cpu(threads)
    if spec == "auto":
        try:
            return _cuda(0)
        except UnsupportedError:
            return _cpu(threads)
    if kind == "cuda" and (spec == "cuda" or number.isdecimal()):
        return _cuda(int(number or 0))
    raise UsageError(f"there is no device {spec!r}: expected auto, cpu, cuda or cuda:N", code="unknown-device")


def _cpu(threads: int | None) -> Device:
    from kvzip.devices.cpu import Cpu

    return Cpu(threads)


def _cuda(index: int) -> Device:
    from kvzip.devices.cuda import Cuda

    return Cuda(index)
