"""Rate against distortion of all rows, and where the lossy ones err."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvzip.bench.model import CONFIDENCE
from kvzip.bench.rows import Row
from kvzip.plots import colors, new_figure, plain_ticks, rendered

WIDTH, HEIGHT = 11.0, 5.5
"""Of the upper part, inches; the lower one has a line per codec."""

STRIP = 0.2
"""Share of the height that is for what loses nothing: zero is nowhere on a logarithmic axis."""

FONT = 6.5
"""Points, of labels."""

LEVELS = ("level=", "levels=", "preset=", "bits=", "step=", "scale=", "dtype=", "symmetric=")
"""Options that move a point along its curve."""

Point = tuple[float, float]


def bench_picture(rows: Sequence[Row], title: str, suffix: str) -> bytes:
    """Rate against distortion with the Pareto front, and the error of every lossy codec layer by layer.

    The distortion is the KL divergence of a model's predictions where the rows have it, else the error of the attention
    output. Returns the bytes of a file of that suffix.
    """
    codecs = [row for row in rows if row.name != "copy"]
    lossy = [row for row in codecs if row.lossy and row.attention]
    parts = [HEIGHT, 0.8 + 0.19 * len(lossy)] if lossy else [HEIGHT]
    figure = new_figure(WIDTH, sum(parts))
    # Each part with a layout of its own: the long names of one must not narrow the other.
    above, *below = np.atleast_1d(figure.subfigures(len(parts), 1, height_ratios=parts))
    axes = above.subplots()
    _rate_distortion(axes, codecs)
    axes.set_title(title)
    for part in below:
        _heat_map(part, lossy)
    return rendered(figure, suffix)


def pareto(points: Sequence[Point]) -> list[int]:
    """Which points no other beats in both coordinates (less is better), from left to right."""
    front: list[int] = []
    best = math.inf
    for number in sorted(range(len(points)), key=lambda number: points[number]):
        if points[number][1] < best:
            best = points[number][1]
            front.append(number)
    return front


def _rate_distortion(axes: Any, rows: Sequence[Row]) -> None:
    families = list(dict.fromkeys(map(_family, rows)))
    color = dict(zip(families, colors(len(families)), strict=True))
    lossy = [row for row in rows if row.lossy and 0 < _distortion(row) < math.inf]
    lossless = sorted((row for row in rows if not row.lossy), key=lambda row: row.bits_per_element)
    axes.set_xscale("log", base=2)
    if lossy:
        axes.set_yscale("log")
        _draw_lossy(axes, lossy, color)
        low, high = axes.get_ylim()
        axes.set_ylim(low * (low / high) ** (STRIP / (1 - STRIP)), high)
        plain_ticks(axes.yaxis)
        axes.legend(fontsize=8, loc="upper right")
    _draw_lossless(axes, lossless, color)
    _label_points(axes, lossy)
    with_model = any(row.quality for row in rows)
    axes.set_xlabel("bits per element, all side information counted")
    axes.set_ylabel("KL divergence, nats (bars: 95 %)" if with_model else "attention output error, |x - y| / |x|")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(which="both", alpha=0.2)


def _draw_lossy(axes: Any, rows: Sequence[Row], color: dict[str, Any]) -> None:
    """Curves, the confidence of each point, and the front of all."""
    named: set[str] = set()
    for curve in dict.fromkeys(map(_curve, rows)):
        own = [row for row in rows if _curve(row) == curve]
        family, points = _family(own[0]), sorted(map(_point, own))
        label = None if family in named else family
        named.add(family)
        axes.plot(*zip(*points, strict=True), "o-", color=color[family], alpha=0.85, linewidth=0.8, label=label)
    for row in rows:
        if row.quality:
            x, y = _point(row)
            half = CONFIDENCE * row.quality.kl.stderr
            axes.vlines([x], max(y - half, y / 10), y + half, color="gray", linewidth=0.8, zorder=1)
    points = [_point(row) for row in rows]
    front = [points[number] for number in pareto(points)]
    axes.step(*zip(*front, strict=True), ":", where="post", color="black", linewidth=1, label="Pareto front")


def _draw_lossless(axes: Any, rows: Sequence[Row], color: dict[str, Any]) -> None:
    """Diamonds at the bottom, the names of neighbours above each other."""
    strip, height = axes.get_xaxis_transform(), 0.03
    number, before = 0, 0.0
    for row in rows:
        x = row.bits_per_element
        number, before = number + 1 if x < 1.25 * before else 0, x
        axes.plot([x], [height], "D", color=color[_family(row)], transform=strip, markersize=4)
        offset = (0, 6 + 8 * (number % 6))
        axes.annotate(
            row.name, (x, height), offset, xycoords=strip, textcoords="offset points", fontsize=FONT, ha="center"
        )
    if rows:
        axes.text(0.005, 0.02, "lossless", transform=axes.transAxes, fontsize=7, color="gray")


def _label_points(axes: Any, rows: Sequence[Row]) -> None:
    """Names beside points, where they meet no other: those of the front first, the others while there is room."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    front = {rows[number].name for number in pareto([_point(row) for row in rows])}
    taken: list[tuple[float, float, float]] = []
    for row in sorted(rows, key=lambda row: (row.name not in front, _point(row))):
        label = _short(row.name)
        # In points of the page, nearly: the axes take nine tenths of the picture.
        x = 65 * WIDTH * math.log(_point(row)[0] / left) / math.log(right / left)
        y = 60 * HEIGHT * math.log(_point(row)[1] / low) / math.log(high / low)
        width = 0.58 * FONT * len(label) + 5
        for shift in (3, -8, 11, -16):
            if all(abs(y + shift - b) > FONT or x + width < a or a + w < x for a, b, w in taken):
                taken.append((x, y + shift, width))
                axes.annotate(label, _point(row), (5, shift), textcoords="offset points", fontsize=FONT)
                break


def _heat_map(figure: Any, rows: Sequence[Row]) -> None:
    """The error of the attention output: a line per codec, a column per layer."""
    from matplotlib.colors import LogNorm

    axes = figure.subplots()
    ordered = sorted(rows, key=lambda row: row.bits_per_element)
    layers = sorted({error.layer for row in ordered for error in row.attention})
    cells = [[math.nan] * len(layers) for _ in ordered]
    for line, row in zip(cells, ordered, strict=True):
        for error in row.attention:
            line[layers.index(error.layer)] = error.output or error.logits
    known = [value for line in cells for value in line if 0 < value < math.inf]
    norm = LogNorm(min(known), max(known)) if known and min(known) < max(known) else None
    image = axes.imshow(cells, aspect="auto", cmap="viridis", norm=norm, interpolation="nearest")
    names = [f"{row.name}, {row.bits_per_element:.2f} bits" for row in ordered]
    axes.set_yticks(range(len(ordered)), names, fontsize=FONT)
    step = max(1, len(layers) // 16)
    axes.set_xticks(range(0, len(layers), step), layers[::step])
    axes.set_xlabel("layer")
    axes.set_title("attention output error, |x - y| / |x|, by layer (white: none)", fontsize=9)
    scale = figure.colorbar(image, ax=axes, pad=0.01)
    scale.ax.tick_params(labelsize=7)
    if norm:
        plain_ticks(scale.ax.yaxis)


def _point(row: Row) -> Point:
    return row.bits_per_element, _distortion(row)


def _distortion(row: Row) -> float:
    return row.quality.kl.value if row.quality else row.output_error or row.logits_error


def _family(row: Row) -> str:
    return row.name.partition(":")[0].partition(" ")[0].rstrip(",")


def _curve(row: Row) -> tuple[str, ...]:
    """What the points of one curve share: the codec, and the options that are no levels."""
    codec, _, options = row.name.partition(":")
    return (codec.partition(" ")[0], *(each for each in options.split(",") if each and not each.startswith(LEVELS)))


def _short(name: str) -> str:
    """What tells a point from others of its codec."""
    codec, _, options = name.partition(":") if ":" in name else name.partition(", ")
    return options.removeprefix("preset=").removeprefix(f"{codec}_") or name
