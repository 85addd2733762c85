"""Pictures of measurements, by matplotlib (the extra ``plot``), which is imported only when one is drawn."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvzip.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from kvzip.bench import Row
    from kvzip.inspection import Inspection

FORMATS = (".png", ".svg", ".pdf")

LOSSLESS = 0.08
"""Height, as a share of the axes, of the strip for what loses nothing: zero is nowhere on a logarithmic axis."""


def check_plot(path: str) -> None:
    """Whether a picture can be drawn at all, before minutes go into what it shows.

    Raises:
        UsageError: the suffix is of no known format.
        UnsupportedError: matplotlib is missing.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: a picture's name ends in {', '.join(FORMATS)}", code="plot-format")
    _figure(1, 1)


def bench_picture(rows: Sequence[Row], title: str, suffix: str) -> bytes:
    """Rate against distortion with the Pareto front, and where each lossy codec errs, layer by layer.

    The distortion is the KL divergence of a model's predictions where the rows have it, else the error of the attention
    output. Returns the file's bytes.
    """
    codecs = [row for row in rows if row.name != "copy"]
    lossy = [row for row in codecs if row.lossy and row.attention]
    figure = _figure(11, 5.5 + (0.9 + 0.26 * len(lossy) if lossy else 0))
    sizes = [5.5, 0.9 + 0.26 * len(lossy)] if lossy else [1]
    axes = figure.subplots(len(sizes), 1, height_ratios=sizes, squeeze=False)[:, 0]
    _rate_distortion(axes[0], codecs)
    axes[0].set_title(title)
    if lossy:
        _heat_map(figure, axes[1], lossy)
    return _rendered(figure, suffix)


def bytes_picture(member: Inspection, title: str, suffix: str) -> bytes:
    """The bytes of a ``.kvz`` layer by layer, keys beside values, by what they are. Returns the file's bytes."""
    from kvzip.inspection import SECTIONS

    kinds, parts = _bytes_by_layer(member)
    layers = sorted({layer for _, layer in parts})
    tags = sorted({tag for sections in parts.values() for tag in sections})
    figure = _figure(11, 5)
    axes = figure.subplots()
    colors = _colors(len(tags))
    width = 0.84 / len(kinds)
    for number, kind in enumerate(kinds):
        at = [layer + (number - (len(kinds) - 1) / 2) * width for layer in layers]
        base = [0.0] * len(layers)
        for tag, color in zip(tags, colors, strict=True):
            heights = [parts.get((kind, layer), {}).get(tag, 0) / 1000 for layer in layers]
            label = f"{SECTIONS.get(tag, 'section')} ({tag})" if number == 0 else None
            hatch = "///" if number else None
            axes.bar(
                at, heights, 0.92 * width, base, color=color, label=label, hatch=hatch, edgecolor="white", linewidth=0
            )
            base = [low + height for low, height in zip(base, heights, strict=True)]
    axes.set(title=title, xlabel="layer", ylabel="stored, kB", xlim=(layers[0] - 0.6, layers[-1] + 0.6))
    axes.xaxis.get_major_locator().set_params(integer=True)
    names = [f"{kind}{' (hatched)' if number else ''}" for number, kind in enumerate(kinds)]
    axes.legend(
        title=f"left to right: {', '.join(names)}",
        fontsize=8,
        title_fontsize=8,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return _rendered(figure, suffix)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other beats in both coordinates (less is better), from left to right."""
    front: list[int] = []
    best = math.inf
    for number in sorted(range(len(points)), key=lambda number: points[number]):
        if points[number][1] < best:
            best = points[number][1]
            front.append(number)
    return front


def _rate_distortion(axes: Any, rows: Sequence[Row]) -> None:
    """Bits per element and distortion of each row; what loses nothing stands in a strip at the bottom."""
    from matplotlib.ticker import ScalarFormatter

    with_model = any(row.quality for row in rows)
    lossy = [row for row in rows if row.lossy and 0 < _distortion(row) < math.inf]
    points = [(row.bits_per_element, _distortion(row)) for row in lossy]
    lossless = [row for row in rows if not row.lossy]
    families = list(dict.fromkeys(_family(row) for row in rows))
    color = dict(zip(families, _colors(len(families)), strict=True))
    for family in dict.fromkeys(_family(row) for row in lossy):
        own = sorted(point for row, point in zip(lossy, points, strict=True) if _family(row) == family)
        axes.plot(*zip(*own, strict=True), "o-", color=color[family], alpha=0.85, linewidth=0.8, label=family)
    front = [points[number] for number in pareto(points)]
    if front:
        axes.step(
            *zip(*front, strict=True), where="post", color="black", linewidth=1, linestyle=":", label="Pareto front"
        )
        axes.set_yscale("log")
        _plain_log_ticks(axes.yaxis)
    if points and with_model:
        low = [max(y - 1.96 * _kl_error(row), y / 10) for row, (_, y) in zip(lossy, points, strict=True)]
        high = [y + 1.96 * _kl_error(row) for row, (_, y) in zip(lossy, points, strict=True)]
        axes.vlines([x for x, _ in points], low, high, color="gray", linewidth=0.8, zorder=1)
    for row, point in zip(lossy, points, strict=True):
        axes.annotate(_short(row.name), point, (4, 3), textcoords="offset points", fontsize=6.5)
    strip = axes.get_xaxis_transform()
    for number, row in enumerate(sorted(lossless, key=lambda row: row.bits_per_element)):
        x = row.bits_per_element
        axes.plot([x], [LOSSLESS / 3], "D", color=color[_family(row)], transform=strip, markersize=4)
        axes.annotate(
            row.name,
            (x, LOSSLESS / 3),
            (0, 6 + 8 * (number % 3)),
            xycoords=strip,
            textcoords="offset points",
            fontsize=6.5,
            ha="center",
        )
    if lossless and points:
        low, high = axes.get_ylim()
        axes.set_ylim(low * (low / high) ** 0.22, high)
        axes.text(0.005, 0.02, "lossless", transform=axes.transAxes, fontsize=7, color="gray")
    axes.set_xlabel("bits per element, all side information counted")
    axes.set_ylabel("KL divergence, nats (bars: 95 %)" if with_model else "attention output error, |x - y| / |x|")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.grid(which="both", alpha=0.2)
    if points:
        axes.legend(fontsize=8, loc="upper right")


def _heat_map(figure: Any, axes: Any, rows: Sequence[Row]) -> None:
    """The error of the attention output: a line per codec, a column per layer."""
    from matplotlib.colors import LogNorm

    ordered = sorted(rows, key=lambda row: row.bits_per_element)
    layers = sorted({error.layer for row in ordered for error in row.attention})
    cells = [[math.nan] * len(layers) for _ in ordered]
    for line, row in zip(cells, ordered, strict=True):
        for error in row.attention:
            line[layers.index(error.layer)] = error.output or error.logits
    known = [value for line in cells for value in line if 0 < value < math.inf]
    norm = LogNorm(min(known), max(known)) if known and min(known) < max(known) else None
    image = axes.imshow(cells, aspect="auto", cmap="viridis", norm=norm, interpolation="nearest")
    axes.set_yticks(
        range(len(ordered)),
        [f"{_short(row.name, full=True)}, {row.bits_per_element:.2f} bits" for row in ordered],
        fontsize=7,
    )
    step = max(1, len(layers) // 16)
    axes.set_xticks(range(0, len(layers), step), layers[::step])
    axes.set_xlabel("layer")
    axes.set_title("attention output error, |x - y| / |x|, by layer", fontsize=9)
    scale = figure.colorbar(image, ax=axes, pad=0.01)
    if norm:
        _plain_log_ticks(scale.ax.yaxis)
    scale.ax.tick_params(labelsize=7)


def _plain_log_ticks(axis: Any) -> None:
    """1, 2 and 5 of each decade, written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _family(row: Row) -> str:
    return row.name.partition(":")[0].partition(" ")[0]


def _distortion(row: Row) -> float:
    return row.quality.kl.value if row.quality else row.output_error or row.logits_error


def _kl_error(row: Row) -> float:
    return row.quality.kl.stderr if row.quality else 0.0


def _short(name: str, full: bool = False) -> str:
    """What tells a point from others of its codec."""
    codec, _, options = name.partition(":")
    return name if full or not options else options.removeprefix(f"preset={codec}_")


def _bytes_by_layer(member: Inspection) -> tuple[list[str], dict[tuple[str, int], dict[str, float]]]:
    """Kinds, and the bytes by section of each kind and layer; what several planes share is split evenly."""
    assert member.reader is not None
    parts: dict[tuple[str, int], dict[str, float]] = {}
    for entry in member.reader.index:
        planes = [plane for plane in entry.block.planes if plane.kind != "bytes"]
        for plane in planes:
            own = parts.setdefault((plane.kind, plane.layer), {})
            for tag, (_, length) in member.sections_of(entry).items():
                own[tag] = own.get(tag, 0) + length / len(planes)
    if not parts:
        raise UsageError("the file holds no keys and values to draw", code="no-kv")
    return list(dict.fromkeys(kind for kind, _ in parts)), parts


def _figure(width: float, height: float) -> Any:
    """An empty figure, inches. No window is ever opened."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            f"pictures need the extra plot ({error}): pip install 'kvzip[plot]'", code="extra-missing"
        ) from None
    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def _colors(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["tab20" if count > 10 else "tab10"](number % 20) for number in range(count)]


def _rendered(figure: Any, suffix: str) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format=suffix.lstrip(".").lower())
    return data.getvalue()
