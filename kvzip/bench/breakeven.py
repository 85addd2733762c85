"""When compression pays: a cache comes over a link, and is decoded when it is here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvzip.bench.rows import Row
from kvzip.errors import UsageError

KNOWN = {
    "10gbe": 1.25e9,
    "25gbe": 3.125e9,
    "100gbe": 12.5e9,
    "nvme": 7.0e9,
    "pcie4": 31.5e9,
    "pcie5": 63.0e9,
}
"""Bytes per second, nominal: Ethernet, an NVMe drive with four PCIe 4.0 lanes, sixteen lanes to a GPU."""

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(bit|bps)|([kmgt]?)(B))(?:/s|ps)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Link:
    """A way to the cache, by name, and how many bytes it brings per second."""

    name: str
    speed: float

    def raw_seconds(self, nbytes: int) -> float:
        """How long uncompressed bytes take."""
        return nbytes / self.speed

    def load_seconds(self, row: Row) -> float:
        """How long a compressed sample takes: it comes whole, then it is decoded."""
        return row.stored_bytes / self.speed + row.decode_seconds


def links(texts: Sequence[str] | None = None) -> list[Link]:
    """Links by name or speed: ``25gbit``, ``3.5GB``, ``nvme``, several with commas between; all known by default.

    Raises ``UsageError`` for what is neither.
    """
    if not texts:
        return [Link(name, speed) for name, speed in KNOWN.items()]
    return [_parse(part.strip()) for text in texts for part in text.split(",")]


def pays_below(row: Row) -> float:
    """The link speed, bytes per second, above which loading raw is faster: ``D (r - 1) / r``; 0 if it never pays.

    D is the speed of decoding, copies counted, and r the ratio: ``N/(B r) + N/D < N/B`` solved for B.
    """
    speed = row.sample.nbytes / row.decode_seconds
    return max(0.0, speed * (row.ratio - 1) / row.ratio)


def _parse(text: str) -> Link:
    if text.lower() in KNOWN:
        return Link(text.lower(), KNOWN[text.lower()])
    match = SPEED.fullmatch(text)
    # "25gb" may mean either: an eightfold difference is no place to guess.
    if match is None or match[5] == "b" or not float(match[1]):
        raise UsageError(
            f"link {text!r}: expected a speed such as 25gbit or 3GB (bits or bytes per second), or one of "
            f"{', '.join(KNOWN)}",
            code="bad-link",
        )
    number, bits = float(match[1]), match[3] is not None
    prefix = PREFIXES[(match[2] if bits else match[4] or "").lower()]
    return Link(text, number * prefix / (8 if bits else 1))
