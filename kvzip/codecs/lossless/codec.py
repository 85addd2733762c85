"""The codec: which of three forms a block takes.

Each block is stored as floats (:mod:`~kvzip.codecs.lossless.floats`), as bytes (:mod:`~kvzip.codecs.lossless.order0`)
or as it is (section ``DATA``), whichever is smallest. Bytes are tried only where floats gain little: integers, tensors
that are no KV, floats of no usual distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvzip.codecs.base import Batch, Encoded, Sections
from kvzip.codecs.lossless import floats, order0
from kvzip.codecs.raw import Raw, Unchanged, joined
from kvzip.devices.base import Device

GOOD_ENOUGH = 0.9
"""Floats that shrink to this are not tried as bytes."""


class Lossless(Unchanged):
    """Any numbers, in fewer bytes where that can be."""

    name = "lossless"

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        plane = batch.blocks[0].plane
        found: list[Sections | None] = [None] * len(batch.blocks)
        if plane.kind != "bytes" and plane.dtype in floats.FORMATS:
            found = list(floats.encode(batch, device))
        large = [i for i, block in enumerate(batch.blocks) if _size(found[i]) > GOOD_ENOUGH * block.nbytes]
        plain = [joined([batch.arrays[i]], device) for i in large]
        for i, data, sections in zip(large, plain, order0.encode(plain, plane.itemsize, device), strict=True):
            candidates = (found[i], sections, {"DATA": data})
            found[i] = min(candidates, key=_size)
        return [Encoded(sections) for sections in found if sections is not None]

    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        for decode, tag in ((floats.decode, "HEAD"), (order0.decode, "FREQ"), (Raw().decode, "DATA")):
            which = [i for i, parts in enumerate(sections) if _form(parts) == tag]
            if which:
                part = Batch([batch.blocks[i] for i in which], [batch.arrays[i] for i in which])
                decode(part, [sections[i] for i in which], device)


def _size(sections: Sections | None) -> float:
    return sum(section.nbytes for section in sections.values()) if sections is not None else float("inf")


def _form(sections: Sections) -> str:
    """The section that tells the form; what has none of them is refused as a raw block without its data."""
    return next((tag for tag in ("HEAD", "FREQ") if tag in sections), "DATA")
