"""Numbers and tables as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvzip.cache import Plane


def size(nbytes: float) -> str:
    """``1.23 MB``: three digits, decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            break
        nbytes /= 1000
    return (
        f"{nbytes:.0f} {unit}"
        if unit == "B"
        else f"{nbytes:.{2 if nbytes < 9.995 else 1 if nbytes < 99.95 else 0}f} {unit}"
    )


def count(number: int, name: str) -> str:
    """``1 head``, ``2 heads``."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def error(value: float) -> str:
    """A relative error or a largest difference, three digits."""
    return f"{value:.3g}"


def called(name: str, out: bool = False) -> str:
    """What people call an input or (``out``) a target."""
    return name if name != "-" else "standard output" if out else "standard input"


def plane(plane: Plane, others: int = 0) -> str:
    """What people call a plane, or a group of it and ``others``."""
    name = "other tensor" if plane.kind == "bytes" else str(plane)
    return f"{name} and {others} more" if others else name


def runs(numbers: Iterable[int]) -> str:
    """``0-9,12``: sorted numbers with runs drawn together."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def table(rows: Sequence[Sequence[str]], left: int = 1, indent: str = "") -> str:
    """Rows in aligned columns: the first ``left`` to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def plain(text: str) -> str:
    """Text that may come from a file, safe to print: no control characters but line ends."""
    return "".join(
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1] for character in text
    )
