"""The bytes of LMCache's fp8 serde: ``tensor.to(float8)`` of ``[2, layers, tokens, heads * head_dim]``, no more."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
import numpy as np

from kvzip.cache import Block
from kvzip.codecs.fp8 import LARGEST, Fp8
from kvzip.devices.base import Device
from kvzip.errors import CorruptError, UsageError
from kvzip.lmcache import planes
from kvzip.pipeline.encoding import ignore
from kvzip.pipeline.steps import Notice

FORMATS = {f"fp8-{dtype.removeprefix('float8_')}": dtype for dtype in LARGEST}
"""What the command line calls the two types."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the bytes do not say: the shape of the cache, and the type that it had."""

    layers: int
    tokens: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if min(self.layers, self.tokens, self.heads, self.head_dim) < 1:
            raise UsageError(f"the shape {self.shape} has an empty axis", code="bad-shape")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise UsageError(f"dtype must be bfloat16, float16 or float32, got {self.dtype!r}", code="bad-dtype")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """``[layers, 2, tokens, heads, head_dim]``"""
        return self.layers, 2, self.tokens, self.heads, self.head_dim


def read_fp8(data: bytes, dtype: str, geometry: Geometry, what: str = "the file") -> np.ndarray:
    """The cache ``[layers, 2, tokens, heads, head_dim]`` in the type of ``geometry``, which holds every 8-bit float.

    Raises ``CorruptError`` if the bytes are more or fewer than the geometry says.
    """
    layers, _, tokens, heads, head_dim = geometry.shape
    if len(data) != prod(geometry.shape):
        raise CorruptError(
            f"{what} has {len(data)} bytes; 2 x {layers} layers x {tokens} tokens x {heads} heads x {head_dim} make "
            f"{prod(geometry.shape)}; give the shape that it was written with",
            code="lmcache-fp8-size",
        )
    codes = np.frombuffer(data, np.dtype(dtype)).reshape(2, layers, tokens, heads, head_dim)
    return np.ascontiguousarray(codes.astype(np.dtype(geometry.dtype)).swapaxes(0, 1))


def write_fp8(kv: np.ndarray, dtype: str, device: Device, notice: Notice = ignore) -> bytes:
    """The bytes that LMCache's fp8 serde makes of ``[layers, 2, tokens, heads, head_dim]``.

    ``notice`` is told when the device is short of memory.
    """
    codec = Fp8(dtype=dtype)

    def code(blocks: list[Block]) -> list[np.ndarray]:
        encoded = codec.encode(planes.upload(kv, blocks, device), device)
        return device.to_host_all([one.sections["DATA"] for one in encoded])

    parts = planes.in_parts(planes.blocks_of(kv), code, device, notice)
    return b"".join([codes.data for part in parts for codes in part])
