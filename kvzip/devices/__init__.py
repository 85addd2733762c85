"""Where kernels run: ``cpu`` and ``cuda``, behind an array module and one verb."""

from __future__ import annotations

import importlib

from kvzip.devices.base import Array, Device
from kvzip.errors import UnsupportedError, UsageError

__all__ = ["Array", "Device", "get_device"]


def get_device(spec: str = "auto", threads: int | None = None) -> Device:
    """The device that ``spec`` names.

    Args:
        spec: ``"cpu"``; ``"cuda"`` or ``"cuda:N"``; ``"auto"`` for a GPU if a usable one is here, else the CPU.
        threads: how many threads the CPU may use; all that this process may run on if None.

    Raises:
        UsageError: ``spec`` is none of these.
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
    missing = "kvzip's cuda device is not in this installation"
    try:
        device: Device = importlib.import_module("kvzip.devices.cuda").Cuda(index)
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            missing = "CuPy is not installed: pip install 'kvzip[cuda12]' or 'kvzip[cuda13]', as the driver has it"
        elif error.name != "kvzip.devices.cuda":
            raise
        raise UnsupportedError(f"no GPU can be used: {missing}; --device cpu needs none", code="no-cuda") from error
    return device
