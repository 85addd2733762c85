"""Descriptors of planes for kernels: the host side of ``struct Plane`` in kernels/warp.h."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvzip.cache import Plane
from kvzip.devices.base import Array, Device

PLANE = np.dtype(
    [
        ("data", np.uint64),
        ("token_stride", np.int64),
        ("head_stride", np.int64),
        ("tokens", np.uint32),
        ("heads", np.uint32),
        ("head_dim", np.uint32),
        ("reserved", np.uint32),
    ]
)


def describe_planes(arrays: Sequence[Array], device: Device) -> np.ndarray:
    """One descriptor per ``[tokens, heads, head_dim]`` array, a host array of :data:`PLANE`.

    The last axis of every array must be contiguous; the others may have any stride.
    """
    planes = np.zeros(len(arrays), PLANE)
    for plane, array in zip(planes, arrays, strict=True):
        if array.shape[2] > 1 and array.strides[2] != array.itemsize:
            raise ValueError(f"the last axis of a plane must be contiguous, not of stride {array.strides[2]}")
        plane["data"] = device.address(array)
        plane["token_stride"], plane["head_stride"] = array.strides[:2]
        plane["tokens"], plane["heads"], plane["head_dim"] = array.shape
    return planes


ELEMENT_SUFFIX = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
"""The element types that kernels come in, by their names in the kernels' names (FOR_ELEMENT_TYPES in
kernels/warp.h).
"""


def has_numbers(plane: Plane) -> bool:
    """Whether a plane is KV, of a type that kernels come in: what a quantizer can take."""
    return plane.dtype in ELEMENT_SUFFIX and plane.kind != "bytes"
