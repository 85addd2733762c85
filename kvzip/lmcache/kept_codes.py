"""TurboQuant's codes from one file to another as they are: quantized again, one in a thousand would change."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import numpy as np

from kvzip import api
from kvzip.cache import Plane
from kvzip.codecs.base import Batch, Codec, Encoded
from kvzip.codecs.turboquant import TurboQuant
from kvzip.container import Frame
from kvzip.devices.base import Device
from kvzip.errors import CorruptError
from kvzip.lmcache.turboquant import Codes, layers_between, slot_parts, stock_of


class KeptCodes(TurboQuant):
    """Stores the codes that it is given, of the numbers that they decode to: ``turboquant`` for who reads the file."""

    def __init__(self, codec: TurboQuant, layers: int, codes: Codes) -> None:
        super().__init__(**stock_of(codec, layers).config())
        self._codes = codes

    def bind(self, planes: object) -> Self:
        return self

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        encoded = super().encode(batch, device)
        for one, block in zip(encoded, batch.blocks, strict=True):
            codes = self._codes.get((block.plane.layer, int(block.plane.kind == "value")))
            if codes is not None:
                parts = {tag: np.ascontiguousarray(part[block.start : block.stop]) for tag, part in codes.items()}
                one.sections = {tag: device.to_device(part.reshape(-1)) for tag, part in parts.items()}
                one.errors = [replace(error, squared_error=0.0, max_abs=0.0) for error in one.errors]
        return encoded


def join_codes(parts: list[Codes]) -> Codes:
    """Those of chunks whose tokens follow each other."""
    return {
        member: {tag: np.concatenate([part[member][tag] for part in parts]) for tag in codes}
        for member, codes in parts[0].items()
    }


def stock_codec(cache: api.Cache) -> TurboQuant | None:
    """The first codec of a cache whose codes are LMCache's."""
    codecs: list[Codec] = [cache.codec_of(plane) for plane in cache.planes]
    return next((codec for codec in codecs if isinstance(codec, TurboQuant) and not codec.tuned), None)


def codes_of(cache: api.Cache, codec: TurboQuant, tokens: api.Cut) -> Codes | None:
    """The codes of the layers between, of those tokens; None if some are not what ``codec`` makes.

    Raises ``CorruptError`` if a frame does not hold what its codec says.
    """
    layers = len(cache.layers)
    if cache.layers != list(range(layers)):
        return None
    wanted = {**stock_of(codec, layers).config(), "block_size": None}
    codes: Codes = {}
    for plane in cache.planes:
        if plane.kind == "bytes" or plane.layer not in layers_between(codec, layers):
            continue
        if {**cache.codec_of(plane).config(), "block_size": None} != wanted:
            return None
        which = int(plane.kind == "value")
        sizes = {tag: size for tag, part, size in slot_parts(codec, layers, plane.head_dim) if part == which}
        codes[plane.layer, which] = _stored(cache, plane, tokens, sizes)
    return codes


def _stored(cache: api.Cache, plane: Plane, tokens: api.Cut, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    wanted = api.as_range(tokens, "tokens") or range(plane.tokens)
    parts: dict[str, list[np.ndarray]] = {tag: [] for tag in sizes}
    for frame in cache.frames(plane, wanted):
        block = frame.entry.block
        inside = slice(max(wanted.start - block.start, 0), min(wanted.stop, block.stop) - block.start)
        for tag, size in sizes.items():
            parts[tag].append(_section(frame, tag, size)[inside])
    return {tag: np.concatenate(found) for tag, found in parts.items()}


def _section(frame: Frame, tag: str, size: int) -> np.ndarray:
    block = frame.entry.block
    section, expected = frame.sections.get(tag), block.tokens * block.plane.heads * size
    if section is None or section.size != expected:
        found = "nothing" if section is None else f"{section.size} bytes"
        raise CorruptError(
            f"{block.plane}, tokens {block.start}:{block.stop}: section {tag} has {found}, expected {expected} bytes",
            code="corrupt-block",
        )
    return np.array(section).reshape(block.tokens, block.plane.heads, size)
