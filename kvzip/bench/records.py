"""Rows for machines: JSON and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from kvzip.bench.breakeven import Link, pays_below
from kvzip.bench.rows import Row
from kvzip.bench.timing import Timing
from kvzip.quality import to_json as plane_error

SCHEMA = "kvzip-bench/1"
"""Names the JSON's shape; the number rises when a key changes its meaning or goes away."""

NESTED = frozenset(
    (
        "config",
        "encode_seconds",
        "decode_seconds",
        "copies",
        "load_seconds",
        "mean_errors",
        "errors",
        "attention",
        "model",
    )
)


def row_record(row: Row, links: Sequence[Link]) -> dict[str, Any]:
    """One row as JSON values; what is not finite becomes null."""
    return {
        "codec": row.name,
        "peer": row.codec is None,
        "version": row.version,
        "config": row.codec.config() if row.codec else None,
        "stored_bytes": row.stored_bytes,
        "ratio": row.ratio,
        "bits_per_element": row.bits_per_element,
        "encode_gb_per_s": row.encode_speed,
        "decode_gb_per_s": row.decode_speed,
        "runs": min(len(row.encode.times), len(row.decode.times)),
        "encode_seconds": _timing(row.encode),
        "decode_seconds": _timing(row.decode),
        "copies": {part.name: _timing(getattr(row.copies, part.name)) for part in fields(row.copies)}
        if row.copies
        else None,
        "pays_below_bytes_per_s": pays_below(row),
        "load_seconds": {link.name: link.load_seconds(row) for link in links},
        "mean_errors": {kind: finite(row.mean_error(kind)) for kind in row.sample.kinds()},
        "logits_error": finite(row.logits_error),
        "attention_output_error": finite(row.output_error),
        "errors": [plane_error(error) for error in row.errors],
        "attention": [
            {
                "layer": error.layer,
                "sequence": error.sequence,
                "logits_error": finite(error.logits),
                "output_error": finite(error.output),
            }
            for error in row.attention
        ],
        "model": _quality(row),
    }


def to_csv(rows: Sequence[Row], links: Sequence[Link]) -> str:
    """A line per row, a header above; what is nested in JSON is left out or has a column of its own."""
    lines = []
    for row in rows:
        record = row_record(row, links)
        line = {key: value for key, value in record.items() if key not in NESTED}
        for kind in ("key", "value", "latent"):
            line[f"{kind}_error"] = record["mean_errors"].get(kind)
        for name, quality in (record["model"] or {}).items():
            value = quality if name == "positions" else quality["value"]
            line |= {name: value} if name == "positions" else {name: value, f"{name}_stderr": quality["stderr"]}
        line |= {f"load_seconds_{name}": seconds for name, seconds in record["load_seconds"].items()}
        lines.append(line)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def finite(value: float) -> float | None:
    """The value, or None for JSON, which has no infinities."""
    return value if math.isfinite(value) else None


def _timing(timing: Timing) -> dict[str, Any]:
    low, high = timing.quartiles
    return {"median": timing.median, "quartile_1": low, "quartile_3": high, "runs": len(timing.times)}


def _quality(row: Row) -> dict[str, Any] | None:
    if row.quality is None:
        return None
    estimates = [part.name for part in fields(row.quality) if part.name != "positions"]
    return {"positions": row.quality.positions} | {
        name: {
            "value": finite(getattr(row.quality, name).value),
            "stderr": finite(getattr(row.quality, name).stderr),
        }
        for name in estimates
    }
