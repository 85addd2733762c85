"""What all pictures share. They are drawn by matplotlib (the extra ``plot``), imported only when one is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from kvzip.errors import UnsupportedError, UsageError

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Whether a picture can be drawn at all, before minutes go into what it shows.

    Raises:
        UsageError: the suffix is of no known format.
        UnsupportedError: matplotlib is missing.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: a picture's name ends in {', '.join(FORMATS)}", code="plot-format")
    new_figure(1, 1)


def new_figure(width: float, height: float) -> Any:
    """An empty figure, inches. No window is ever opened."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            f"pictures need the extra plot ({error}): pip install 'kvzip[plot]'", code="extra-missing"
        ) from None
    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def rendered(figure: Any, suffix: str) -> bytes:
    """The bytes of a file of one of :data:`FORMATS`."""
    data = io.BytesIO()
    figure.savefig(data, format=suffix.lstrip(".").lower())
    return data.getvalue()


def colors(count: int) -> list[Any]:
    """As many colours as can be told apart, then again from the first."""
    from matplotlib import colormaps

    return [colormaps["tab20" if count > 10 else "tab10"](number % 20) for number in range(count)]


def plain_ticks(axis: Any) -> None:
    """Of a logarithmic axis: 1, 2 and 5 of each decade, or 1 where there are many decades, written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(10, (1, 2, 5) if high < 3000 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
