"""Caches to check with: random ones of every shape that kernels treat differently, and the samples; and all codecs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import ml_dtypes
import numpy as np

from fuzz.decoders import OPTIONS
from kvzip.cache import Block, Plane, blocks_of
from kvzip.codecs import BUILT_IN, codec_class, get_codec
from kvzip.codecs.base import Batch, Codec
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import has_numbers
from kvzip.profiles.library import Embedded, offering
from kvzip.profiles.profile import Geometry, Group, Profile
from kvzip.profiles.rope import Rope
from kvzip.profiles.ropes import Ropes

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
    ("float8_e4m3fn", 100, 2, 64, True),
    ("float8_e5m2", 70, 3, 24, False),
]

BYTES = [("uint8", 200_000), ("int64", 30_000)]
"""Tensors that are no KV: dtype and how many."""

MORE = {  # besides a codec's ladder and what its decoder is fuzzed with
    "cachegen": ["sinks=40", "coder=range,sinks=40"],
    "fp8": ["scale=head", "scale=token", "dtype=float8_e5m2,scale=none"],
    "kvtc": ["profile=random"],
}

RANDOM_PROFILE = "profile=random"
"""Stands in a spec for a profile of random directions that fits the cache."""

MOST_DIRECTIONS = 1024


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

    def bind(self, spec: str) -> Codec | None:
        """The codec made ready for this cache; None if it takes nothing of it."""
        return codec_for(spec, self.planes)

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
        with np.errstate(over="ignore"):
            arrays.append(x.astype(dtype))
    shape = f"{dtype} [{tokens}, {heads}, {head_dim}]" + (" head-major" if head_major else "")
    return Case(shape, planes, arrays, head_major)


def other_cases(seed: int = 0) -> list[Case]:
    """Bytes that compress: numbers with few values, of one byte and of eight."""
    rng = np.random.default_rng(seed)
    cases = []
    for dtype, count in BYTES:
        numbers = np.minimum(rng.geometric(0.1, count), 120).astype(dtype).view(np.uint8).reshape(-1, 1, 1)
        plane = Plane(0, 0, "bytes", len(numbers), 1, 1, "uint8")
        cases.append(Case(f"{count} {dtype}", [plane], [numbers], head_major=False))
    return cases


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


# ------------------------------------------------------------------------------------------- codecs


def codec_specs() -> list[str]:
    """Every codec with its defaults, its presets and levels, and whatever else reaches kernels that these do not."""
    specs: dict[str, None] = {}
    for name in BUILT_IN:
        ladder = [f"{name}:{options}".rstrip(":") for options in codec_class(name).ladder()]
        more = [f"{name}:{options}" for options in MORE.get(name, ())]
        specs |= dict.fromkeys([*ladder, *OPTIONS.get(name, ()), *more])
    specs.pop("naive")
    return list(specs)


def codec_for(spec: str, planes: Sequence[Plane]) -> Codec | None:
    """The codec of a spec made ready for the planes that it takes; None if it takes none."""
    with profile_for(spec, planes) as profile:
        if RANDOM_PROFILE in spec and profile is None:
            return None
        codec = get_codec(spec.replace(RANDOM_PROFILE, f"profile={profile.hash}") if profile else spec)
        taken = [plane for plane in planes if codec.supports(plane)]
        return codec.bind(taken) if taken else None


@contextmanager
def profile_for(spec: str, planes: Sequence[Plane], layers_a_group: int = 2) -> Iterator[Profile | None]:
    """Within it the random profile that a spec may need is found by its hash."""
    numbers = [plane for plane in planes if has_numbers(plane)]
    if RANDOM_PROFILE not in spec or not numbers:
        yield None
        return
    layers = max(plane.layer for plane in numbers) + 1
    profile = random_profile(layers, numbers[0].heads, numbers[0].head_dim, layers_a_group)
    with offering([Embedded("random", profile.hash, profile.to_bytes)]):
        yield profile


@lru_cache(maxsize=8)
def random_profile(layers: int, heads: int, head_dim: int, layers_a_group: int) -> Profile:
    """A profile of random directions, about as many as learned ones are worth: what a basis costs, and whether devices
    agree, does not depend on what it has learned.
    """
    rng = np.random.default_rng(7)
    geometry = Geometry(layers, heads, head_dim, head_dim)
    groups = []
    for start in range(0, layers, layers_a_group):
        own = tuple(range(start, min(start + layers_a_group, layers)))
        width = len(own) * geometry.width
        rank = max(1, min(width // 2, MOST_DIRECTIONS))
        vectors = rng.integers(-127, 128, (rank, width), np.int8)
        scales = np.full(rank, 1 / (73 * width**0.5), np.float32)  # vectors of length 1
        mean = rng.standard_normal(width).astype(np.float32)
        groups.append(Group(own, mean, vectors, scales, np.linspace(64, 2, rank, dtype=np.float32)))
    return Profile("random", geometry, Ropes((Rope(1e4),)), (0,) * layers, groups, step=-19)
