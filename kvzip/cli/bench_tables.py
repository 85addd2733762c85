"""What ``kvzip bench`` shows to people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvzip.cli import text

if TYPE_CHECKING:
    from kvzip.bench import Link, Row
    from kvzip.bench.timing import Timing
    from kvzip.cli.bench import Report
    from kvzip.evaluation import Estimate


BUSY = 0.5
"""The spread of a speed from which on it says little."""


def lines(report: Report, verbose: int) -> Iterator[str]:
    """Everything about one cache; with ``verbose`` the worst layers, too."""
    sample, judge = report.subject.sample, report.judge
    size = f"{text.size(sample.nbytes)} of keys and values, {sample.tokens} tokens"
    yield f"{report.subject.name}: {size}; {report.device}"
    if not report.rows:
        yield "  nothing was measured"
        return
    yield rates(report.rows)
    timings = [timing for row in report.rows for timing in (row.encode, row.decode) if len(timing.times) > 1]
    if any(timing.spread > BUSY for timing in timings):
        yield f"  the machine is busy: speeds vary by more than {BUSY:.0%}"
    if judge.queries:
        yield f"  logits, output: errors of attention, queries {judge.queries.source}"
    if judge.continuation:
        quality = next((row.quality for row in report.rows if row.quality), None)
        positions = quality.positions if quality else 0
        yield f"  KL, top-1, perplexity: {judge.continuation.model.name} at {positions} positions, ±: 95 % confidence"
    yield ""
    yield loads(report.rows, report.links)
    if verbose:
        yield ""
        yield worst_layers(report.rows)
    if report.missing:
        yield f"  not installed: {', '.join(report.missing)}"
    if len(report.rows) < report.planned:
        yield f"  {len(report.rows)} of {report.planned} rows: the others were not measured"


def rates(rows: Sequence[Row]) -> str:
    """Size, speed and errors of each row."""
    kinds = rows[0].sample.kinds()
    copies = any(row.copies for row in rows)
    quality = any(row.quality for row in rows)
    table = [
        (
            "codec",
            "ratio",
            "bits/el",
            "encode GB/s",
            "decode GB/s",
            *(("encode+copies", "decode+copies") if copies else ()),
            *(f"{kind} err" for kind in kinds),
            "logits err",
            "output err",
            *(("KL, nats", "top-1, %", "perplexity, %") if quality else ()),
        )
    ]
    for row in rows:
        nbytes = row.sample.nbytes
        together = (f"{nbytes / seconds / 1e9:.2f}" for seconds in (row.encode_seconds, row.decode_seconds))
        table.append(
            (
                row.name,
                f"{row.ratio:.3f}",
                f"{row.bits_per_element:.3f}",
                _speed(row.encode, nbytes),
                _speed(row.decode, nbytes),
                *(together if copies else ()),
                *(_error(row, row.mean_error(kind)) for kind in kinds),
                _error(row, row.logits_error),
                _error(row, row.output_error),
                *(_quality(row) if quality else ()),
            )
        )
    return text.table(table, indent="  ")


def loads(rows: Sequence[Row], links: Sequence[Link]) -> str:
    """How long the cache takes to come over each link and be decoded, and where that stops to pay."""
    from kvzip.bench.breakeven import pays_below

    nbytes = rows[0].sample.nbytes
    table = [("load time, ms", *(f"{link.name}  " for link in links), "pays below")]
    table.append(("uncompressed", *(f"{_milliseconds(link.raw_seconds(nbytes))}  " for link in links), ""))
    for row in rows:
        if row.name == "copy":
            continue
        limit = pays_below(row)
        times = (f"{_milliseconds(link.load_seconds(row))} {' ' if link.speed < limit else '-'}" for link in links)
        table.append((row.name, *times, f"{8 * limit / 1e9:.3g} Gbit/s" if limit else "never"))
    return text.table(table, indent="  ") + "\n  -: loading it uncompressed is faster"


def worst_layers(rows: Sequence[Row]) -> str:
    """The worst layer of each kind and row."""
    table = [("worst layer", *(f"{kind} err" for kind in rows[0].sample.kinds()), "logits err", "output err")]
    for row in rows:
        if not row.lossy:
            continue
        worst = [max(row.errors_of(kind), key=lambda error: error.relative) for kind in row.sample.kinds()]
        logits = max(row.attention, key=lambda error: error.logits, default=None)
        output = max(row.attention, key=lambda error: error.output, default=None)
        table.append(
            (
                row.name,
                *(f"{text.error(error.relative)} ({error.plane.layer})" for error in worst),
                f"{text.error(logits.logits)} ({logits.layer})" if logits else "-",
                f"{text.error(output.output)} ({output.layer})" if output else "-",
            )
        )
    return text.table(table, indent="  ")


def _speed(timing: Timing, nbytes: int) -> str:
    return f"{text.error(timing.speed(nbytes))} {_spread(timing)}"


def _spread(timing: Timing) -> str:
    """The spread in percent; nothing for a single run."""
    return f"±{100 * timing.spread:.0f}%".rjust(4) if len(timing.times) > 1 else "    "


def _error(row: Row, value: float) -> str:
    if not row.lossy:
        return "none"
    return text.error(value)


def _quality(row: Row) -> tuple[str, str, str]:
    quality = row.quality
    if quality is None:
        return ("none", "100", "none") if not row.lossy else ("-", "-", "-")
    return (
        _interval(quality.kl),
        _interval(quality.top1, 100, "{:.1f}"),
        _interval(quality.perplexity_ratio, 100, "{:+.2f}", 100),
    )


def _interval(estimate: Estimate, scale: float = 1, form: str = "{:.3g}", minus: float = 0) -> str:
    from kvzip.bench.model import CONFIDENCE

    half = CONFIDENCE * estimate.stderr * scale
    return f"{form.format(estimate.value * scale - minus)} ±{half:.2g}"


def _milliseconds(seconds: float) -> str:
    milliseconds = 1000 * seconds
    digits = max(0, 2 - math.floor(math.log10(milliseconds))) if milliseconds else 0
    return f"{milliseconds:.{digits}f}"
