"""Steps of the coding stage, and what happens when a device has too little memory for one: it is halved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvzip.cache import Block
from kvzip.container import Frame
from kvzip.devices.base import OUT_OF_DEVICE_MEMORY, Device
from kvzip.errors import LimitError
from kvzip.pipeline.plan import Unit
from kvzip.pipeline.window import Window

Item = TypeVar("Item", Block, Frame)
Result = TypeVar("Result")
Notice = Callable[[str], None]


@dataclass
class Step(Generic[Item]):
    """Blocks to encode or frames to decode, ``items``, of a window.

    Attributes:
        first, last: whether it is the window's first or last step: between the two the window stays on the device.
        belongs: whether an item has to do with a unit.
    """

    window: Window
    items: list[Item]
    first: bool
    last: bool
    belongs: Callable[[Item, Unit], bool]

    @property
    def nbytes(self) -> int:
        return sum((item if isinstance(item, Block) else item.entry.block).nbytes for item in self.items)

    @property
    def divisible(self) -> bool:
        return self._divides_window or len(self.items) > 1

    @property
    def _divides_window(self) -> bool:
        return self.first and self.last and len(self.window.units) > 1

    def halves(self) -> list[Step[Item]]:
        """The same work in two steps: of two smaller windows, or of half the items each if the window must stay."""
        if self._divides_window:
            return [
                Step(half, [item for item in self.items if self._touches(item, half)], True, True, self.belongs)
                for half in self.window.halves()
            ]
        middle = len(self.items) // 2
        return [
            Step(self.window, self.items[:middle], self.first, False, self.belongs),
            Step(self.window, self.items[middle:], False, self.last, self.belongs),
        ]

    def _touches(self, item: Item, window: Window) -> bool:
        return any(self.belongs(item, unit) for unit in window.units)


def steps(window: Window, pieces: Sequence[list[Item]], belongs: Callable[[Item, Unit], bool]) -> Iterator[Step[Item]]:
    """One step for each of ``pieces``, all the items of a window."""
    for number, piece in enumerate(pieces):
        yield Step(window, piece, number == 0, number == len(pieces) - 1, belongs)


def fitted(step: Step[Item], code: Callable[[Step[Item]], Result], device: Device, notice: Notice) -> Iterator[Result]:
    """The results of ``code`` for ``step``, or for as many parts of it as the memory of ``device`` makes necessary.

    After a failure the device's batches are smaller for good, of which ``notice`` is told. Raises what ``code`` raises
    for a part that is one block.
    """
    todo = [step]
    while todo:
        step = todo.pop(0)
        if step.divisible and step.nbytes > device.batch_bytes:
            todo[:0] = step.halves()
            continue
        try:
            result = code(step)
        except LimitError as error:
            if error.code != OUT_OF_DEVICE_MEMORY or not step.divisible:
                raise
        else:
            yield result
            continue
        # Here, where the error no longer holds on to what it came by.
        if step.first:
            step.window.release()
        device.use_less(step.nbytes)
        notice(f"too little free memory on {device}: going on in smaller batches")
        todo[:0] = step.halves()


def once(notice: Notice) -> Notice:
    """Passes on only the first thing that it is told."""
    told: list[str] = []

    def listen(text: str) -> None:
        if not told:
            told.append(text)
            notice(text)

    return listen
