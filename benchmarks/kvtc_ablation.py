"""What each step of kvtc's design gains.

    python -m benchmarks.kvtc_ablation --train CACHE... --test CACHE... --rope theta=1e5 [--model GGUF] [--groups 1 5]

Caches hold ``layers.{i}.key`` and ``layers.{i}.value`` ``[heads, tokens, head_dim]``, and ``token_ids``: some tokens
after the cached ones, if a model is to judge. Variants of the codec are made of the parts of the numpy oracle, at
one rate, which a search over the step finds. Prints markdown: bits per element with all side information but the
profile, KL divergence over that of the ``cachegen`` codec without sinks, errors of keys and values.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

import kvzip
from kvzip.evaluation import LanguageModel, load_model
from kvzip.profiles.profile import Profile
from kvzip.profiles.rope import rotate
from kvzip.profiles.ropes import Ropes
from kvzip.profiles.scales import step_index
from kvzip.profiles.sources import Arrays
from kvzip.profiles.train import Options, train
from tests.reference import kvtc

DEFAULT_STEP = 1.35
POSITIONS = 384


@dataclass
class Sample:
    """A cache, what the model says after it, and the KL divergence that the cachegen codec causes."""

    name: str
    keys: np.ndarray  # [layers, tokens, heads, head_dim], as cached
    values: np.ndarray
    tokens_after: np.ndarray
    log_probabilities: np.ndarray | None = None
    cachegen: float = math.nan

    @classmethod
    def read(cls, path: Path, tokens: int) -> Sample:
        tensors = load_file(path)
        layers = sum(name.endswith(".key") for name in tensors)
        keys, values = (
            np.stack([tensors[f"layers.{i}.{kind}"][:, :tokens].swapaxes(0, 1) for i in range(layers)])
            for kind in ("key", "value")
        )
        ids = tensors.get("token_ids", np.zeros(0, np.int64))
        return cls(path.stem, keys, values, ids[keys.shape[1] :][:POSITIONS])

    def tensors(self, keys: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
        named = {}
        for i in range(len(keys)):
            for kind, array in (("key", keys), ("value", values)):
                named[f"layers.{i}.{kind}"] = np.ascontiguousarray(array[i].swapaxes(0, 1)).astype(ml_dtypes.bfloat16)
        return named


@dataclass(frozen=True)
class Variant:
    """A design, by default the oracle's. ``key_steps`` are by ``layer`` or ``channel``, ``value_steps`` by ``token`` or
    ``layer``.
    """

    name: str
    step: float = DEFAULT_STEP
    rope: bool = True
    sinks: int = 1
    key_steps: str = "layer"
    value_steps: str = "token"
    dead_zone: float = 0.0
    delta: bool = False
    profile: Profile | None = None
    cut: float = 0.3


@dataclass
class Outcome:
    bits: float
    key_error: float
    value_error: float
    keys: np.ndarray
    values: np.ndarray
    parts: dict[str, float] = field(default_factory=dict)


def run(sample: Sample, variant: Variant, ropes: Ropes, every: int = 1) -> Outcome:
    """Code a sample and restore it. ``every`` > 1 looks at some groups of layers only: enough to know the rate."""
    keys, values = sample.keys.astype(np.float32), sample.values.astype(np.float32)
    layers, tokens, heads, dim = keys.shape
    turned = [_turn(keys[i], ropes, i, inverse=True) if variant.rope else keys[i] for i in range(layers)]
    unturned = np.stack(turned)
    restored_keys, restored_values = np.zeros_like(keys), np.zeros_like(values)
    parts: dict[str, float] = {}
    spans = [group.layers for group in variant.profile.groups] if variant.profile else [(i,) for i in range(layers)]
    numbers = 0
    for number, span in enumerate(spans):
        if number % every:
            continue
        numbers += 2 * len(span) * tokens * heads * dim
        for planes, out in _code(span, unturned, values, variant, number, parts):
            for (kind, layer), plane in zip(planes, out, strict=True):
                target = restored_keys if kind == "key" else restored_values
                target[layer] = plane.reshape(tokens, heads, dim)
    variance = np.square(unturned - unturned.mean(axis=1, keepdims=True)).sum(axis=(1, 2, 3))
    key_error = float((np.square(restored_keys - unturned).sum(axis=(1, 2, 3)) / variance).mean())
    value_error = float(np.square(restored_values - values).sum() / np.square(values).sum())
    if variant.rope:
        restored_keys = np.stack([_turn(restored_keys[i], ropes, i, inverse=False) for i in range(layers)])
    restored_keys[:, : variant.sinks], restored_values[:, : variant.sinks] = (
        keys[:, : variant.sinks],
        values[:, : variant.sinks],
    )
    parts = {name: bits / numbers for name, bits in parts.items()}
    return Outcome(sum(parts.values()), key_error, value_error, restored_keys, restored_values, parts)


def _turn(keys: np.ndarray, ropes: Ropes, layer: int, *, inverse: bool) -> np.ndarray:
    rope = ropes.of(layer)
    return rotate(keys, rope, inverse=inverse) if rope else keys


def _code(
    span: Sequence[int], keys: np.ndarray, values: np.ndarray, variant: Variant, number: int, parts: dict[str, float]
) -> Iterator[tuple[list[tuple[str, int]], list[np.ndarray]]]:
    """Code the planes of a span of layers, one by one without a profile; add up bits in ``parts``."""
    names = [(kind, layer) for layer in span for kind in ("key", "value")]
    step = step_index(variant.step)
    for group in [names] if variant.profile else [[name] for name in names]:
        planes = [(keys if kind == "key" else values)[layer].reshape(keys.shape[1], -1) for kind, layer in group]
        if variant.profile is None and _altered(variant):
            block, out = _altered_block(planes[0], group[0][0] == "key", step, variant)
        else:
            basis = _basis(variant.profile, number) if variant.profile else None
            is_key = [kind == "key" for kind, _ in group]
            block = kvtc.encode(planes, is_key, step, sinks=variant.sinks, basis=basis, cut=variant.cut)
            out = kvtc.decode(block, step, [plane.shape[1] for plane in planes], basis=basis)
        for name, bits in block.bits().items():
            parts[name] = parts.get(name, 0.0) + bits
        yield group, [np.where(block.exact[:, None], plane, new) for plane, new in zip(planes, out, strict=True)]


def _basis(profile: Profile, number: int) -> kvtc.Basis:
    group = profile.groups[number]
    exponents = np.array([profile.key_exponents[layer] for layer in group.layers])
    return kvtc.Basis(exponents, group.mean, group.matrix(group.rank), group.deviations)


def _altered(variant: Variant) -> bool:
    return (variant.key_steps, variant.value_steps, variant.dead_zone, variant.delta) != ("layer", "token", 0.0, False)


def _altered_block(plane: np.ndarray, is_key: bool, step: int, variant: Variant) -> tuple[kvtc.Block, list[np.ndarray]]:
    """What the oracle does not do: other steps, a dead zone, differences between neighbouring tokens."""
    exact = kvtc.exact_tokens([plane], variant.sinks)
    x = np.where(exact[:, None], 0, plane)
    if is_key and variant.key_steps == "channel":
        scale = np.maximum(x[~exact].std(axis=0, keepdims=True), 1e-9) * kvtc.power(kvtc.KEY_STEP)
    elif is_key:
        scale = kvtc.power(np.full((len(x), 1), kvtc.key_exponent(x[~exact]) + kvtc.KEY_STEP))
    elif variant.value_steps == "token":
        scale = kvtc.power(kvtc.value_exponents(x))[:, None]
    else:
        scale = np.full((1, 1), np.sqrt(np.square(x[~exact]).mean()), np.float32)
    y = (x / scale)[~exact] / kvtc.power(step)
    q = (np.sign(y) * np.floor(np.abs(y) + 0.5 - variant.dead_zone)).astype(np.int64)
    # Differences of the integers decode to the same integers: the error is that of coding them directly.
    coded = np.diff(q, axis=0, prepend=0) if variant.delta else q
    exponents = np.zeros((1, len(x)), np.int64)
    block = kvtc.Block(coded, kvtc.choose(coded), exponents, np.array([True]), exact, plane.shape[1])
    out = np.zeros_like(plane)
    out[~exact] = q * kvtc.power(step)
    return block, [out * scale]


def at_rate(samples: Sequence[Sample], variant: Variant, ropes: Ropes, target: float) -> Variant:
    """The variant with the step that gives ``target`` bits an element, within 0.5 %, on every sixth group."""
    low, high = math.log2(variant.step) - 3, math.log2(variant.step) + 3
    for _ in range(12):
        middle = (low + high) / 2
        trial = replace(variant, step=2.0**middle)
        bits = run(samples[0], trial, ropes, every=6).bits
        if abs(bits / target - 1) < 0.005:
            break
        low, high = (middle, high) if bits > target else (low, middle)
    return trial


class Judge:
    """KL divergences by a model, if there is one."""

    def __init__(self, samples: Sequence[Sample], model: LanguageModel | None) -> None:
        self.model = model
        self.samples = [sample for sample in samples if model is not None and len(sample.tokens_after)]
        for sample in self.samples:
            cache = sample.tensors(sample.keys, sample.values)
            sample.log_probabilities = model.log_probabilities(cache, sample.tokens_after)  # type: ignore[union-attr]
            restored = kvzip.decompress(kvzip.compress(cache, codec="cachegen", sinks=0))
            sample.cachegen = self._divergence(sample, restored)

    def _divergence(self, sample: Sample, restored: dict[str, np.ndarray]) -> float:
        assert self.model is not None and sample.log_probabilities is not None
        before, after = sample.log_probabilities, self.model.log_probabilities(restored, sample.tokens_after)
        return float((np.exp(before) * (before - after)).sum(axis=-1).mean())

    def relative(self, sample: Sample, outcome: Outcome) -> float:
        if sample.log_probabilities is None:
            return math.nan
        return self._divergence(sample, sample.tensors(outcome.keys, outcome.values))


def measure(samples: Sequence[Sample], variant: Variant, ropes: Ropes, judge: Judge) -> None:
    """Print a row: means over the samples, KL as the ratio of means."""
    outcomes = [run(sample, variant, ropes) for sample in samples]
    divergence = sum(judge.relative(sample, outcome) for sample, outcome in zip(samples, outcomes, strict=True))
    relative = divergence / sum(sample.cachegen for sample in samples)
    bits, key_error, value_error = (
        float(np.mean([getattr(outcome, name) for outcome in outcomes]))
        for name in ("bits", "key_error", "value_error")
    )
    side = bits - float(np.mean([outcome.parts["stream"] for outcome in outcomes]))
    rank = variant.profile and sum(g.rank_at(step_index(variant.step), variant.cut) for g in variant.profile.groups)
    print(
        f"| {variant.name} | {variant.step:.2f} | {bits:.3f} | {side:.3f} | {relative:.3f} | {key_error:.4f} "
        f"| {value_error:.4f} | {rank or ''} |",
        flush=True,
    )


def ladder(profile_of: Callable[[int], Profile], groups: Sequence[int]) -> Iterator[tuple[Variant, bool]]:
    """The designs of the table, and whether each is compared at one rate."""
    plain = Variant("A: RoPE undone, one key step a layer, value step by token, sink exact")
    yield plain, False
    yield replace(plain, name="A, but RoPE kept", rope=False), True
    yield replace(plain, name="A, but the sink coded", sinks=0), True
    yield replace(plain, name="A, but one value step a layer", value_steps="layer"), True
    yield replace(plain, name="A, but key steps by channel", key_steps="channel"), True
    yield replace(plain, name="A, dead zone 0.1", dead_zone=0.1), True
    yield replace(plain, name="A, differences between tokens", delta=True), True
    for number in groups:
        profile = profile_of(number)
        size = f"profile {profile.nbytes / 1e6:.0f} MB"
        for step in (DEFAULT_STEP, 2.0):
            yield Variant(f"C{number}: basis over {number} layers, {size}", step, profile=profile), False
    for cut in (0.15, 0.45):
        yield Variant(f"C{number}, rank cut at {cut} steps", 2.0, profile=profile, cut=cut), False


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kvtc_ablation", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--train", nargs="+", type=Path, required=True)
    parser.add_argument("--test", nargs="+", type=Path, required=True)
    parser.add_argument("--rope", required=True, help="such as theta=1e5")
    parser.add_argument("--model", type=Path, help="a GGUF file or model folder, to measure KL")
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 5])
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    ropes = Ropes.parse(options.rope)
    samples = [Sample.read(path, options.tokens) for path in options.test]
    judge = Judge(samples, load_model(options.model) if options.model else None)
    sources = [Arrays(s.name, s.keys, s.values) for s in (Sample.read(path, 1 << 20) for path in options.train)]

    def profile_of(number: int) -> Profile:
        started = time.perf_counter()
        profile = train(sources, ropes, Options(group=number))
        seconds, seen = time.perf_counter() - started, profile.seen
        print(f"<!-- group {number}: {seconds:.0f} s, held out: {seen.bits_plain:.2f} -> {seen.bits:.2f} bits -->")
        return profile

    print("| design | step | bits | of which side | KL / cachegen's | K error | V error | rank |\n" + "|---" * 8 + "|")
    rate = 0.0
    for variant, same_rate in ladder(profile_of, options.groups):
        if same_rate:
            variant = at_rate(samples, variant, ropes, rate)
        else:
            rate = rate or run(samples[0], variant, ropes, every=6).bits
        measure(samples, variant, ropes, judge)


if __name__ == "__main__":
    main()
