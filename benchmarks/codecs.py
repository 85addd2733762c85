"""In process: what the codecs weigh on real caches, and how fast they are on one core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import measure
from benchmarks.inputs import batch_of, planes_of
from benchmarks.report import Row
from kvzip.codecs.base import Batch, Codec, Sections
from kvzip.codecs.cachegen import CacheGen
from kvzip.codecs.fp8 import Fp8
from kvzip.devices.build import Target
from kvzip.devices.cpu import Cpu
from kvzip.devices.levels import runnable_levels

CUTS = {1024: 2.66, 256: 2.76, 128: None}
"""Tokens to cut a cache to, and the most bits per element that cachegen may take there."""


def sizes(path: Path) -> Iterator[Row]:
    """Bits per element of a whole .kvz of the first tokens of a cache, at LMCache's bins."""
    import kvzip

    planes = planes_of(path)
    for tokens, most in CUTS.items():
        if planes[0][1].shape[0] < tokens:
            continue
        cut = {
            f"layers.{i // 2}.{kind}": np.ascontiguousarray(array[:tokens].transpose(1, 0, 2))
            for i, (kind, array) in enumerate(planes)
        }
        elements = sum(array.size for array in cut.values())
        bits = len(kvzip.compress(cut, codec="cachegen", device="cpu")) * 8 / elements
        yield Row(f"cachegen, {path.stem}, {tokens} tokens", f"{bits:.3f} bits/element", most and f"at most {most}")


def speeds(path: Path) -> Iterator[Row]:
    """Encode and decode on one core at every instruction-set level, beside a copy of the same buffers."""
    planes = planes_of(path)
    # The sample is small: repeat it until it is much larger than any processor's cache, in batches as the pipeline has.
    longer = [(kind, _repeated(array, -(-1024 // len(array)))) for kind, array in planes]
    repeat = -(-200_000_000 // sum(array.nbytes for _, array in longer))
    batches = [batch_of(longer[i : i + 40]) for _ in range(repeat) for i in range(0, len(longer), 40)]
    batches = [Batch(batch.blocks, [_repeated(array, 1) for array in batch.arrays]) for batch in batches]
    nbytes = sum(array.nbytes for batch in batches for array in batch.arrays)
    source = np.frombuffer(np.random.default_rng(0).bytes(nbytes), np.uint8)
    target = np.empty_like(source)
    copy = nbytes / measure.seconds(lambda: np.copyto(target, source)) / 1e9
    yield Row("copy of the same size (memcpy)", f"{copy:.1f} GB/s", None)
    for level in reversed(runnable_levels(Target.host())):
        device = Cpu(threads=1, level=level)
        encode, decode = _speed(CacheGen(), batches, device, nbytes)
        wanted = {"x86_64_v4": ("at least 0.5", "at least 1.8"), "x86_64_v3": (None, "at least 0.9")}
        yield Row(f"cachegen encode, one core, {level}", f"{encode:.2f} GB/s", wanted.get(level, (None, None))[0])
        yield Row(f"cachegen decode, one core, {level}", f"{decode:.2f} GB/s", wanted.get(level, (None, None))[1])
        for dtype in ("float8_e4m3fn", "float8_e5m2"):
            encode, decode = _speed(Fp8(dtype=dtype), batches, device, nbytes)
            half = "at least 0.5 of the copy" if level == "x86_64_v4" else None
            yield Row(f"fp8 {dtype} encode, one core, {level}", f"{encode:.2f} GB/s = {encode / copy:.2f}", half)
            yield Row(f"fp8 {dtype} decode, one core, {level}", f"{decode:.2f} GB/s = {decode / copy:.2f}", half)


def _repeated(array: np.ndarray, times: int) -> np.ndarray:
    """A copy with the tokens ``times`` over, heads first in memory as in the file."""
    return np.tile(array.transpose(1, 0, 2), (1, times, 1)).transpose(1, 0, 2)


def _speed(codec: Codec, batches: list[Batch], device: Cpu, nbytes: int) -> tuple[float, float]:
    """Encode and decode of the numbers' own bytes, in GB/s."""
    bound = codec.bind([block.plane for block in batches[0].blocks])
    sections, outputs = [], []
    for batch in batches:
        sections.append([_padded(encoded.sections) for encoded in bound.encode(batch, device)])
        outputs.append(Batch(batch.blocks, [_repeated(array, 1) for array in batch.arrays]))

    def encode() -> None:
        for batch in batches:
            bound.encode(batch, device)

    def decode() -> None:
        for output, parts in zip(outputs, sections, strict=True):
            bound.decode(output, parts, device)

    return nbytes / measure.seconds(encode) / 1e9, nbytes / measure.seconds(decode) / 1e9


def _padded(sections: Sections) -> Sections:
    """Sections as a reader gives them: readable bytes behind."""
    return {tag: np.concatenate([part, np.zeros(128, np.uint8)])[:-128] for tag, part in sections.items()}
