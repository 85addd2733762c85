"""``kvzip bench``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvzip.cli import options, text
from kvzip.cli.items import for_each

if TYPE_CHECKING:
    from kvzip.bench import Row, Sample
    from kvzip.codecs.base import Codec
    from kvzip.pipeline import PlaneErrors

SCHEMA = "kvzip-bench/1"

Codecs = Annotated[
    list[str] | None,
    typer.Option("--codec", metavar="NAME[:OPT=VAL,...]", help="Measure this one; may be repeated. Else all known."),
]
Seconds = Annotated[
    float, typer.Option("--seconds", metavar="S", min=0, help="How long to repeat each measurement, at least 3 times.")
]


def bench(
    files: options.Files = None,
    codec: Codecs = None,
    seconds: Seconds = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    layout: options.LayoutName = None,
    heads: options.Heads = None,
    head_dim: options.HeadDim = None,
    threads: options.Threads = None,
    device: options.DeviceName = "auto",
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Measure codecs on the keys and values of a cache: size, speed and errors.

    Sizes are those of whole .kvz files, with all side information. Speeds are medians in GB/s of uncompressed numbers,
    in memory, without reading and writing. Errors are |x - y| / |x| of a layer, after decoding.

    \b
    Examples:
      kvzip bench kv.safetensors
      kvzip bench kv.safetensors --codec cachegen --codec cachegen:level=3 --codec fp8:scale=head -T 1
    """
    job = options.Job.of(quiet, verbose, device=device, threads=threads)

    def work(name: str) -> None:
        from kvzip.bench import copy_speed, load, measure
        from kvzip.layouts import map_cache
        from kvzip.tensorfile import open_tensors

        candidates = _codecs(codec)
        with options.open_input(name) as (file, _), open_tensors(name if file is None else file) as source:
            cache_map = map_cache(source, layout, heads, head_dim)
            sample = load(source, cache_map)
        whole = max(plane.tokens for plane in cache_map.planes if plane.kind != "bytes")
        if sample.tokens < whole:
            job.messages.notice(f"{text.called(name)}: measured on the first {sample.tokens} of {whole} tokens")
        rows = [(spec, measure(sample, candidate, job.device, seconds)) for spec, candidate in candidates]
        if as_json:
            print(json.dumps(_json(name, str(job.device), sample, rows)))
            return
        print(
            f"{text.plain(text.called(name))}: {text.size(sample.nbytes)} of keys and values, {sample.tokens} tokens; "
            f"{job.device}; a copy: {copy_speed(sample):.1f} GB/s\n{_table(rows)}"
        )

    for_each(options.inputs_of(files), work, "measured", job.messages)


def _codecs(specs: Sequence[str] | None) -> list[tuple[str, Codec]]:
    """What to measure, each with the name that a user knows it by."""
    from kvzip.codecs import available_codecs, get_codec

    return [(spec, get_codec(spec)) for spec in specs or available_codecs()]


def _table(rows: Sequence[tuple[str, Row]]) -> str:
    kinds = list(dict.fromkeys(plane.kind for _, row in rows for plane in row.sample.planes))
    lines: list[tuple[str, ...]] = [
        (
            "codec",
            "ratio",
            "bits/element",
            "encode GB/s",
            "decode GB/s",
            *(f"{kind} error mean, worst" for kind in kinds),
        )
    ]
    for spec, row in rows:
        figures = (
            f"{row.ratio:.3f}",
            f"{row.bits_per_element:.3f}",
            f"{row.encode_speed:.2f}",
            f"{row.decode_speed:.2f}",
        )
        lines.append((spec, *figures, *(_errors(row.errors_of(kind)) for kind in kinds)))
    return text.table(lines, indent="  ")


def _errors(errors: Sequence[PlaneErrors]) -> str:
    """``mean, worst (layer)`` of some planes."""
    worst = max(errors, key=lambda error: error.relative)
    if not worst.relative:
        return "none"
    mean = sum(error.relative for error in errors) / len(errors)
    return f"{text.error(mean)}, {text.error(worst.relative)} ({worst.plane.layer})"


def _json(name: str, device: str, sample: Sample, rows: Sequence[tuple[str, Row]]) -> dict[str, Any]:
    from kvzip.quality import to_json

    return {
        "schema": SCHEMA,
        "file": name,
        "device": device,
        "bytes": sample.nbytes,
        "elements": sample.elements,
        "tokens": sample.tokens,
        "rows": [
            {
                "codec": spec,
                "config": row.codec.config(),
                "stored_bytes": row.totals.total,
                "ratio": row.ratio,
                "bits_per_element": row.bits_per_element,
                "encode_gb_per_s": row.encode_speed,
                "decode_gb_per_s": row.decode_speed,
                "runs": row.runs,
                "errors": [to_json(error) for error in row.errors],
            }
            for spec, row in rows
        ],
    }
