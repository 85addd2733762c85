"""Bins per layer: the schedules of CacheGen, written ``"0-9:32,10-:16"`` (first layer, last layer, bins)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvzip.errors import UsageError

Run = tuple[int, int | None, int]
"""First layer, last layer (None: to the end), bins."""

FEWEST, MOST = 4, 4096

_RUN = re.compile(r"(\d+)(?:(-)(\d+)?)?:(\d+)")


def lmcache(layers: int, kind: str) -> list[Run]:
    """LMCache's schedule: the first 10 layers' keys and the first 2 layers' values get 32 bins, the others 16.

    Models of fewer than 10 layers get 32 bins throughout.
    """
    fine = layers if layers < 10 else 10 if kind == "key" else 2
    return [(0, fine - 1, 32), (fine, None, 16)] if fine < layers else [(0, None, 32)]


def parse(text: str, option: str) -> list[Run]:
    """The runs of a schedule; a single number means all layers.

    Raises:
        UsageError: names ``option`` and what cannot be read.
    """
    runs: list[Run] = []
    for part in text.split(","):
        part = part.strip()
        if part.isdigit():
            part = f"0-:{part}"
        match = _RUN.fullmatch(part)
        if not match:
            raise UsageError(
                f"{option}: cannot read {part!r}; write FIRST-LAST:BINS, such as 0-9:32,10-:16", code="codec-option"
            )
        first, dash, last, bins = match.groups()
        stop = int(last) if last else None if dash else int(first)
        if not FEWEST <= int(bins) <= MOST:
            raise UsageError(f"{option}: {bins} bins in {part!r}; {FEWEST} to {MOST} are possible", code="codec-option")
        if stop is not None and stop < int(first):
            raise UsageError(f"{option}: the layers of {part!r} run backwards", code="codec-option")
        runs.append((int(first), stop, int(bins)))
    return runs


def render(runs: Iterable[Run]) -> str:
    """The text that :func:`parse` reads back."""
    return ",".join(f"{first}-{'' if last is None else last}:{bins}" for first, last, bins in runs)


def lookup(runs: Iterable[Run], layer: int) -> int:
    """The bins of a layer: of the first run that holds it.

    Raises:
        UsageError: no run holds the layer.
    """
    for first, last, bins in runs:
        if first <= layer and (last is None or layer <= last):
            return bins
    raise UsageError(f"no bins are given for layer {layer} in {render(runs)!r}", code="codec-option")


def resolve(runs: list[Run], layers: int, scale: float, option: str) -> list[Run]:
    """Runs that cover layers ``0..layers-1`` exactly, neighbours of equal bins joined, with ``bins // 2 - 1`` scaled.

    Raises:
        UsageError: a layer has no bins.
    """
    # Between two edges nothing changes: a hostile layer number must not be counted up to.
    edges = {0, *(first for first, _, _ in runs), *(last + 1 for _, last, _ in runs if last is not None)}
    starts = sorted(edge for edge in edges if edge < max(layers, 1))
    resolved: list[Run] = []
    for start, stop in zip(starts, [*starts[1:], max(layers, 1)], strict=True):
        try:
            half = lookup(runs, start) // 2 - 1
        except UsageError as error:
            raise UsageError(f"{option}: {error}", code="codec-option") from None
        bins = 2 * (max(1, round(half * scale)) + 1)
        if resolved and resolved[-1][2] == bins:
            resolved[-1] = (resolved[-1][0], stop - 1, bins)
        else:
            resolved.append((start, stop - 1, bins))
    return resolved
