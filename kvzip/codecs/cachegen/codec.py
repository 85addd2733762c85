"""The codec: bins per layer, which tokens stay exact, and which coder takes the symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch, Codec, Encoded, Sections
from kvzip.codecs.cachegen.coder import Coder
from kvzip.codecs.cachegen.range import RangeCoder
from kvzip.codecs.cachegen.rans import RansCoder
from kvzip.coding import bins as schedule
from kvzip.devices.base import Device
from kvzip.devices.descriptors import ELEMENT_SUFFIX
from kvzip.errors import UsageError

CODERS: dict[str, Coder] = {"rans": RansCoder(), "range": RangeCoder()}


class CacheGen(Codec):
    """LMCache's symbols, entropy-coded.

    Args:
        k_bins, v_bins: bins per layer, such as ``"0-9:32,10-:16"``; LMCache's schedule for the layer count if None.
        level: 1 to 9, scales the bins by ``2 ** ((level - 5) / 2)``; 5 leaves them.
        sinks: how many of the oldest tokens of the file to keep exact; 0 for a chunk from the middle of a prompt.
        coder: ``rans``, or ``range`` for LMCache's own tables and streams, a block being one call of LMCache.

    Raises:
        UsageError: a schedule that cannot be read or leaves layers out, more bins than the coder takes, a level, a
            number of sinks or a coder that there is not.
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
    ) -> None:
        if not 1 <= level <= 9:
            raise UsageError(f"level must be 1 to 9, got {level}")
        if sinks < 0:
            raise UsageError(f"sinks must be 0 or more, got {sinks}")
        if coder not in CODERS:
            raise UsageError(f"coder must be one of {', '.join(CODERS)}, got {coder!r}")
        self.bins = {
            "key": schedule.parse(k_bins, "k_bins") if k_bins is not None else None,
            "value": schedule.parse(v_bins, "v_bins") if v_bins is not None else None,
        }
        self.level = level
        self.sinks = sinks
        self.coder = coder

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"sinks": self.sinks}
        if self.level != 5:
            config["level"] = self.level
        if self.coder != "rans":
            config["coder"] = self.coder
        for option, kind in (("k_bins", "key"), ("v_bins", "value")):
            if (runs := self.bins[kind]) is not None:
                config[option] = schedule.render(runs)
        return config

    @classmethod
    def ladder(cls) -> list[str]:
        return ["", "level=1", "level=3", "level=7", "level=9", "coder=range"]

    def bind(self, planes: Sequence[Plane]) -> Self:
        layers = max((plane.layer for plane in planes), default=-1) + 1
        k_bins, v_bins = self._resolve("key", "k_bins", layers), self._resolve("value", "v_bins", layers)
        return type(self)(k_bins=k_bins, v_bins=v_bins, sinks=self.sinks, coder=self.coder)

    def supports(self, plane: Plane) -> bool:
        return plane.dtype in ELEMENT_SUFFIX and plane.kind != "bytes"

    def describe(self, plane: Plane) -> dict[str, Any]:
        return {"bins": self._bins(plane)}

    def bound(self, block: Block) -> int:
        return CODERS[self.coder].bound(block, self._bins(block.plane))

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        return CODERS[self.coder].encode(batch, self._bins_of(batch), self.sinks, device)

    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        CODERS[self.coder].decode(batch, self._bins_of(batch), sections, device)

    def _resolve(self, kind: str, option: str, layers: int) -> str:
        given = self.bins[kind] or schedule.lmcache(layers, kind)
        runs = schedule.resolve(given, layers, 2 ** ((self.level - 5) / 2), option)
        most, largest = CODERS[self.coder].most_bins, max(bins for _, _, bins in runs)
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
