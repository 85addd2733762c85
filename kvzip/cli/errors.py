"""Errors by layer as people read them, and the limit that ends a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvzip.cli import text
from kvzip.errors import KvzipError

if TYPE_CHECKING:
    from kvzip.pipeline import PlaneErrors

FailAbove = Annotated[
    float | None,
    typer.Option("--fail-above", metavar="X", min=0, help="Fail (1) if a layer's relative error is larger."),
]


def layer_table(errors: Sequence[PlaneErrors]) -> str:
    """A line per layer (and sequence), a column per kind; what is no KV stands below; the worst is named."""
    kinds = list(dict.fromkeys(error.plane.kind for error in errors if error.plane.kind != "bytes"))
    found = {(error.plane.sequence, error.plane.layer, error.plane.kind): error for error in errors}
    several = any(error.plane.sequence for error in errors)
    rows = [("layer", *(f"{kind} error" for kind in kinds), "largest difference")]
    for sequence, layer in sorted({(s, layer) for s, layer, kind in found if kind != "bytes"}):
        own = [found.get((sequence, layer, kind)) for kind in kinds]
        rows.append(
            (
                f"{layer} of sequence {sequence}" if several else f"{layer}",
                *(text.error(error.relative) if error else "-" for error in own),
                text.error(max(error.max_abs for error in own if error)),
            )
        )
    worst = max(errors, key=lambda error: error.relative)
    return f"{text.table(rows, indent='  ')}\n  worst: {text.plane(worst.plane)}, {text.error(worst.relative)}"


def judge(name: str, errors: Sequence[PlaneErrors], limit: float | None) -> None:
    """Raise ``KvzipError`` if a plane's relative error is above ``limit``, or is no number."""
    bad = [error for error in errors if limit is not None and not error.relative <= limit]
    if bad:
        most = max(bad, key=lambda error: error.relative)
        raise KvzipError(
            f"{name}: {len(bad)} of {len(errors)} planes have a relative error above {limit:g}; the worst is "
            f"{text.plane(most.plane)} with {text.error(most.relative)}",
            code="error-above",
        )
