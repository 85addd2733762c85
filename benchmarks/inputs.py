"""Inputs: the sample cache, and large caches that are statistically like it."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from kvzip.cache import Block, Plane, blocks_of
from kvzip.codecs.base import Batch
from kvzip.tensorfile import TensorInfo, header_bytes

SAMPLE = Path(__file__).parent.parent / "samples" / "smollm2-prose-128.safetensors"


def planes_of(path: Path) -> list[tuple[str, np.ndarray]]:
    """Kind and numbers ``[tokens, heads, head_dim]`` (views) of every ``layers.{i}.key`` and ``.value`` of a file."""
    tensors = load_file(path)
    layers = sum(name.endswith(".key") for name in tensors)
    names = [(kind, f"layers.{layer}.{kind}") for layer in range(layers) for kind in ("key", "value")]
    return [(kind, tensors[name].transpose(1, 0, 2)) for kind, name in names]


def batch_of(planes: list[tuple[str, np.ndarray]]) -> Batch:
    """All full and partial blocks of some planes as one batch."""
    blocks: list[Block] = []
    arrays = []
    for i, (kind, array) in enumerate(planes):
        tokens, heads, head_dim = array.shape
        plane = Plane(i, i // 2, "key" if kind == "key" else "value", tokens, heads, head_dim, array.dtype.name)
        for block in blocks_of((plane,)):
            blocks.append(block)
            arrays.append(array[block.start : block.stop])
    return Batch(blocks, arrays)


def write_large_cache(path: Path, megabytes: int, *, layers: int = 32, heads: int = 8, head_dim: int = 128) -> None:
    """A bfloat16 cache of about ``megabytes`` whose channels spread as the sample's do.

    Every channel takes the mean and deviation of some channel of the sample, and normally distributed numbers. No run
    of bytes repeats, so that general compressors find about what they find in a real cache.
    """
    tokens = max(32, megabytes * 1_000_000 // (layers * 2 * heads * head_dim * 2))
    rng = np.random.default_rng(0)
    sample = planes_of(SAMPLE)
    size = heads * tokens * head_dim * 2
    names = [(kind, f"layers.{layer}.{kind}") for layer in range(layers) for kind in ("key", "value")]
    shape = (heads, tokens, head_dim)
    tensors = [TensorInfo(name, "BF16", "bfloat16", shape, i * size, size) for i, (_, name) in enumerate(names)]
    noise = rng.normal(size=heads * tokens * head_dim).astype(np.float32)
    with path.open("wb") as file:
        file.write(header_bytes(tensors, {}))
        for i, (kind, _) in enumerate(names):
            alike = [array for other, array in sample if other == kind]
            channels = alike[i // 2 % len(alike)].astype(np.float32).reshape(-1, sample[0][1][0].size)
            chosen = rng.integers(channels.shape[1], size=heads * head_dim)
            mean, deviation = (x[chosen].reshape(heads, 1, head_dim) for x in (channels.mean(0), channels.std(0)))
            # The same noise from another place on: cheap, and no two runs of bytes are alike after scaling.
            plane = np.roll(noise, int(rng.integers(noise.size))).reshape(shape) * deviation + mean
            file.write(plane.astype(ml_dtypes.bfloat16).tobytes())
