"""Streaming a cache over a network of changing speed: which quality for which chunk.

A file compressed with ``levels=2`` or ``3`` holds refinements that may be left out of any block. A chunk is the blocks
of the same tokens, all layers together, as a model can begin to use it. The rule is CacheGen's (Liu et al., SIGCOMM
2024): send the next chunk at the finest level at which all that is left, at the speed just seen, would still arrive in
time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from kvzip.codecs.cachegen.levels import TAGS
from kvzip.container import Reader, Writer
from kvzip.container.format import padded
from kvzip.errors import UsageError
from kvzip.opening import PathLike, open_reader, open_target

SECTION_ENTRY_BYTES = 8
"""Tag and length of a section in the table of its frame."""


def level_sizes(source: PathLike | BinaryIO) -> np.ndarray:
    """Bytes of each chunk of a ``.kvz`` at each quality level, int64 ``[chunks, levels]``; the whole file is read."""
    with open_reader(source) as reader:
        starts, sizes = _starts(reader), []
        for start in starts:
            of_levels = np.zeros(len(TAGS) + 1, np.int64)
            for entry in _chunk(reader, start):
                (frame,) = reader.read_frames([entry])
                finer = [_stored_bytes(frame.sections[tag]) if tag in frame.sections else 0 for tag in TAGS]
                of_levels += entry.length - np.cumsum([0, *reversed(finer)])[::-1]
            sizes.append(of_levels)
    # A level that no chunk has weighs as much as the one before.
    there = np.append(True, (np.diff(sizes, axis=1) > 0).any(axis=0))
    return np.array(sizes)[:, there]


def _stored_bytes(section: np.ndarray) -> int:
    """A section with its padding and its place in the frame's table."""
    return padded(section.nbytes) + SECTION_ENTRY_BYTES


def thin(
    source: PathLike | BinaryIO, target: PathLike | BinaryIO, levels: Sequence[int], *, force: bool = False
) -> None:
    """Write a ``.kvz`` whose chunks have the quality ``levels``: what a server sends, or a client keeps.

    Raises UsageError unless there is one level for each chunk.
    """
    with open_reader(source) as reader, open_target(target, source, force=force, sync=False) as sink:
        starts = _starts(reader)
        if len(levels) != len(starts) or any(level < 0 for level in levels):
            raise UsageError(
                f"the file has {len(starts)} chunks, and {len(levels)} levels were given", code="bad-levels"
            )
        writer = Writer(sink, reader.header)
        if reader.profile is not None:
            writer.write_profile(reader.profile.hash, reader.profile.read())
        for level, start in zip(levels, starts, strict=True):
            for entry in _chunk(reader, start):
                (frame,) = reader.read_frames([entry])
                kept = {tag: part for tag, part in frame.sections.items() if tag not in TAGS[level:]}
                writer.write_block(entry.block, entry.codec, kept)
        writer.close()


def _starts(reader: Reader) -> list[int]:
    return sorted({entry.block.start for entry in reader.index})


def _chunk(reader: Reader, start: int) -> list[Any]:
    return [entry for entry in reader.index if entry.block.start == start]


# ------------------------------------------------------------------------------------------- the rule


def choose_level(remaining: np.ndarray, seconds_left: float, bytes_per_second: float) -> int:
    """The finest level at which ``remaining`` (bytes ``[chunks, levels]``, next chunk first) arrives in time, or 0."""
    needed = remaining.sum(axis=0) / bytes_per_second
    return int(max(np.flatnonzero(needed <= seconds_left), default=0))


@dataclass(frozen=True)
class Trace:
    """A link: from ``seconds[i]`` on it carries ``bytes_per_second[i]``. ``seconds`` rise from 0."""

    seconds: Sequence[float]
    bytes_per_second: Sequence[float]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.seconds, self.seconds[1:], strict=False))
        if len(self.seconds) != len(self.bytes_per_second) or not self.seconds or self.seconds[0] != 0 or not rising:
            raise UsageError("a trace needs rising seconds from 0, and a speed for each", code="bad-trace")
        if min(self.bytes_per_second) < 0 or self.bytes_per_second[-1] <= 0:
            raise UsageError("the speeds of a trace must not be negative, and the last not 0", code="bad-trace")

    def arrival(self, start: float, nbytes: float) -> float:
        """When ``nbytes`` sent from ``start`` on have arrived."""
        step, now = bisect_right(self.seconds, start) - 1, start
        while step + 1 < len(self.seconds):
            carried = (self.seconds[step + 1] - now) * self.bytes_per_second[step]
            if carried >= nbytes:
                break
            nbytes, now, step = nbytes - carried, self.seconds[step + 1], step + 1
        return now + nbytes / self.bytes_per_second[step]


@dataclass(frozen=True)
class Streamed:
    """What became of a transfer: the level of each chunk, and when the last one had arrived."""

    levels: tuple[int, ...]
    seconds: float


def simulate(sizes: np.ndarray, trace: Trace, deadline: float, first_guess: float) -> Streamed:
    """Stream chunks of ``sizes`` (bytes ``[chunks, levels]``) by the rule, which knows the speed of the chunk before.

    Args:
        deadline: seconds from the start by which all should be there.
        first_guess: bytes per second to reckon with for the first chunk.
    """
    now, speed, levels = 0.0, first_guess, []
    for chunk in range(len(sizes)):
        level = choose_level(sizes[chunk:], deadline - now, speed)
        arrived = trace.arrival(now, float(sizes[chunk, level]))
        speed, now = float(sizes[chunk, level]) / (arrived - now), arrived
        levels.append(level)
    return Streamed(tuple(levels), now)
