"""What all codecs share: sections as bytes, sections taken apart with suspicion, errors summed."""

from __future__ import annotations

import math

import numpy as np

from kvzip.cache import Block
from kvzip.codecs.base import Sections
from kvzip.devices.base import SECTION_PADDING, Array, Device
from kvzip.errors import CorruptError


def as_bytes(array: Array) -> Array:
    """A contiguous array as uint8, no copy."""
    return array.reshape(-1).view(np.uint8)


def padded(section: Array, device: Device) -> Array:
    """A section as decoders get it: on the device, with the zero bytes behind it that they may read."""
    buffer = device.xp.zeros(section.size + SECTION_PADDING, np.uint8)[: section.size]
    buffer.reshape(section.shape)[...] = device.to_device(section)
    return buffer


def total_errors(sums: np.ndarray) -> tuple[float, float, float]:
    """Squared error and energy summed, largest error, of ``[warps, 3]``; exactly rounded, whatever the order."""
    return math.fsum(sums[:, 0].tolist()), math.fsum(sums[:, 1].tolist()), float(sums[:, 2].max(initial=0.0))


class SectionReader:
    """Takes the sections of one block apart, trusting nothing."""

    def __init__(self, block: Block, sections: Sections, device: Device) -> None:
        self._block = block
        self._sections = dict(sections)
        self._device = device

    def array(self, tag: str, itemsize: int, *, exactly: int | None = None, optional: bool = False) -> tuple[int, int]:
        """The address of a section and the number of items in it; (0, 0) where an optional one is missing.

        Raises:
            CorruptError: the section is missing, is no whole number of items, or has not ``exactly`` that many.
        """
        section = self._sections.pop(tag, None)
        if section is None:
            if optional:
                return 0, 0
            raise self._corrupt(f"section {tag} is missing")
        count, rest = divmod(section.nbytes, itemsize)
        if rest or (exactly is not None and count != exactly):
            expected = f"{exactly * itemsize}" if exactly is not None else f"a multiple of {itemsize}"
            raise self._corrupt(f"section {tag} has {section.nbytes} bytes, expected {expected}")
        return self._device.address(section), count

    def words(self, tag: str) -> np.ndarray:
        """A section of 32-bit words, on the host. Raises CorruptError as :meth:`array` does."""
        section = self._sections.get(tag)
        self.array(tag, 4)
        return np.array(self._device.to_host(section)).view(np.uint32)

    def done(self) -> None:
        """Raises CorruptError if a section is left over."""
        if self._sections:
            raise self._corrupt(f"unknown section {', '.join(self._sections)}")

    def _corrupt(self, what: str) -> CorruptError:
        return corrupt_block(self._block, what)


def corrupt_block(block: Block, what: str) -> CorruptError:
    planes = ", ".join(map(str, block.planes))
    return CorruptError(f"{planes}, tokens {block.start}:{block.stop}: {what}", code="corrupt-block")
