"""What the ideas of the CacheGen paper gain on real caches.

    python -m benchmarks.cachegen_paper CACHE... [--model]

Liu et al., "CacheGen: KV Cache Compression and Streaming for Fast Language Model Serving", SIGCOMM 2024. Caches hold
``layers.{i}.key`` and ``layers.{i}.value`` ``[heads, tokens, head_dim]`` in bfloat16; with ``--model`` also
``token_ids`` of SmolLM2, whose package judges what layer-wise bins do. Prints markdown.

Costs are code lengths that include what learning costs: of an adaptive code (Krichevsky and Trofimov 1981) that knows
nothing of a channel before its first token; or bytes of real files.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

import kvzip
from benchmarks.inputs import batch_of
from kvzip import streaming
from kvzip.codecs.cachegen import CacheGen
from kvzip.coding import bins as schedule
from kvzip.coding import tables
from kvzip.devices.cpu import Cpu
from kvzip.lmcache.blob import write_blob
from kvzip.lmcache.cachegen import encode, lmcache_bins
from kvzip.lmcache.convert import import_files
from kvzip.profiles.detect import detect
from kvzip.profiles.rope import rotate
from tests.reference import cachegen

GROUP = 10
"""Tokens that share an anchor in the paper."""

STEP = 0.6
"""Quantization step over the geometric mean of a layer's channel deviations: about 2.5 bits a number."""

Planes = list[np.ndarray]


def code_length(symbols: np.ndarray) -> np.ndarray:
    """Bits of each channel of ``[T, C]`` integers under the adaptive code, for an alphabet from least to largest."""
    low = symbols.min(axis=0)
    size = symbols.max(axis=0) - low + 1
    width, (tokens, channels) = int(size.max()), symbols.shape
    flat = (symbols - low + np.arange(channels) * width).ravel()
    counts = np.bincount(flat, minlength=channels * width).reshape(channels, width)
    lgamma = np.array([math.lgamma(n + 0.5) for n in range(tokens + 1)])
    start = np.array([math.lgamma(n / 2) for n in range(1, width + 1)])
    end = np.array([math.lgamma(tokens + n / 2) for n in range(1, width + 1)])
    return (end[size - 1] - start[size - 1] - (lgamma[counts] - lgamma[0]).sum(axis=1)) / math.log(2)


def entropy(symbols: np.ndarray) -> np.ndarray:
    """Bits of each channel of ``[T, C]`` integers under its own frequencies, which somebody else has paid for."""
    tokens = len(symbols)
    counts = np.stack([(symbols == s).sum(axis=0) for s in range(int(symbols.max()) + 1)]).astype(np.float64)
    return -(counts * np.log2(np.where(counts > 0, counts / tokens, 1))).sum(axis=0)


def directly(x: np.ndarray, step: float) -> np.ndarray:
    return np.rint(x / step).astype(np.int64)


def without_mean(x: np.ndarray, step: float) -> np.ndarray:
    return np.rint((x - x.mean(axis=0)) / step).astype(np.int64)


def from_previous(x: np.ndarray, step: float) -> np.ndarray:
    """Differences to the token before as the decoder has it: the error stays that of the step."""
    symbols = directly(x, step)
    return np.diff(symbols, axis=0, prepend=0)


def from_anchor(x: np.ndarray, step: float) -> np.ndarray:
    """The paper's: differences of a group's tokens to its first, which comes as it is."""
    symbols = directly(x, step)
    anchors = symbols[np.arange(len(x)) // GROUP * GROUP]
    return np.where((np.arange(len(x)) % GROUP == 0)[:, None], symbols, symbols - anchors)


MODES: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "direct": directly,
    "mean removed": without_mean,
    "previous token": from_previous,
    f"anchor of {GROUP}": from_anchor,
}


def costs_of_modes(x: np.ndarray, step: float) -> np.ndarray:
    """Bits of one plane ``[T, C]`` in each mode, and with the best for each channel; side information included: 16 bits
    a channel for a mean, 2 for a choice.
    """
    first = np.arange(len(x)) % GROUP == 0
    costs = []
    for name, mode in MODES.items():
        symbols = mode(x, step)
        if mode is from_anchor:
            costs.append(code_length(symbols[first]) + code_length(symbols[~first]))
        else:
            costs.append(code_length(symbols) + (16 if name == "mean removed" else 0))
    return np.array([*(cost.sum() for cost in costs), (np.min(costs, axis=0) + 2).sum()])


def delta_coding(keys: Planes, values: Planes, plain_keys: Planes | None) -> Iterable[str]:
    """At one step per layer, so at one distortion; then losslessly on LMCache's symbols. The sink is left out."""
    yield f"| bits per number | {' | '.join([*MODES, 'best per channel'])} |"
    yield "|---|" + "--:|" * (len(MODES) + 1)
    steps = {"keys": _steps(plain_keys or keys), "values": _steps(values)}
    rows = {"keys as cached": keys, "keys, RoPE undone": plain_keys, "values": values}
    for name, planes in rows.items():
        if planes is not None:
            of_kind = steps[name.split()[0].rstrip(",")]
            total = sum(costs_of_modes(plane[1:], step) for plane, step in zip(planes, of_kind, strict=True))
            yield _row(name, total / sum(plane[1:].size for plane in planes))
    for kind, planes in (("key", keys), ("value", values)):
        symbols = [symbols_of(plane[1:], kind, layer, len(planes)) for layer, plane in enumerate(planes)]
        total = sum(costs_of_modes(plane.astype(np.float64), 1.0) for plane in symbols)
        yield _row(f"LMCache's symbols of {kind}s", total / sum(plane.size for plane in symbols))


def _steps(planes: Planes) -> list[float]:
    return [STEP * float(np.exp(np.log(np.maximum(x[1:].std(axis=0), 1e-9)).mean())) for x in planes]


def _row(name: object, numbers: Iterable[float]) -> str:
    return f"| {name} | {' | '.join(f'{number:.3f}' for number in numbers)} |"


def symbols_of(x: np.ndarray, kind: str, layer: int, layers: int) -> np.ndarray:
    """LMCache's symbols of ``[T, C]``."""
    return cachegen.quantize(x.astype(ml_dtypes.bfloat16), schedule.lookup(schedule.lmcache(layers, kind), layer))


def table_choice(keys: Planes, values: Planes) -> Iterable[str]:
    """Parametric, exact and LMCache's tables by what they really cost, per block of some length."""
    device = Cpu()
    columns = ["LMCache's table, range coder", "packed counts, range coder", "family, rANS"]
    yield f"| tokens in a block | {' | '.join([*columns, 'family or counts: by channel', 'by block'])} |"
    yield "|--:|--:|--:|--:|--:|--:|"
    for tokens in (256, 512, 1024):
        totals, elements = np.zeros(5), 0
        for kind, planes in (("key", keys), ("value", values)):
            runs = schedule.lmcache(len(planes), kind)
            for layer, plane in enumerate(planes):
                bins, block = schedule.lookup(runs, layer), plane[:tokens].astype(ml_dtypes.bfloat16)
                symbols = symbols_of(block, kind, layer, len(planes))
                family, table_bits = _family_bits(symbols, 2 * (bins // 2 - 1) + 1), tables.TABLE_BITS
                streams, counts = _range_bits(block, bins, device)
                exact = entropy(symbols.astype(np.int64)) + counts / block.shape[1]
                parametric = family + table_bits
                totals += [
                    streams + 33 * 16 * block.shape[1],
                    streams + counts,
                    parametric.sum(),
                    np.minimum(parametric, exact).sum() + block.shape[1],
                    min(parametric.sum(), exact.sum()) + 8,
                ]
                elements += block.size
        yield _row(tokens, totals / elements)


def _family_bits(symbols: np.ndarray, alphabet: int) -> np.ndarray:
    """Bits of each channel under the best table of the family."""
    counts = np.stack([(symbols == s).sum(axis=0) for s in range(alphabet)], axis=1).astype(np.float64)
    frequencies = np.diff(tables.family(alphabet).astype(np.int64), axis=1)[:, :alphabet]
    return np.asarray((counts @ -np.log2(frequencies / tables.SCALE).T).min(axis=1))


def _range_bits(block: np.ndarray, bins: int, device: Cpu) -> tuple[float, float]:
    """Bits of the real streams, lengths of 16 bits included, and of the real packed counts."""
    batch = batch_of([("key", block.reshape(len(block), 1, -1))])
    codec = CacheGen(k_bins=str(bins), coder="range", sinks=0).bind([batch.blocks[0].plane])
    (encoded,) = codec.encode(batch, device)
    sections = {tag: section.nbytes * 8 for tag, section in encoded.sections.items()}
    return sections["STRM"] + sections["LENS"], sections["CNTS"]


def quality_levels(keys: Planes, values: Planes) -> Iterable[str]:
    """Several qualities of one chunk: apart, or the finer as refinements of the coarser."""
    yield "| levels M | finest alone | all of them apart | each refining the one before | the finest pays for it |"
    yield "|---|--:|--:|--:|--:|"
    for ladder in ((7, 14, 28), (15, 30, 60), (5, 15, 45), (15, 45)):
        alone = apart = refined = 0.0
        elements = 0
        for plane in keys[::4] + values[::4]:
            x = plane[1:]
            top = np.abs(x).max(axis=1, keepdims=True)
            levels = [np.rint(x * (m / top) + m).astype(np.int64) for m in ladder]
            costs = [entropy(symbols).sum() for symbols in levels]
            alone += costs[-1]
            apart += sum(costs)
            together = levels[0]
            for symbols in levels[1:]:
                together = _numbered(together * (int(symbols.max()) + 1) + symbols)
            refined += entropy(together).sum()
            elements += x.size
        alone, apart, refined = alone / elements, apart / elements, refined / elements
        yield _row(", ".join(map(str, ladder)), (alone, apart, refined, refined - alone))


def _numbered(symbols: np.ndarray) -> np.ndarray:
    """The same partition with small numbers."""
    return np.unique(symbols, return_inverse=True)[1].reshape(symbols.shape)


def beside_lmcache(keys: Planes, values: Planes) -> Iterable[str]:
    """Whole files of the same symbols: LMCache's blob and the .kvz that ``kvzip import`` makes of it."""
    device = Cpu()
    kv = np.stack([np.stack(pair) for pair in zip(keys, values, strict=True)])[..., None, :].astype(ml_dtypes.bfloat16)
    yield "| tokens in a chunk | LMCache's blob, bytes | .kvz, bytes | ratio |"
    yield "|--:|--:|--:|--:|"
    for tokens in (256, 1024):
        blob = write_blob(encode(np.ascontiguousarray(kv[:, :, :tokens]), *lmcache_bins(len(keys)), device))
        stored = import_files([("blob", blob)], None, device=device)
        yield f"| {tokens} | {len(blob)} | {len(stored)} | {len(stored) / len(blob):.3f} |"


def streaming_rule(path: Path) -> Iterable[str]:
    """A file of three qualities, in chunks of 128 tokens, over links of changing speed; the deadline is time 1."""
    cache = {name: array for name, array in load_file(path).items() if name.startswith("layers.")}
    stored = io.BytesIO(kvzip.compress(cache, codec=LEVELS, block_tokens=128, notice=lambda _: None))
    sizes = streaming.level_sizes(stored).astype(np.float64)
    whole = sizes.sum(axis=0)
    bits = whole * 8 / sum(array.size for array in cache.values())
    yield f"Levels of {', '.join(f'{number:.2f}' for number in bits)} bits per number, all in one file."
    yield ""
    yield "| link | levels of the chunks | arrives | finest throughout | coarsest throughout |"
    yield "|---|---|--:|--:|--:|"
    enough = float(whole[2])  # bytes per deadline that just carry the finest
    for name, trace in {
        "just enough for the finest": streaming.Trace([0], [enough]),
        "0.7 of that": streaming.Trace([0], [0.7 * enough]),
        "falls to 0.5 after a quarter": streaming.Trace([0, 0.25], [enough, 0.5 * enough]),
        "nothing from 0.3 to 0.5": streaming.Trace([0, 0.3, 0.5], [enough, 0, enough]),
        "rises from 0.4 to 1.5 after 0.3": streaming.Trace([0, 0.3], [0.4 * enough, 1.5 * enough]),
    }.items():
        found = streaming.simulate(sizes, trace, 1.0, first_guess=trace.bytes_per_second[0])
        fixed = [trace.arrival(0, whole[level]) for level in (2, 0)]
        levels = " ".join(map(str, found.levels))
        yield f"| {name} | {levels} | {found.seconds:.2f} | {fixed[0]:.2f} | {fixed[1]:.2f} |"


LEVELS = "cachegen:level=2,levels=3"
"""Three qualities around LMCache's: M = 5, 15 and 45 where LMCache has 15."""


def layerwise_bins(path: Path, keys: Planes, values: Planes) -> Iterable[str]:
    """LMCache's schedule against schedules of the same size that favour other layers, judged by the model."""
    from kvzip.evaluation import compare, load_model

    model, tensors = load_model(), load_file(path)
    layers, tokens = len(keys), len(keys[0])
    after = tensors["token_ids"].astype(np.int64)[tokens : tokens + 385]
    cache = {name: array for name, array in tensors.items() if name.startswith("layers.")}
    original = model.log_probabilities(cache, after[:-1])
    yield "| bins of keys; of values | bits per number | KL, nats |"
    yield "|---|--:|--:|"
    third = layers // 3
    for k_bins, v_bins in (
        ("0-9:32,10-:16", "0-1:32,2-:16"),
        (f"0-{layers - 11}:16,{layers - 10}-:32", f"0-{layers - 3}:16,{layers - 2}-:32"),
        ("21", "17"),
        (f"0-{third - 1}:32,{third}-{2 * third - 1}:20,{2 * third}-:14", f"0-{third - 1}:20,{third}-:16"),
    ):
        stored = kvzip.compress(cache, codec=CacheGen(k_bins=k_bins, v_bins=v_bins), notice=lambda _: None)
        restored = kvzip.decompress(stored)
        kl = compare(original, model.log_probabilities(restored, after[:-1]), after[1:]).kl
        bits = len(stored) * 8 / sum(array.size for array in cache.values())
        yield f"| {k_bins}; {v_bins} | {bits:.3f} | {kl.value:.4f} +- {kl.stderr:.4f} |"
    stored = kvzip.compress(cache, codec=LEVELS, notice=lambda _: None)
    sizes = streaming.level_sizes(io.BytesIO(stored)).sum(axis=0) * 8 / sum(array.size for array in cache.values())
    for level, bits in enumerate(sizes):
        restored = kvzip.decompress(stored, level=level)
        kl = compare(original, model.log_probabilities(restored, after[:-1]), after[1:]).kl
        yield f"| {LEVELS}, level {level} | {bits:.3f} | {kl.value:.4f} +- {kl.stderr:.4f} |"


def read(path: Path) -> tuple[Planes, Planes, Planes | None]:
    """Keys, values and keys with their rotation undone, float32 ``[T, C]`` per layer."""
    tensors = load_file(path)
    layers = sum(name.endswith(".key") for name in tensors)
    arrays = {
        kind: [tensors[f"layers.{i}.{kind}"].swapaxes(0, 1).astype(np.float32) for i in range(layers)]
        for kind in ("key", "value")
    }
    found = detect(arrays["key"])
    plain = [rotate(x, found.rope, inverse=True) for x in arrays["key"]] if found else None
    keys, values = ([x.reshape(len(x), -1) for x in arrays[kind]] for kind in ("key", "value"))
    return keys, values, [x.reshape(len(x), -1) for x in plain] if plain else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("caches", nargs="+", type=Path, metavar="CACHE")
    parser.add_argument("--model", action="store_true", help="judge layer-wise bins by SmolLM2")
    options = parser.parse_args()
    for path in options.caches:
        keys, values, plain = read(path)
        print(f"\n## {path.stem}")
        parts = [delta_coding(keys, values, plain), table_choice(keys, values)]
        parts += [beside_lmcache(keys, values), quality_levels(keys, values), streaming_rule(path)]
        if options.model:
            parts.append(layerwise_bins(path, keys, values))
        for part in parts:
            print()
            for line in part:
                print(line, flush=True)


if __name__ == "__main__":
    main()
