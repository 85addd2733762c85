"""Which codec codes which plane."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvzip.cache import BLOCK_TOKENS, Plane
from kvzip.codecs import get_codec
from kvzip.codecs.base import Codec, Read
from kvzip.codecs.lossless import Lossless
from kvzip.errors import UsageError

_RUN = re.compile(r"(\d+)(?:(-)(\d+)?)?:(.+)")


@dataclass(frozen=True)
class Assignment:
    """The codecs of a file, and for each plane (by its ``index``) the position of its codec among them."""

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


@dataclass(frozen=True)
class Choice:
    """Which codec a plane is given to: that of its layer if there is one, else that of its kind, else ``codec``.

    Args:
        codec: for what the others leave, MLA latents among them.
        keys, values: for one kind of planes.
        layers: first layer, last layer (None: to the end) and codec; the first run that holds a layer counts.
        options: those that were given beside ``codec``, for it alone.
    """

    codec: Codec
    keys: Codec | None = None
    values: Codec | None = None
    layers: tuple[tuple[int, int | None, Codec], ...] = ()
    options: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        codec: str | Codec,
        keys: str | Codec | None = None,
        values: str | Codec | None = None,
        layers: str | None = None,
        **options: Any,
    ) -> Choice:
        """From specs as :func:`~kvzip.codecs.get_codec` takes them; ``layers`` as in ``"0-1:raw,2-:kivi:bits=2"``.

        ``options`` are those of ``codec``. Equal specs make one codec of the file.

        Raises:
            UsageError: an unknown codec, an option that it refuses, or layers that cannot be read.
        """
        made: dict[str, Codec] = {}

        def get(spec: str | Codec) -> Codec:
            return spec if isinstance(spec, Codec) else made.setdefault(spec, get_codec(spec))

        def of_kind(spec: str | Codec | None) -> Codec | None:
            return None if spec is None else get(spec)

        default = get_codec(codec, **options)
        if isinstance(codec, str) and not options:
            made[codec] = default
        runs = tuple((first, last, get(spec)) for first, last, spec in _parse_layers(layers))
        return cls(default, of_kind(keys), of_kind(values), runs, tuple(options))

    def __call__(self, plane: Plane) -> Codec:
        for first, last, codec in self.layers:
            if first <= plane.layer and (last is None or plane.layer <= last):
                return codec
        of_kind = {"key": self.keys, "value": self.values}.get(plane.kind)
        return of_kind or self.codec

    @property
    def studies(self) -> bool:
        """Whether one of the codecs looks at the numbers before it codes."""
        given = (self.codec, self.keys, self.values, *(codec for *_, codec in self.layers))
        return any(codec is not None and codec.studies for codec in given)

    def check(self, planes: Sequence[Plane]) -> None:
        """Raises ``UsageError`` for layers that no plane has, and for options of a codec that no plane is given to."""
        layers = {plane.layer for plane in planes if plane.kind != "bytes"}
        for first, last, codec in self.layers:
            if last is not None and layers and last > max(layers):
                raise UsageError(
                    f"layers {first}-{last} were given to {codec.name!r}, and the cache ends with layer {max(layers)}; "
                    f"write {first}- for all to the end",
                    code="layer-codec",
                )
            if not any(first <= layer and (last is None or layer <= last) for layer in layers):
                run = f"{first}" if last == first else f"{first}-{'' if last is None else last}"
                raise UsageError(
                    f"the cache has no layer {run}, which {codec.name!r} was given to; its layers are "
                    f"{min(layers, default=0)} to {max(layers, default=0)}",
                    code="layer-codec",
                )
        if self.options and layers and not any(self(plane) is self.codec for plane in planes if plane.kind != "bytes"):
            raise UsageError(
                f"{', '.join(self.options)}: for codec {self.codec.name!r}, which has nothing to code: all keys and "
                "values have codecs of their own; write their options there, as in kivi:bits=2",
                code="codec-option",
            )


def _parse_layers(text: str | None) -> list[tuple[int, int | None, str]]:
    """``"0-1:raw,2-:kivi:bits=2,residual=64"``: a comma that no layer follows belongs to a codec's options."""
    runs: list[tuple[int, int | None, str]] = []
    for piece in [] if text is None else text.split(","):
        match = _RUN.fullmatch(piece.strip())
        if match:
            first, dash, last, spec = match.groups()
            stop = int(last) if last else None if dash else int(first)
            if stop is not None and stop < int(first):
                raise UsageError(f"layers {piece!r} run backwards", code="layer-codec")
            runs.append((int(first), stop, spec))
        elif runs and "=" in piece:
            runs[-1] = (*runs[-1][:2], f"{runs[-1][2]},{piece}")
        else:
            raise UsageError(
                f"cannot read {piece!r}; write FIRST-LAST:CODEC, such as 0-1:raw,2-:kivi:bits=2", code="layer-codec"
            )
    return runs


def assign(
    planes: Sequence[Plane],
    choose: Callable[[Plane], Codec],
    notice: Callable[[str], None] = lambda text: None,
    read: Read | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> Assignment:
    """Bind the codecs that ``choose`` names to their planes; what a codec does not support goes to ``lossless``.

    Tensors that are no KV always do, unless all KV is given to one codec that keeps every bit: it takes them, too.
    KV planes that have to are told to ``notice``, once per codec and dtype. Codecs that study the numbers first do so
    with ``read``, if it is given; ``block_tokens`` is what they will code.
    """
    chosen = {plane.index: choose(plane) for plane in planes if plane.kind != "bytes"}
    fallback = _fallback(planes, list(chosen.values()))
    wanted: dict[int, Codec] = {}
    refused: dict[tuple[str, str], list[Plane]] = {}
    for plane in planes:
        codec = chosen.get(plane.index, fallback)
        if not codec.supports(plane):
            refused.setdefault((codec.name, plane.dtype), []).append(plane)
            codec = fallback
        wanted[plane.index] = codec
    for (name, dtype), which in refused.items():
        first = f"{which[0]}{f' and {len(which) - 1} more' if len(which) > 1 else ''}"
        notice(f"{first}: stored without loss, because codec {name!r} does not take {dtype} of this shape")

    # By identity: two codecs of equal parameters are one only if the caller made them one.
    distinct = list({id(wanted[plane.index]): wanted[plane.index] for plane in planes}.values())
    numbers = {id(codec): number for number, codec in enumerate(distinct)}
    bound = []
    for codec in distinct:
        own = [plane for plane in planes if wanted[plane.index] is codec]
        studied = codec.study(own, read, notice, block_tokens) if read is not None else codec
        bound.append(studied.bind(own))
    return Assignment(tuple(bound), {index: numbers[id(codec)] for index, codec in wanted.items()})


def _fallback(planes: Sequence[Plane], chosen: Sequence[Codec]) -> Codec:
    """What takes the planes that no other codec does, without loss."""
    only = chosen[0] if len(set(map(id, chosen))) == 1 else None
    if only is not None and only.lossless and all(map(only.supports, planes)):
        return only
    return next((codec for codec in chosen if isinstance(codec, Lossless)), None) or Lossless()
