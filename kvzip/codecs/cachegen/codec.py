"""The codec: bins per layer, which tokens stay exact, and which coder takes the symbols."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch, Codec, Encoded, Sections
from kvzip.codecs.cachegen import levels as refinement
from kvzip.codecs.cachegen.coder import Coder
from kvzip.codecs.cachegen.range import RangeCoder
from kvzip.codecs.cachegen.rans import RansCoder
from kvzip.coding import bins as schedule
from kvzip.devices.base import Device
from kvzip.devices.descriptors import has_numbers
from kvzip.errors import UsageError

CODERS: dict[str, Coder] = {"rans": RansCoder(), "range": RangeCoder()}


class CacheGen(Codec):
    """LMCache's symbols, entropy-coded.

    Args:
        k_bins, v_bins: bins per layer, such as ``"0-9:32,10-:16"``; LMCache's schedule for the layer count if None.
        level: 1 to 9, scales the bins by ``2 ** ((level - 5) / 2)``; 5 leaves them.
        sinks: how many of the oldest tokens of the file to keep exact; 0 for a chunk from the middle of a prompt.
        coder: ``rans``, or ``range`` for LMCache's own tables and streams, a block being one call of LMCache.
        levels: 1 to 3 qualities in one file: the bins, three times as fine, nine times as fine.

    Raises:
        UsageError: a schedule that cannot be read or leaves layers out, more bins than the coder takes, a level, a
            number of sinks or levels, or a coder that there is not.
    """

    name = "cachegen"

    def __init__(
        self,
        *,
        k_bins: str | None = None,
        v_bins: str | None = None,
        level: int = 5,
        sinks: int = 1,
        coder: str = "rans",
        levels: int = 1,
    ) -> None:
        if not 1 <= level <= 9:
            raise UsageError(f"level must be 1 to 9, got {level}")
        if sinks < 0:
            raise UsageError(f"sinks must be 0 or more, got {sinks}")
        if coder not in CODERS:
            raise UsageError(f"coder must be one of {', '.join(CODERS)}, got {coder!r}")
        if not 1 <= levels <= 1 + len(refinement.TAGS):
            raise UsageError(f"levels must be 1 to {1 + len(refinement.TAGS)}, got {levels}")
        self.bins = {
            "key": schedule.parse(k_bins, "k_bins") if k_bins is not None else None,
            "value": schedule.parse(v_bins, "v_bins") if v_bins is not None else None,
        }
        self.level = level
        self.sinks = sinks
        self.coder = coder
        self.levels = levels
        self._finest = levels - 1

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"sinks": self.sinks}
        if self.level != 5:
            config["level"] = self.level
        if self.coder != "rans":
            config["coder"] = self.coder
        if self.levels > 1:
            config["levels"] = self.levels
        for option, kind in (("k_bins", "key"), ("v_bins", "value")):
            if (runs := self.bins[kind]) is not None:
                config[option] = schedule.render(runs)
        return config

    @classmethod
    def ladder(cls) -> list[str]:
        return ["", "level=1", "level=3", "level=7", "level=9", "levels=3", "coder=range"]

    def bind(self, planes: Sequence[Plane]) -> Self:
        layers = max((plane.layer for plane in planes), default=-1) + 1
        k_bins, v_bins = self._resolve("key", "k_bins", layers), self._resolve("value", "v_bins", layers)
        return type(self)(k_bins=k_bins, v_bins=v_bins, sinks=self.sinks, coder=self.coder, levels=self.levels)

    def supports(self, plane: Plane) -> bool:
        return has_numbers(plane)

    def describe(self, plane: Plane) -> dict[str, Any]:
        return {"bins": self._bins(plane)} | ({"levels": self.levels} if self.levels > 1 else {})

    def bound(self, block: Block) -> int:
        refinements = (self.levels - 1) * refinement.section_bytes(block)
        return CODERS[self.coder].bound(block, self._bins(block.plane)) + refinements

    @property
    def quality_levels(self) -> int:
        return self.levels

    def at_level(self, level: int) -> Self:
        limited = copy.copy(self)
        limited._finest = level
        return limited

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        bins = self._bins_of(batch)
        encoded = CODERS[self.coder].encode(batch, bins, self.sinks, device)
        if self.levels > 1:
            refined = refinement.encode(batch, bins, self.sinks, self.levels - 1, device)
            for block, (sections, errors) in zip(encoded, refined, strict=True):
                block.sections, block.errors = {**block.sections, **sections}, [errors]
        return encoded

    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        """As ever; refinements that a file has left out, or that are finer than the level wanted, are not missed."""
        bins, coder = self._bins_of(batch), CODERS[self.coder]
        if self.levels == 1:
            coder.decode(batch, bins, sections, device)
            return
        parts = [refinement.split(one, block) for one, block in zip(sections, batch.blocks, strict=True)]
        coder.decode(batch, bins, [own for own, _ in parts], device)
        wanted = [dict(list(finer.items())[: self._finest]) for _, finer in parts]
        if any(wanted):
            refinement.refine(batch, bins, [own["TOKN"] for own, _ in parts], wanted, device)

    def _resolve(self, kind: str, option: str, layers: int) -> str:
        given = self.bins[kind] or schedule.lmcache(layers, kind)
        runs = schedule.resolve(given, layers, 2 ** ((self.level - 5) / 2), option)
        most, largest = CODERS[self.coder].most_bins, max(bins for _, _, bins in runs)
        if self.levels > 1 and largest > refinement.MOST_BINS:
            raise UsageError(
                f"{option}: {largest} bins cannot be refined, at most {refinement.MOST_BINS} can; choose a lower level"
            )
        if largest > most:
            raise UsageError(f"{option}: {largest} bins are more than the {self.coder} coder's {most}")
        return schedule.render(runs)

    def _bins_of(self, batch: Batch) -> list[int]:
        return [self._bins(block.plane) for block in batch.blocks]

    def _bins(self, plane: Plane) -> int:
        runs = self.bins["value" if plane.kind == "value" else "key"]
        if runs is None:
            raise ValueError("bind() the codec to a cache first")
        return schedule.lookup(runs, plane.layer)
