"""What a coder of CacheGen's symbols is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from kvzip.cache import Block
from kvzip.codecs.base import Batch, Encoded, Sections
from kvzip.devices.base import Device


class Coder(ABC):
    """Quantizes the blocks of a batch, each with its own number of bins, and codes the symbols; and back."""

    most_bins: ClassVar[int]

    @abstractmethod
    def bound(self, block: Block, bins: int) -> int:
        """As :meth:`kvzip.codecs.base.Codec.bound`."""

    @abstractmethod
    def encode(self, batch: Batch, bins: Sequence[int], sinks: int, device: Device) -> list[Encoded]:
        """As :meth:`kvzip.codecs.base.Codec.encode`; the ``sinks`` oldest tokens of the file stay exact."""

    @abstractmethod
    def decode(self, batch: Batch, bins: Sequence[int], sections: Sequence[Sections], device: Device) -> None:
        """As :meth:`kvzip.codecs.base.Codec.decode`."""


def levels_of(bins: int) -> int:
    """``M``: symbols run from 0 to ``2 * M``, which stand for ``-M .. M``."""
    return bins // 2 - 1
