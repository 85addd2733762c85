"""The test devices ``emulated`` and ``ptx``: numpy arrays, kernels launched as ``cuda`` launches them."""

from __future__ import annotations

import weakref
import zlib
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvzip.devices import cuda_source
from kvzip.devices.base import Array, Device
from kvzip.devices.cuda import Cuda
from tests.emulator import building, fake_cupy, ptx
from tests.emulator.module import Buffer, Module

_SCALARS = (np.int32, np.uint32, np.int64, np.uint64, np.float32)


class HostDevice(Device):
    """A device whose memory is the host's, and whose kernels may touch no more of it than they were told of.

    A launch knows the arrays that it gets, and those whose address was asked for, as descriptors need it.

    Args:
        seed: another one runs the threads of all launches in another order.
    """

    xp = np

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._owners: dict[int, weakref.ref[np.ndarray]] = {}

    def __str__(self) -> str:
        return self.name

    def module(self, file: str) -> Module:
        raise NotImplementedError

    def launch(self, kernel: str, warps: int, *arguments: Array | int | float) -> None:
        values: list[np.generic] = [np.int32(warps)]
        held = []
        for at, argument in enumerate(arguments):
            if isinstance(argument, np.ndarray):
                assert argument.flags.c_contiguous, f"argument {at} of kernel {kernel!r} is not C-contiguous"
                held.append(argument)
                values.append(np.uint64(self.address(argument)))
            else:
                assert type(argument) in _SCALARS, f"argument {at} of kernel {kernel!r} is a {type(argument).__name__}"
                values.append(argument)
        if warps <= 0:
            return
        blocks = -(-warps // cuda_source.WARPS_PER_BLOCK)
        # Which order is chosen depends on the launch alone, so that a failure comes back.
        seed = zlib.crc32(f"{self.seed} {kernel} {warps}".encode())
        module = self.module(cuda_source.file_of(kernel))
        module.launch(kernel, blocks, cuda_source.BLOCK_THREADS, values, self._buffers(), seed)

    def address(self, array: Array) -> int:
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        self._owners[id(owner)] = weakref.ref(owner)
        return int(array.__array_interface__["data"][0])

    def to_device(self, array: Any) -> Array:
        return np.asarray(array)

    def to_host(self, array: Array, out: np.ndarray | None = None) -> Any:
        if out is None:
            return array
        out.reshape(-1).view(np.uint8)[...] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return out

    def _buffers(self) -> list[Buffer]:
        alive = {key: owner for key, reference in self._owners.items() if (owner := reference()) is not None}
        self._owners = {key: self._owners[key] for key in alive}
        bounds = [(np.lib.array_utils.byte_bounds(owner), owner) for owner in alive.values() if owner.nbytes]
        return [Buffer(low, high, owner.flags.writeable) for (low, high), owner in bounds]


class Emulated(HostDevice):
    """The kernels' CUDA C++ on fibers."""

    name = "emulated"

    def module(self, file: str) -> Module:
        return _emulated(file)


class Ptx(HostDevice):
    """The kernels' PTX, as NVRTC makes it for ``arch``, on fibers.

    Args:
        arch: such as ``sm_90``.
    """

    name = "ptx"

    def __init__(self, arch: str, seed: int = 0) -> None:
        super().__init__(seed)
        self.arch = arch

    def __str__(self) -> str:
        return f"ptx for {self.arch}"

    def module(self, file: str) -> Module:
        return _ptx(file, self.arch)


class CudaOnEmulator(Cuda):
    """The cuda device itself, with :mod:`fake_cupy` where it expects CuPy, which emulates sources."""

    def __init__(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvzip.devices.cuda.open_cupy", lambda index: fake_cupy)
            super().__init__()

    def _load(self, file: str) -> Any:
        return fake_cupy.emulated(cuda_source.sources()[file])


def cuda_on_emulator() -> Cuda:
    return CudaOnEmulator()


@cache
def _emulated(file: str) -> Module:
    return Module(building.from_cuda(cuda_source.sources()[file], file))


@cache
def _ptx(file: str, arch: str) -> Module:
    return ptx.module(cuda_source.sources()[file], file, arch)
