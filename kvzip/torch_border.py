"""torch at the border: its tensors as numpy arrays and back, sharing memory.

torch is imported only where a caller has handed over tensors or asked for them.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
import numpy as np

from kvzip.errors import UnsupportedError


def is_torch(value: Any) -> bool:
    """Whether ``value`` is a torch tensor, found out without importing torch."""
    return any(cls.__module__ == "torch" and cls.__name__ == "Tensor" for cls in type(value).__mro__)


def to_numpy(tensor: Any) -> np.ndarray:
    """A torch tensor as a numpy (or ml_dtypes) array of the same bits; a copy only from a GPU.

    Raises ``UnsupportedError`` for a dtype that numpy and ml_dtypes lack.
    """
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise UnsupportedError(f"tensors of dtype {tensor.dtype} are not supported", code="torch-dtype") from error
    tensor = tensor.detach().cpu()
    if dtype.isbuiltin == 1:
        return np.asarray(tensor.numpy())
    # torch exports no buffer of these types, but one of integers of their width.
    return np.asarray(tensor.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy().view(dtype))


def to_torch(array: np.ndarray) -> Any:
    """A writable numpy array as a torch tensor that shares its memory."""
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(
            "torch tensors were asked for, but torch is not installed: pip install 'kvzip[torch]'", code="no-torch"
        ) from error
    dtype = getattr(torch, array.dtype.name, None)
    if dtype is None:
        raise UnsupportedError(f"torch has no dtype {array.dtype}; ask for numpy arrays", code="torch-dtype")
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16 if array.dtype.itemsize == 2 else np.uint8)).view(dtype)
