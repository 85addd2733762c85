"""What a serializer and a deserializer are, and how tensors pass the border."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from kvzip.devices.descriptors import ELEMENT_SUFFIX
from kvzip.errors import UsageError
from kvzip.torch_border import is_torch, to_numpy, to_torch


class Serializer(ABC):
    """Turns a cache into bytes."""

    @abstractmethod
    def to_bytes(self, t: Any) -> bytes:
        """The bytes of ``t``, ``[layers, 2, tokens, heads, head_size]``, torch (on any device) or numpy.

        Raises ``UsageError`` for another shape, or a type that is not bfloat16, float16 or float32.
        """


class Deserializer(ABC):
    """Turns bytes back into a cache.

    Args:
        dtype: of the result. A torch dtype asks for torch tensors; a numpy dtype, its name, or None (the dtype that was
            stored) for numpy arrays.
    """

    def __init__(self, dtype: Any = None) -> None:
        self.dtype = dtype

    @abstractmethod
    def from_bytes(self, bs: bytes) -> Any:
        """The cache ``[layers, 2, tokens, heads, head_size]``.

        Raises ``CorruptError`` or ``UnsupportedError`` for bytes that are no such file.
        """


def as_cache(t: Any) -> np.ndarray:
    """``t`` as an array whose last axis is contiguous; shares memory where it can."""
    array = to_numpy(t) if is_torch(t) else np.asarray(t)
    if array.ndim != 5 or array.shape[1] != 2 or not array.size:
        raise UsageError(
            f"expected a cache [layers, 2, tokens, heads, head_size], got the shape {list(array.shape)}",
            code="bad-shape",
        )
    if array.dtype.name not in ELEMENT_SUFFIX:
        raise UsageError(f"expected one of {', '.join(ELEMENT_SUFFIX)}, got {array.dtype}", code="bad-dtype")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


def numpy_dtype(dtype: Any) -> np.dtype | None:
    """The numpy dtype that ``dtype`` (of torch, of numpy, a name or None) means."""
    return None if dtype is None else np.dtype(str(dtype).removeprefix("torch.") if _is_torch_dtype(dtype) else dtype)


def like_dtype(array: np.ndarray, dtype: Any) -> Any:
    """``array`` as a torch tensor if ``dtype`` is one of torch's."""
    return to_torch(array) if _is_torch_dtype(dtype) else array


def _is_torch_dtype(dtype: Any) -> bool:
    return type(dtype).__module__ == "torch"
