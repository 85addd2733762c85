"""GPU tensors at the border: torch's and CuPy's, compressed and decoded to where they are, by way of DLPack."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvzip.devices.base import Array, Device
from kvzip.errors import UsageError
from kvzip.tensorfile import SourceFile, TensorSource, arrays_header, parse_header
from kvzip.torch_border import is_torch, to_numpy

_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def is_on_gpu(tensor: Any) -> bool:
    """Whether ``tensor`` is a torch tensor, a CuPy array or the like in the memory of an NVIDIA GPU."""
    return hasattr(tensor, "__dlpack_device__") and tensor.__dlpack_device__()[0] in _DLPACK_CUDA


def dtype_name(tensor: Any) -> str:
    """The dtype of a numpy, torch or CuPy tensor by its name in numpy and ml_dtypes."""
    return str(tensor.dtype).removeprefix("torch.")


class GpuSource(TensorSource):
    """Tensors in the memory of a GPU, under the header that the safetensors library would write for them.

    Those that are elsewhere are copied to ``device``, and so are those that are not C-contiguous. The buffers that
    :meth:`read_runs` fills are arrays of the device, too: no number travels to the host before it is coded.
    """

    def __init__(self, tensors: Mapping[str, Any], device: Device) -> None:
        self._device = device
        header = arrays_header({name: (dtype_name(each), tuple(each.shape)) for name, each in tensors.items()}, {})
        infos, metadata = parse_header(header, "arrays")
        size = max((info.offset + info.nbytes for info in infos), default=len(header))
        super().__init__("arrays", [SourceFile("", header, size)], infos, metadata, [])
        self._starts = [info.offset for info in infos]
        with device.activate():
            arrays = [device.to_device(tensors[info.name]) for info in infos]
            self._bytes = [device.xp.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]

    def allocate(self, nbytes: int) -> Array:
        with self._device.activate():
            return self._device.xp.empty(nbytes, np.uint8)

    def read_runs(self, file: int, offsets: Sequence[int], nbytes: int, buffer: Any) -> None:
        if not offsets or not nbytes:
            return
        tensor = bisect_right(self._starts, offsets[0]) - 1
        first = offsets[0] - self._starts[tensor]
        steps = set(np.diff(offsets).tolist())
        with self._device.activate():
            data, target = self._bytes[tensor][first:], buffer[: len(offsets) * nbytes].reshape(len(offsets), nbytes)
            target[-1] = data[offsets[-1] - offsets[0] :][:nbytes]
            if len(steps) == 1:
                (step,) = steps
                target[:-1] = data[: (len(offsets) - 1) * step].reshape(-1, step)[:, :nbytes]
            else:
                for row, offset in zip(target[:-1], offsets, strict=False):
                    row[...] = data[offset - offsets[0] :][:nbytes]


def target_array(tensor: Any, shape: tuple[int, ...], dtype: str, device: Device) -> Array:
    """The memory of a tensor to decode to: as an array of ``device`` if it lies there, else as a numpy array.

    Raises:
        UsageError: no numpy, torch or CuPy array, another shape or dtype, a device that cannot be reached, or memory
            that cannot take each number in a place of its own: it is read-only, not aligned, its numbers overlap, or
            the last axis is not contiguous.
    """
    array = _memory(tensor, device)
    if tuple(tensor.shape) != shape or dtype_name(tensor) != dtype:
        raise _bad_out(f"out must be {dtype} {list(shape)}, it is {dtype_name(tensor)} {list(tensor.shape)}")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise _bad_out("out is read-only")
    if isinstance(array, np.ndarray) and not array.flags.aligned:
        raise _bad_out(f"out must be aligned, it begins at address {array.ctypes.data}")
    if array.size and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        raise _bad_out(f"the last axis of out must be contiguous, its strides are {array.strides}")
    if array.size and _overlaps(array):
        raise _bad_out(f"numbers of out share memory, its strides are {array.strides}")
    return array


def _memory(tensor: Any, device: Device) -> Array:
    """An array on the memory of a caller's numpy, torch or CuPy array, never a copy. Raises UsageError."""
    if isinstance(tensor, np.ndarray):
        return np.asarray(tensor)  # of a subclass the numbers
    if is_torch(tensor) and tensor.device.type == "cpu":
        return to_numpy(tensor)
    if is_torch(tensor) and not (tensor.device.type == "cuda" and is_on_gpu(tensor)):
        raise _bad_out(f"out is on {tensor.device}: expected the host's memory or an NVIDIA GPU")
    if device.xp is np and is_on_gpu(tensor):
        raise _bad_out("out is on a GPU, but the cache was opened with device cpu")
    if is_torch(tensor):
        return device.to_device(tensor.detach())
    if isinstance(tensor, device.xp.ndarray):
        return device.to_device(tensor)
    raise _bad_out(f"out must be a numpy, torch or CuPy array, it is a {type(tensor).__name__}")


def _overlaps(array: Array) -> bool:
    """Whether two numbers may share bytes; never so in views of dense arrays."""
    reach = array.itemsize
    for step, length in sorted((abs(step), length) for step, length in zip(array.strides, array.shape, strict=True)):
        if length > 1 and step < reach:
            return True
        reach += step * (length - 1)
    return False


def _bad_out(message: str) -> UsageError:
    return UsageError(message, code="bad-out")
