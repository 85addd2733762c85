"""Which codec codes which plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvzip.cache import Plane
from kvzip.codecs.base import Codec, Read
from kvzip.codecs.raw import Raw


@dataclass(frozen=True)
class Assignment:
    """The codecs of a file, and for each plane (by its ``index``) the position of its codec among them.

    Keys and values apart, or a codec of their own for some layers: that is up to the ``choose`` of :func:`assign`.
    """

    codecs: tuple[Codec, ...]
    ids: dict[int, int]

    def codec_of(self, plane: Plane) -> Codec:
        return self.codecs[self.ids[plane.index]]

    def groups(self, planes: Sequence[Plane]) -> list[tuple[Plane, ...]]:
        """The planes as their codecs put them together in frames, in the order of each group's first plane."""
        found: list[tuple[Plane, ...]] = []
        for number, codec in enumerate(self.codecs):
            found += codec.groups([plane for plane in planes if self.ids[plane.index] == number])
        return sorted(found, key=lambda group: group[0].index)

    def describe(self, plane: Plane) -> dict[str, Any]:
        """The plane's channel spec, as its codec has it."""
        return self.codec_of(plane).describe(plane)


def assign(
    planes: Sequence[Plane],
    choose: Callable[[Plane], Codec],
    notice: Callable[[str], None] = lambda text: None,
    read: Read | None = None,
) -> Assignment:
    """Bind the codecs that ``choose`` names to their planes; what a codec does not support goes to ``raw``, losslessly.

    Tensors that are no KV always do. KV planes that have to are told to ``notice``, once per codec and dtype.
    Codecs that study the numbers first do so with ``read``, if it is given.
    """
    raw = Raw()
    wanted: dict[int, Codec] = {}
    refused: dict[tuple[str, str], list[Plane]] = {}
    for plane in planes:
        codec = raw if plane.kind == "bytes" else choose(plane)
        if codec is not raw and not codec.supports(plane):
            refused.setdefault((codec.name, plane.dtype), []).append(plane)
            codec = raw
        wanted[plane.index] = codec
    for (name, dtype), which in refused.items():
        first = f"{which[0]}{f' and {len(which) - 1} more' if len(which) > 1 else ''}"
        notice(f"{first}: stored unchanged (raw), because codec {name!r} does not take {dtype} of this shape")

    # By identity: two codecs of equal parameters are one only if the caller made them one.
    distinct = list({id(wanted[plane.index]): wanted[plane.index] for plane in planes}.values())
    numbers = {id(codec): number for number, codec in enumerate(distinct)}
    bound = []
    for codec in distinct:
        own = [plane for plane in planes if wanted[plane.index] is codec]
        studied = codec.study(own, read, notice) if codec.studies and read is not None else codec
        bound.append(studied.bind(own))
    return Assignment(tuple(bound), {index: numbers[id(codec)] for index, codec in wanted.items()})
