"""Training: covariances over any number of caches, then a principal component analysis per group of layers.

Each group streams over all caches and reads only its own layers: memory holds the covariances of one group and its part
of one cache. torch does the linear algebra and is imported here alone.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import ml_dtypes
import numpy as np

from kvzip.errors import UnsupportedError, UsageError
from kvzip.profiles import checkpoint
from kvzip.profiles.checkpoint import Learned
from kvzip.profiles.profile import CUT, Geometry, Group, Profile, Seen
from kvzip.profiles.rope import rotate
from kvzip.profiles.ropes import Ropes
from kvzip.profiles.scales import KEY_UNIT, power, spread_exponent, token_exponents
from kvzip.profiles.sources import Source, common_geometry

HELD_OUT = 5
"""Every fifth cache is kept out of the basis on which the gain is estimated; the basis that is stored has seen all."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to train: layers a group, finest step index to serve, largest rank or None, type of the basis, tokens to
    skip, torch device.
    """

    group: int = 5
    step: int = -19  # 0.95: levels up to 6
    rank: int | None = None
    dtype: Literal["int8", "bfloat16"] = "int8"
    sinks: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.group < 1 or self.sinks < 0 or (self.rank is not None and self.rank < 1):
            raise UsageError(
                "training: layers a group and rank must be positive, sinks not negative", code="train-options"
            )


Progress = Callable[[int, int, str], None]
"""Called with pieces done, pieces in all, and what is being worked on."""


def train(
    sources: Sequence[Source], ropes: Ropes, options: Options, *, model: str = "", state: Path | None = None,
    progress: Progress | None = None,
) -> Profile:  # fmt: skip
    """Learn a profile.

    Args:
        state: a directory for groups that are done; a run that was stopped and has the same inputs goes on from there.

    Raises:
        UsageError: no caches, caches of different geometry, or fewer than two tokens besides the sinks.
        UnsupportedError: torch is not installed.
    """
    geometry = common_geometry(sources)
    count = -(-geometry.layers // options.group)
    bounds = [geometry.layers * i // count for i in range(count + 1)]
    spans = [tuple(range(a, b)) for a, b in itertools.pairwise(bounds)]
    held_out = [i for i in range(len(sources)) if len(sources) > 1 and i % HELD_OUT == 1]
    mark = checkpoint.mark([[s.name, s.tokens] for s in sources], ropes.to_json(), options)
    total = count * len(sources)

    groups, exponents, plain, coded = [], [], 0.0, 0.0
    for number, layers in enumerate(spans):
        path = state / f"group-{number}.safetensors" if state else None
        learned = checkpoint.resume(path, mark, layers) if path else None
        if learned is None:
            report = _reporter(progress, number * len(sources), total, f"layers {layers[0]}-{layers[-1]}")
            learned = _learn(sources, held_out, layers, ropes, options, report)
            if path:
                checkpoint.keep(path, learned, mark)
        groups.append(learned.group)
        exponents += learned.exponents
        plain, coded = plain + learned.bits_plain, coded + learned.bits
    numbers = geometry.layers * geometry.width
    tokens = sum(max(0, source.tokens - options.sinks) for source in sources)
    seen = Seen(len(sources), tokens, len(held_out), plain / numbers, coded / numbers)
    return Profile(model, geometry, ropes, tuple(exponents), groups, options.step, seen)


class _Moments:
    """Count, sum and sum of squares of tokens ``[n]``, about a shift near their mean, on a torch device."""

    def __init__(self, torch: ModuleType, width: int, shift: Any, device: str) -> None:
        self.count = 0
        self.shift = shift
        self.sum = torch.zeros(width, dtype=torch.float64, device=device)
        self.squares = torch.zeros(width, width, dtype=torch.float32, device=device)

    def add(self, x: Any) -> None:
        x = x - self.shift
        self.count += len(x)
        self.sum += x.double().sum(0)
        self.squares.addmm_(x.T, x)

    def merge(self, other: _Moments) -> None:
        self.count += other.count
        self.sum += other.sum
        self.squares += other.squares

    def mean(self) -> Any:
        return self.shift.double() + self.sum / self.count

    def covariance(self, about: Any | None = None) -> Any:
        """About the mean, or about another point."""
        mean = self.sum / self.count
        off = (self.mean() - about) if about is not None else mean * 0
        return self.squares / self.count - mean.outer(mean).float() + off.outer(off).float()


def _learn(
    sources: Sequence[Source], held_out: list[int], layers: tuple[int, ...], ropes: Ropes, options: Options,
    report: Callable[[int], None],
) -> Learned:  # fmt: skip
    torch = _torch()
    geometry = sources[0].geometry
    width = len(layers) * geometry.width
    kept: _Moments | None = None
    tested: _Moments | None = None
    shift = None
    for i, source in enumerate(sources):
        report(i)
        x = torch.from_numpy(_tokens(source, layers, ropes, options.sinks)).to(options.device)
        if not len(x):
            continue
        shift = x.mean(0) if shift is None else shift
        if i in held_out:
            tested = tested or _Moments(torch, width, shift, options.device)
            tested.add(x)
        else:
            kept = kept or _Moments(torch, width, shift, options.device)
            kept.add(x)
    if kept is None or kept.count + (tested.count if tested else 0) < 2:
        raise UsageError("training needs at least two tokens besides the attention sinks", code="train-tokens")

    bits_plain = bits = 0.0
    if tested is not None:
        exponents = _key_exponents(kept, layers, geometry)
        scale = torch.from_numpy(_scales(exponents, geometry)).to(options.device)
        deviations, vectors = _components(torch, kept, scale)
        vectors = vectors[:, : _worth(deviations.cpu().numpy(), options)]
        unseen = tested.covariance(about=kept.mean()) * scale[:, None] * scale
        step = float(power(options.step))
        bits_plain = _bits(torch, torch.diagonal(tested.covariance()) * scale**2, step)
        bits = _bits(torch, ((unseen @ vectors) * vectors).sum(0), step)
        kept.merge(tested)
    exponents = _key_exponents(kept, layers, geometry)
    scale = torch.from_numpy(_scales(exponents, geometry)).to(options.device)
    deviations, vectors = _components(torch, kept, scale)
    mean = (kept.mean() * scale.double()).float()
    group = _pack(layers, mean.cpu().numpy(), deviations.cpu().numpy(), vectors.T.contiguous().cpu().numpy(), options)
    return Learned(group, exponents, bits_plain, bits)


def _tokens(source: Source, layers: tuple[int, ...], ropes: Ropes, sinks: int) -> np.ndarray:
    """The group's numbers of every sound token but the sinks, float32 ``[T, n]``: keys un-rotated, values over rms."""
    parts = []
    for layer in layers:
        keys, values = source.plane(layer, "key"), source.plane(layer, "value").astype(np.float32)
        rope = ropes.of(layer)
        keys = rotate(keys, rope, inverse=True) if rope else keys.astype(np.float32)
        values = values.reshape(len(values), -1)
        finite = np.where(np.isfinite(values), values, 0)
        parts += [keys.reshape(len(keys), -1), values * power(-token_exponents(finite))[:, None]]
    x = np.concatenate(parts, axis=1)[sinks:]
    return np.ascontiguousarray(x[np.isfinite(x).all(axis=1)])


def _key_exponents(moments: _Moments, layers: tuple[int, ...], geometry: Geometry) -> list[int]:
    variance = moments.covariance().diagonal().double().cpu().numpy()
    keys = geometry.heads * geometry.key_dim
    return [spread_exponent(variance[i * geometry.width :][:keys]) for i in range(len(layers))]


def _scales(exponents: list[int], geometry: Geometry) -> np.ndarray:
    """What turns a token's numbers into units: float32 ``[n]``. Values have theirs already."""
    scale = np.ones((len(exponents), geometry.width), np.float32)
    scale[:, : geometry.heads * geometry.key_dim] = power(-(np.array(exponents) + KEY_UNIT))[:, None]
    return scale.reshape(-1)


def _components(torch: ModuleType, moments: _Moments, scale: Any) -> tuple[Any, Any]:
    """Deviations ``[n]``, falling, and directions ``[n, n]`` in columns, their largest component positive."""
    values, vectors = torch.linalg.eigh(moments.covariance() * scale[:, None] * scale)
    vectors = vectors.flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return values.flip(0).clamp_min(0).sqrt(), vectors * torch.where(largest < 0, -1.0, 1.0)


def _bits(torch: ModuleType, variance: Any, step: float) -> float:
    """Entropy of normal numbers rounded to a step, summed over columns; exact to 0.01 bit above a third of a step."""
    deviation = (variance.double().clamp_min(0).sqrt() / step).clamp_min(1e-3)[:, None]
    edges = torch.arange(-64, 65, dtype=torch.float64, device=variance.device) + 0.5
    # Wide columns are as smooth as their logarithm; the sum over symbols serves the narrow ones.
    narrow = deviation.clamp_max(8.0)
    mass = torch.special.ndtr(edges / narrow).diff(dim=1).clamp_min(1e-30)
    return float((-(mass * mass.log2()).sum(1) + (deviation / narrow).log2().squeeze(1)).sum())


def _pack(
    layers: tuple[int, ...], mean: np.ndarray, deviations: np.ndarray, vectors: np.ndarray, options: Options
) -> Group:
    """Cut the rank, and round the directions to their type."""
    rank = _worth(deviations, options)
    vectors, deviations = vectors[:rank], deviations[:rank].astype(np.float32)
    if options.dtype == "bfloat16":
        return Group(layers, mean, vectors.astype(ml_dtypes.bfloat16), np.ones(rank, np.float32), deviations)
    scales = (np.abs(vectors).max(axis=1) / np.float32(127)).astype(np.float32)
    return Group(layers, mean, np.rint(vectors / scales[:, None]).astype(np.int8), scales, deviations)


def _worth(deviations: np.ndarray, options: Options) -> int:
    """The rank that the finest step needs, as far as the options allow it."""
    needed = int((deviations > np.float32(CUT) * power(options.step)).sum())
    return max(1, min(needed, options.rank or needed))


def _reporter(progress: Progress | None, start: int, total: int, what: str) -> Callable[[int], None]:
    def report(done: int) -> None:
        if progress:
            progress(start + done, total, what)

    return report


def check_device(device: str) -> None:
    """Raises ``UsageError`` unless torch can work on a device of this name, ``UnsupportedError`` without torch."""
    torch = _torch()
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"torch cannot use the device {device!r}: {reason}", code="train-device") from error


def _torch() -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedError("training needs torch: pip install 'kvzip[torch]'", code="torch-missing") from error
