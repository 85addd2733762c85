"""What is coded at a time, and what happens when a device has too little memory for it: it is halved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

from kvzip.cache import Block
from kvzip.container import Frame
from kvzip.devices.base import OUT_OF_DEVICE_MEMORY, Device
from kvzip.errors import LimitError
from kvzip.pipeline.plan import Unit
from kvzip.pipeline.window import Window

Item = TypeVar("Item", Block, Frame)
Some = TypeVar("Some", bound="Work[Any]")
Result = TypeVar("Result")
Notice = Callable[[str], None]


@dataclass
class Work(Generic[Item]):
    """Blocks to encode or frames to decode, ``items``."""

    items: list[Item]

    @property
    def nbytes(self) -> int:
        return sum((item if isinstance(item, Block) else item.entry.block).nbytes for item in self.items)

    @property
    def divisible(self) -> bool:
        return len(self.items) > 1

    def halves(self) -> Sequence[Self]:
        """The same work in two pieces, with nothing on the device that is not needed there for long."""
        middle = len(self.items) // 2
        return [replace(self, items=self.items[:middle]), replace(self, items=self.items[middle:])]


@dataclass
class Step(Work[Item]):
    """What is to be done with the planes of a window.

    Attributes:
        first, last: whether it is the window's first or last step: between the two the window stays on the device.
        belongs: whether an item has to do with a unit.
        arrival: gives the items with what they need on the device, if that is on its way.
    """

    window: Window
    first: bool
    last: bool
    belongs: Callable[[Item, Unit], bool]
    arrival: Callable[[], list[Item]] | None = None

    @property
    def divisible(self) -> bool:
        return self._divides_window or super().divisible

    @property
    def _divides_window(self) -> bool:
        return self.first and self.last and len(self.window.units) > 1

    def halves(self) -> Sequence[Self]:
        """Two steps: of two smaller windows, or of half the items each if the window must stay."""
        self.arrival = None
        if self.first:
            self.window.release()
        if self._divides_window:
            return [
                replace(self, window=half, items=[item for item in self.items if self._touches(item, half)])
                for half in self.window.halves()
            ]
        one, other = super().halves()
        return [replace(one, last=False), replace(other, first=False)]

    def _touches(self, item: Item, window: Window) -> bool:
        return any(self.belongs(item, unit) for unit in window.units)


def steps(window: Window, pieces: Sequence[list[Item]], belongs: Callable[[Item, Unit], bool]) -> Iterator[Step[Item]]:
    """One step for each of ``pieces``, all the items of a window."""
    for number, piece in enumerate(pieces):
        yield Step(piece, window, number == 0, number == len(pieces) - 1, belongs)


def fitted(work: Some, code: Callable[[Some], Result], device: Device, notice: Notice) -> Iterator[Result]:
    """The results of ``code`` for ``work``, or for as many parts of it as the memory of ``device`` makes necessary.

    After a failure the device's batches are smaller for good, of which ``notice`` is told. Raises what ``code`` raises
    for a part that is one block.
    """
    todo = [work]
    while todo:
        work = todo.pop(0)
        if work.divisible and work.nbytes > device.batch_bytes:
            todo[:0] = work.halves()
            continue
        try:
            result = code(work)
        except LimitError as error:
            if error.code != OUT_OF_DEVICE_MEMORY or not work.divisible:
                raise
        else:
            yield result
            continue
        # Here, where the error no longer holds on to what it came by.
        todo[:0] = work.halves()
        device.use_less(work.nbytes)
        notice(f"too little free memory on {device}: going on in smaller batches")


def once(notice: Notice) -> Notice:
    """Passes on only the first thing that it is told."""
    told: list[str] = []

    def listen(text: str) -> None:
        if not told:
            told.append(text)
            notice(text)

    return listen
