"""One row of the report, and the table that rows make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    what: str
    measured: str
    asked: str | None


def show(title: str, rows: Iterable[Row]) -> None:
    """Print rows as they come, as a markdown table."""
    print(f"\n## {title}\n\n| what | measured | asked |\n|---|---|---|", flush=True)
    for row in rows:
        print(f"| {row.what} | {row.measured} | {row.asked or ''} |", flush=True)
