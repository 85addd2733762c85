"""docs/results.md: every codec on real caches, beside LMCache and general compressors.

    python -m benchmarks.results CACHE.safetensors ... [--model MODEL.gguf] [--output docs/results.md]

Caches whose file names begin alike up to the first dot are taken as one model's and averaged. What the text says was
used is what was used.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

import kvzip
from kvzip.bench import (
    Candidate,
    Judge,
    Row,
    Sample,
    attention_errors,
    candidates,
    draw_queries,
    installed_peers,
    load,
    plan,
)
from kvzip.bench.model import CONFIDENCE, Continuation
from kvzip.bench.picture import bench_picture, pareto
from kvzip.bench.sample import token_ids
from kvzip.bench.timing import Timing
from kvzip.cache import Block
from kvzip.codecs import get_codec
from kvzip.devices import Device, get_device
from kvzip.devices.cpu import available_cores
from kvzip.devices.levels import processor_name
from kvzip.errors import KvzipError, UsageError
from kvzip.evaluation import LanguageModel, load_model
from kvzip.layouts import map_cache
from kvzip.lmcache.convert import export_cache, import_files
from kvzip.pipeline.report import Tally
from kvzip.profiles.profile import read as read_profile
from kvzip.quality import differences
from kvzip.tensorfile import open_tensors

LMCACHE_CHUNKS = (256, 1024)
INTRODUCTION = """\
Written by `make results`: every codec, at its presets and levels, on real caches. Bits per element and ratios count all
side information; errors are means over the layers; what each column means stands in [cli.md](cli.md), under *What bench
measures*. LMCache's rows are the blobs that kvzip writes byte for byte as LMCache 0.5.6 does, and what is decoded of
them; its speed was not measured."""

RUNGS = ("level=3", "level=5", "level=7")
"""Of kvtc with a profile."""

LEAST_OTHERS = 3
"""Caches that a profile is learned from, at least."""

PACKAGES = ("numpy", "zstandard", "lz4", "zipnn", "lmcache", "torch", "transformers")


@dataclass(frozen=True)
class Measured:
    """One cache and its rows."""

    path: Path
    sample: Sample
    rows: list[Row]
    queries: str


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("caches", nargs="+", type=Path, help="real caches, with token_ids where a model is given")
    parser.add_argument("--model", type=Path, help="a GGUF file or model folder; asked about the caches that fit it")
    parser.add_argument(
        "--profile", type=Path, action="append", default=[], help="of kvtc, for the caches that it fits"
    )
    parser.add_argument(
        "--train", type=int, metavar="LAYERS", help="also learn profiles, each from a model's other caches"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each measurement is repeated (0.5)")
    parser.add_argument("--output", type=Path, default=Path("docs/results.md"))
    options = parser.parse_args()
    device = get_device("cpu")
    model = load_model(options.model) if options.model else None
    groups: dict[str, list[Measured]] = {}
    for path in options.caches:
        with tempfile.TemporaryDirectory(prefix="kvzip-results-") as folder:
            profiles = {profile.name: profile for profile in options.profile}
            others = [other for other in options.caches if _model_of(other) == _model_of(path) and other != path]
            if options.train and len(others) >= LEAST_OTHERS:
                profiles["others"] = _learned(others, options.train, Path(folder) / "others.kvp")
            measured = _measure(path, model, profiles, device, options.seconds)
        groups.setdefault(_model_of(path), []).append(measured)
        # After every cache: a run that is stopped leaves what it has.
        lines = [*_head(model, options.profile, options.train, device), *_groups(groups, options.output)]
        options.output.write_text("\n".join(lines) + "\n")


def _model_of(path: Path) -> str:
    return path.name.partition(".")[0]


def _learned(caches: Sequence[Path], layers: int, profile: Path) -> Path:
    """A profile of kvtc that has not seen the cache it is for."""
    command = [sys.executable, "-m", "kvzip", "train", *map(str, caches), "-o", str(profile), "--group", str(layers)]
    subprocess.run(command, check=True)
    return profile


def _measure(
    path: Path, model: LanguageModel | None, profiles: Mapping[str, Path], device: Device, seconds: float
) -> Measured:
    with open_tensors(path) as source:
        sample, ids = load(source, map_cache(source)), token_ids(source)
    judge = _judge(sample, ids, model)
    peers, _ = installed_peers(sample, device)
    rows: list[Row] = []
    learned = [
        Candidate(f"kvtc:profile={name},{options}", get_codec(f"kvtc:profile={profile},{options}"))
        for name, profile in profiles.items()
        for options in RUNGS
    ]
    chosen = [*candidates(), *learned]
    for step in plan(sample, chosen, peers, device, judge, seconds):
        print(f"{path.name}: {step.name}", file=sys.stderr, flush=True)
        try:
            rows.append(step.run())
        except KvzipError as error:
            print(f"  left out: {error}", file=sys.stderr)
    rows += _lmcache(path, sample, judge, device)
    assert judge.queries is not None
    return Measured(path, sample, rows, judge.queries.source)


def _judge(sample: Sample, ids: np.ndarray | None, model: LanguageModel | None) -> Judge:
    """With the model where the cache is one of its own."""
    if model is not None and ids is not None:
        try:
            continuation = Continuation(model, sample, ids)
        except UsageError as error:
            print(f"  the model is not asked: {error}", file=sys.stderr)
        else:
            return Judge(continuation.queries(sample), continuation)
    return Judge(draw_queries(sample))


def _lmcache(path: Path, sample: Sample, judge: Judge, device: Device) -> Iterator[Row]:
    """LMCache's CacheGen: the blobs that it writes, in its chunks, and what it decodes of them."""
    untimed = Timing((math.nan,))
    with kvzip.open(kvzip.compress(path, codec="cachegen:sinks=0", device=device), device=device) as cache:
        for chunk in LMCACHE_CHUNKS:
            spans = [(at, min(at + chunk, sample.tokens)) for at in range(0, sample.tokens, chunk)]
            blobs = [export_cache(cache, tokens=span, device=device) for span in spans]
            file = io.BytesIO()
            import_files([(f"{span}", blob) for span, blob in zip(spans, blobs, strict=True)], file, device=device)
            with kvzip.open(file.getvalue(), device=device) as decoded:
                restored = [
                    decoded.key(plane.layer) if plane.kind == "key" else decoded.value(plane.layer)
                    for plane in sample.planes
                ]
            tally = Tally()
            for plane, original, values in zip(sample.planes, sample.arrays, restored, strict=True):
                tally.add(Block((plane,), 0, plane.tokens), [differences(original, values)])
            yield Row(
                f"LMCache, chunks of {chunk}",
                sample,
                sum(map(len, blobs)),
                untimed,
                untimed,
                errors=tally.totals(),
                attention=attention_errors(sample, restored, judge.queries) if judge.queries else [],
                quality=judge.continuation.judge(sample, restored) if judge.continuation else None,
            )


# ------------------------------------------------------------------------------------------------------------- the page


def _head(model: LanguageModel | None, profiles: Sequence[Path], train: int | None, device: Device) -> Iterator[str]:
    yield f"# Results\n\n{INTRODUCTION}\n"
    yield f"- machine: {processor_name()}, {available_cores()} cores; {device}; {platform.system()}"
    if (load := os.getloadavg()[1]) > available_cores():
        yield f"- the machine was busy with other work (load {load:.0f}): speeds say little, sizes and errors are exact"
    yield f"- kvzip {kvzip.__version__}{_commit()}, Python {platform.python_version()}, {', '.join(_packages())}"
    if model is not None:
        yield f"- model: {model.name}, in float32 on the CPU"
    for path in profiles:
        profile = read_profile(path)
        size = f"{path.stat().st_size / 1e6:.1f} MB, not counted in sizes"
        yield f"- profile: {path.name}, {profile.hash[:16]}..., {size}"
    if train:
        yield f"- profile `others`: learned from the same model's other caches, {train} layers a group; not counted"


def _groups(groups: dict[str, list[Measured]], output: Path) -> Iterator[str]:
    for name, members in groups.items():
        yield from _group(name, members, output)


def _group(name: str, members: list[Measured], output: Path) -> Iterator[str]:
    first = members[0].sample
    plane = first.planes[0]
    layers = len({plane.layer for plane in first.planes})
    yield ""
    yield f"## {name}"
    yield ""
    yield f"{layers} layers, {plane.heads} KV heads of {plane.head_dim}, {plane.dtype}; means over:"
    yield ""
    for member in members:
        digest = hashlib.sha256(member.path.read_bytes()).hexdigest()[:16]
        size = f"{member.sample.tokens} tokens, {member.sample.nbytes / 1e6:.1f} MB"
        yield f"- `{member.path.name}`, {size}, sha256 {digest}..."
    yield ""
    with_model = all(any(row.quality for row in member.rows) for member in members)
    positions = next((row.quality.positions for row in members[0].rows if row.quality), 0)
    asked = f"; the model goes on for {positions} tokens, ± 95 % confidence" if with_model else ""
    yield f"Queries: {members[0].queries}{asked}. Bold: no other row is smaller and loses less."
    yield ""
    yield from _table(members, with_model)
    picture = output.with_name(f"results-{name}.png")
    title = f"{name}: {members[0].path.name}, {first.tokens} tokens"
    picture.write_bytes(bench_picture([row for row in members[0].rows if row.name != "copy"], title, ".png"))
    yield ""
    yield f"![rate against distortion, and errors by layer]({picture.name})"


def _table(members: Sequence[Measured], with_model: bool) -> Iterator[str]:
    """Means over the caches; a row that not every cache has is left out."""
    names = [row.name for row in members[0].rows]
    together = [[row for member in members for row in member.rows if row.name == name] for name in names]
    found = [rows for rows in together if len(rows) == len(members)]
    titles = ["codec", "ratio", "bits/element", "encode GB/s", "decode GB/s"]
    titles += [f"{kind} error" for kind in members[0].sample.kinds()] + ["logits error", "output error"]
    titles += ["KL, nats", "top-1, %", "perplexity, %"] if with_model else []
    yield "| " + " | ".join(titles) + " |"
    yield "|---" * len(titles) + "|"
    lossy = [rows for rows in found if rows[0].lossy]
    points = [(_mean([row.bits_per_element for row in rows]), _distortion(rows)) for rows in lossy]
    best = {lossy[number][0].name for number in pareto(points)}
    for rows in sorted(found, key=lambda rows: _mean([row.bits_per_element for row in rows])):
        if rows[0].name == "copy":
            continue
        name = f"`{rows[0].name}`" if rows[0].codec else rows[0].name
        cells = [f"**{name}**" if rows[0].name in best else name, *_cells(rows, with_model)]
        yield "| " + " | ".join(cells) + " |"


def _cells(rows: Sequence[Row], with_model: bool) -> Iterator[str]:
    yield f"{_mean([row.ratio for row in rows]):.2f}"
    yield f"{_mean([row.bits_per_element for row in rows]):.3f}"
    for speeds in ([row.encode_speed for row in rows], [row.decode_speed for row in rows]):
        yield f"{_mean(speeds):.3g}" if math.isfinite(_mean(speeds)) else "-"
    kinds = rows[0].sample.kinds()
    for values in (
        *([row.mean_error(kind) for row in rows] for kind in kinds),
        [row.logits_error for row in rows],
        [row.output_error for row in rows],
    ):
        yield f"{_mean(values):.3g}" if rows[0].lossy else "none"
    if with_model:
        yield from _quality(rows)


def _quality(rows: Sequence[Row]) -> Iterator[str]:
    """Means over the caches, and the confidence of the mean from the standard errors of each."""
    for name, scale, form, minus in (
        ("kl", 1, ".2g", 0),
        ("top1", 100, ".1f", 0),
        ("perplexity_ratio", 100, "+.2f", 100),
    ):
        estimates = [getattr(row.quality, name) for row in rows if row.quality]
        if not estimates or not rows[0].lossy:
            yield "100" if name == "top1" else "none"
            continue
        half = CONFIDENCE * scale * math.hypot(*(estimate.stderr for estimate in estimates)) / len(estimates)
        yield f"{scale * _mean([estimate.value for estimate in estimates]) - minus:{form}} ± {half:.2g}"


def _distortion(rows: Sequence[Row]) -> float:
    """To two digits: smaller differences say nothing."""
    return float(f"{_mean([row.quality.kl.value if row.quality else row.output_error for row in rows]):.2g}")


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _packages() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return f" ({done.stdout.strip()})" if done.returncode == 0 else ""


if __name__ == "__main__":
    main()
