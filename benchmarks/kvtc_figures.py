"""kvtc's figures: whole files of the real codec, what a model says of them, and how fast they decode.

    python -m benchmarks.kvtc_figures --test CACHE... --codec kvtc:step=1.35 kvtc:profile=model.kvp [--model GGUF]

Caches hold ``layers.{i}.key`` and ``layers.{i}.value`` ``[heads, tokens, head_dim]``, and ``token_ids``: some tokens
after the cached ones, if a model is to judge. A profile's name may hold ``{test}``: the word of a cache's name that
tells it from the others, for profiles that have not seen it. ``KVZIP_PROFILES`` names the folder of the profiles.
Prints markdown, a row per codec, means over the caches:

- bits a number of the whole ``.kvz`` with keys and values alone, everything counted but the profile;
- KL divergence over that of the ``cachegen`` codec at its default bins without sinks, by the same model and texts;
- *K error*: of keys with RoPE undone, squared error over the variance about each channel's mean, mean over layers;
  *V error*: squared error over energy, of all values;
- gigabytes of restored tensors a second of processor time, best of some runs on one thread: whole files in memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import kvzip
from benchmarks.kvtc_ablation import Judge, Outcome, Sample
from kvzip.devices.cpu import Cpu
from kvzip.evaluation import load_model
from kvzip.profiles.rope import rotate
from kvzip.profiles.ropes import Ropes

RUNS = 5


def measure(spec: str, samples: Sequence[Sample], ropes: Ropes, judge: Judge) -> str:
    """A row of the table."""
    rows, divergence = [], 0.0
    for sample in samples:
        codec = spec.replace("{test}", sample.name.split(".")[-2])
        cache = sample.tensors(sample.keys, sample.values)
        device = Cpu(threads=1)
        packed = kvzip.compress(cache, codec=codec, device=device)
        restored = kvzip.decompress(packed, device=device)
        speed = max(_speed(packed, sample, device) for _ in range(RUNS))
        outcome = _outcome(8 * len(packed) / (2 * sample.keys.size), sample, restored, ropes)
        divergence += judge.relative(sample, outcome)
        rows.append((outcome.bits, outcome.key_error, outcome.value_error, speed))
    bits, key_error, value_error, speed = np.mean(rows, axis=0)
    relative = divergence / sum(sample.cachegen for sample in samples)
    return f"| `{spec}` | {bits:.3f} | {relative:.3f} | {key_error:.4f} | {value_error:.4f} | {speed:.3f} |"


def _speed(packed: bytes, sample: Sample, device: Cpu) -> float:
    started = time.process_time()
    kvzip.decompress(packed, device=device)
    return (sample.keys.nbytes + sample.values.nbytes) / (time.process_time() - started) / 1e9


def _outcome(bits: float, sample: Sample, restored: dict[str, np.ndarray], ropes: Ropes) -> Outcome:
    keys, values = (
        np.stack([restored[f"layers.{i}.{kind}"].swapaxes(0, 1) for i in range(len(sample.keys))]).astype(np.float32)
        for kind in ("key", "value")
    )
    errors = []
    for layer, (old, new) in enumerate(zip(sample.keys, keys, strict=True)):
        rope = ropes.of(layer)
        x, y = (rotate(k, rope, inverse=True) if rope else k.astype(np.float32) for k in (old, new))
        errors.append(np.square(x - y).sum() / np.square(x - x.mean(axis=0)).sum())
    original = sample.values.astype(np.float32)
    value_error = np.square(original - values).sum() / np.square(original).sum()
    return Outcome(bits, float(np.mean(errors)), float(value_error), keys, values)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kvtc_figures", description=str(__doc__).splitlines()[0])
    parser.add_argument("--test", nargs="+", type=Path, required=True)
    parser.add_argument("--codec", nargs="+", required=True, help="as for kvzip compress --codec")
    parser.add_argument("--rope", required=True, help="of the measure of errors, such as theta=1e5")
    parser.add_argument("--model", type=Path, help="a GGUF file or model folder, to measure KL")
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    samples = [Sample.read(path, options.tokens) for path in options.test]
    judge = Judge(samples, load_model(options.model) if options.model else None)
    print("| codec | bits | KL / cachegen's | K error | V error | decode GB/s a core |\n" + "|---" * 6 + "|")
    for spec in options.codec:
        print(measure(spec, samples, Ropes.parse(options.rope), judge), flush=True)


if __name__ == "__main__":
    main()
