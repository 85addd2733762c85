"""Where the bytes of a ``.kvz`` are, layer by layer."""

from __future__ import annotations

from kvzip.errors import UsageError
from kvzip.inspection import SECTIONS, Inspection
from kvzip.plots import colors, new_figure, rendered

Parts = dict[tuple[str, int], dict[str, float]]
"""Bytes by section, of each kind and layer."""


def bytes_picture(member: Inspection, title: str, suffix: str) -> bytes:
    """Bars of each layer's keys beside its values, stacked by what the bytes are. Returns the bytes of a file.

    Raises ``UsageError`` if there are no keys and values.
    """
    parts = _bytes_by_layer(member)
    kinds = list(dict.fromkeys(kind for kind, _ in parts))
    layers = sorted({layer for _, layer in parts})
    tags = sorted({tag for sections in parts.values() for tag in sections})
    figure = new_figure(11, 5)
    axes = figure.subplots()
    width = 0.84 / len(kinds)
    for number, kind in enumerate(kinds):
        at = [layer + (number - (len(kinds) - 1) / 2) * width for layer in layers]
        base = [0.0] * len(layers)
        for tag, color in zip(tags, colors(len(tags)), strict=True):
            heights = [parts.get((kind, layer), {}).get(tag, 0) / 1000 for layer in layers]
            # One entry in the legend serves all kinds: the second is hatched.
            label = f"{SECTIONS.get(tag, 'section')} ({tag})" if number == 0 else None
            hatch = "///" if number else None
            axes.bar(at, heights, 0.92 * width, base, color=color, label=label, hatch=hatch, ec="white", lw=0)
            base = [low + height for low, height in zip(base, heights, strict=True)]
    axes.set(title=title, xlabel="layer", ylabel="stored, kB", xlim=(layers[0] - 0.6, layers[-1] + 0.6))
    axes.xaxis.get_major_locator().set_params(integer=True)
    names = ", ".join(f"{kind}s{' (hatched)' if number else ''}" for number, kind in enumerate(kinds))
    axes.legend(
        title=f"left to right: {names}", fontsize=8, title_fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return rendered(figure, suffix)


def _bytes_by_layer(member: Inspection) -> Parts:
    """What several planes share is split evenly among them."""
    assert member.reader is not None
    parts: Parts = {}
    for entry in member.reader.index:
        planes = [plane for plane in entry.block.planes if plane.kind != "bytes"]
        sections = member.sections_of(entry) if planes else {}
        for plane in planes:
            own = parts.setdefault((plane.kind, plane.layer), {})
            for tag, (_, length) in sections.items():
                own[tag] = own.get(tag, 0) + length / len(planes)
    if not parts:
        raise UsageError("the file holds no keys and values to draw", code="no-kv")
    return parts
