"""What a GPU needs before it can be used: driver, CuPy, NVRTC; and which of them is missing."""

from __future__ import annotations

import ctypes
import importlib
import sys
from typing import Any

from kvzip.devices.cuda_compile import NVRTC
from kvzip.errors import UnsupportedError, UsageError

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

OLDEST = 12000
"""The first CUDA version, in the driver's way of counting, that CuPy's wheels are made for."""


class NoGpuError(UnsupportedError):
    """No GPU can be used here; the message says what is missing and how to get it."""

    default_code = "no-cuda"

    def __init__(self, missing: str) -> None:
        super().__init__(f"no GPU can be used: {missing}; --device cpu needs none")


def open_cupy(index: int) -> Any:
    """The module ``cupy``, after it has shown that it can run kernels on GPU number ``index``.

    Raises:
        NoGpuError: something is missing or does not go together.
        UsageError: there are GPUs, but not this one.
    """
    version = driver_version()
    if version is None:
        raise NoGpuError(f"there is no NVIDIA driver ({DRIVER} cannot be loaded)")
    if version < OLDEST:
        raise NoGpuError(f"the driver is for CUDA {_readable(version)}, kvzip needs {_readable(OLDEST)} or newer")
    extra = f"pip install 'kvzip[cuda{min(version // 1000, 13)}]' goes with this driver (CUDA {_readable(version)})"
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        found = "CuPy is not installed" if getattr(error, "name", None) == "cupy" else f"CuPy does not load ({error})"
        raise NoGpuError(f"{found}: {extra}") from error
    _check_runtime(cupy, index, version, extra)
    try:
        importlib.import_module(NVRTC).getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise NoGpuError(f"NVRTC, which compiles the kernels, does not load ({error}): {extra}") from error
    return cupy


def driver_version() -> int | None:
    """The CUDA version that the driver supports, such as 13000; None without a driver. Cheap: CuPy is not imported."""
    try:
        driver = ctypes.CDLL(DRIVER)
        version = ctypes.c_int()
        return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
    except (OSError, AttributeError):
        return None


def _check_runtime(cupy: Any, index: int, version: int, extra: str) -> None:
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        built_for = runtime.runtimeGetVersion()
        if built_for // 1000 > version // 1000:
            raise NoGpuError(f"CuPy is for CUDA {_readable(built_for)}, newer than the driver: {extra}") from error
        raise NoGpuError(f"the driver finds none ({error})") from error
    if count == 0:
        raise NoGpuError("the driver finds none (CUDA_VISIBLE_DEVICES hides them, or there are none)")
    if index >= count:
        last = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0 alone"
        raise UsageError(f"there is no GPU cuda:{index}: this machine has {last}", code="no-such-gpu")


def _readable(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
