"""Caches to check with: random ones of every shape that kernels treat differently, and the samples."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from kvzip.cache import Block, Plane, blocks_of
from kvzip.codecs import available_codecs, get_codec
from kvzip.codecs.base import Batch, Codec
from kvzip.devices.base import Array, Device
from kvzip.errors import UnsupportedError, UsageError

ROOT = Path(__file__).parents[2]

SHAPES = [  # dtype, tokens, heads, head_dim, heads outside tokens in memory
    ("bfloat16", 1024, 2, 64, True),
    ("bfloat16", 300, 8, 128, False),
    ("bfloat16", 1500, 1, 576, False),
    ("bfloat16", 65, 3, 40, True),
    ("float16", 257, 5, 80, True),
    ("float16", 1024, 4, 128, False),
    ("float32", 100, 2, 128, True),
    ("float32", 33, 3, 20, False),
    ("bfloat16", 1, 1, 8, False),
]

OPTIONS = {  # besides the defaults of every codec
    "cachegen": ["level=1", "level=9", "sinks=0", "sinks=40", "coder=range", "coder=range,sinks=40", "levels=3"],
    "fp8": ["scale=token", "scale=head", "scale=tensor", "dtype=float8_e5m2", "dtype=float8_e5m2,scale=head"],
}


@dataclass
class Case:
    """A cache: its planes, and an array ``[tokens, heads, head_dim]`` of each, so ordered in memory or head-major."""

    name: str
    planes: list[Plane]
    arrays: list[np.ndarray]
    head_major: bool

    def batch(self, codec: Codec, device: Device) -> Batch:
        """What ``codec`` takes of the cache, copied to the device."""
        planes = [plane for plane in self.planes if codec.supports(plane)]
        blocks = [block for group in codec.groups(planes) for block in blocks_of(tuple(group))]
        return Batch(blocks, [self.upload(self.view(b, plane), device) for b in blocks for plane in b.planes])

    def blank(self, batch: Batch, device: Device) -> Batch:
        """The same batch to decode to: bytes that no decoder leaves standing by chance."""
        arrays = []
        for block in batch.blocks:
            for plane in block.planes:
                array = np.full((block.tokens, plane.heads, plane.head_dim * plane.itemsize), 0xA5, np.uint8)
                arrays.append(self.upload(array.view(plane.dtype), device))
        return Batch(batch.blocks, arrays)

    def bind(self, spec: str) -> Codec:
        """The codec made ready for this cache."""
        codec = get_codec(spec)
        return codec.bind([plane for plane in self.planes if codec.supports(plane)])

    def view(self, block: Block, plane: Plane) -> np.ndarray:
        return self.arrays[plane.index][block.start : block.stop]

    def upload(self, array: np.ndarray, device: Device) -> Array:
        if self.head_major:
            return device.to_device(np.ascontiguousarray(array.swapaxes(0, 1))).swapaxes(0, 1)
        return device.to_device(np.ascontiguousarray(array))


def random_cases(seed: int = 0) -> list[Case]:
    """Normal numbers with channels of very different size, an attention sink, tokens with NaN and Inf, one of zeros."""
    rng = np.random.default_rng(seed)
    return [_random_case(rng, *shape) for shape in SHAPES]


def _random_case(
    rng: np.random.Generator, dtype: str, tokens: int, heads: int, head_dim: int, head_major: bool
) -> Case:
    planes, arrays = [], []
    for index in range(4):
        kind = "key" if index % 2 == 0 else "value"
        planes.append(Plane(index, index // 2, kind, tokens, heads, head_dim, dtype))
        x = rng.standard_normal((tokens, heads, head_dim)) * np.exp(rng.standard_normal((1, heads, head_dim)))
        x[0] *= 20
        if tokens > 20:
            x[7], x[9, 0, 3], x[10, 0, 1], x[11, 0, 5], x[12] = 0, np.nan, -np.nan, np.inf, 1e-39
        arrays.append(x.astype(dtype))
    shape = f"{dtype} [{tokens}, {heads}, {head_dim}]" + (" head-major" if head_major else "")
    return Case(shape, planes, arrays, head_major)


def sample_cases() -> list[Case]:
    """The caches in samples/, ``[heads, tokens, head_dim]`` per layer and kind."""
    return [_read(path) for path in sorted((ROOT / "samples").glob("*.safetensors"))]


def _read(path: Path) -> Case:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    planes: list[Plane] = []
    arrays = []
    for name, entry in json.loads(data[8 : 8 + length]).items():
        parts = name.split(".")
        if len(parts) != 3 or parts[2] not in ("key", "value") or entry["dtype"] != "BF16":
            continue
        start, stop = entry["data_offsets"]
        raw = np.frombuffer(data, np.uint8)[8 + length + start : 8 + length + stop]
        array = raw.view(ml_dtypes.bfloat16).reshape(entry["shape"]).swapaxes(0, 1)
        planes.append(Plane(len(planes), int(parts[1]), parts[2], *array.shape, "bfloat16"))
        arrays.append(array)
    return Case(path.name, planes, arrays, head_major=True)


def codec_specs() -> list[str]:
    """Every codec with its defaults and with :data:`OPTIONS`; those that need a profile or a package are left out."""
    specs = []
    for name in available_codecs():
        try:
            get_codec(name)
        except (UnsupportedError, UsageError) as error:
            print(f"* codec {name} left out: {error}")
            continue
        specs += [name, *(f"{name}:{options}" for options in OPTIONS.get(name, []))]
    return specs
