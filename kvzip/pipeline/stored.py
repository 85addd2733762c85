"""A ``.kvz`` opened for decoding: its codecs, its map, and the frames that a part of it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvzip.cache import Block
from kvzip.codecs import load_codec
from kvzip.codecs.base import Codec
from kvzip.container import Entry, Frame, Reader, StreamReader
from kvzip.container.format import PADDING
from kvzip.container.frames import frame_buffer
from kvzip.errors import CorruptError, UnsupportedError, UsageError
from kvzip.layouts import CacheMap, Origin, Restriction, restrict
from kvzip.pipeline.plan import chunks
from kvzip.profiles.library import Embedded, Place, offered, offering
from kvzip.tensorfile import SourceFile, TensorInfo, tensors_of


class Want(NamedTuple):
    """Tokens ``start:stop`` of the planes of group number ``group``."""

    group: int
    start: int
    stop: int


class StoredCodecs:
    """The codecs that a header names, each loaded when first used: a file is readable as far as its codecs are here."""

    def __init__(self, reader: Reader | StreamReader) -> None:
        self._reader = reader
        self._rows = reader.header.codecs
        self._loaded: dict[int, Codec] = {}
        self._offered = offered()

    def __getitem__(self, number: int) -> Codec:
        if number not in self._loaded:
            with offering(self._places()):
                self._loaded[number] = load_codec(self._rows[number]["name"], self._rows[number]["config"])
        return self._loaded[number]

    def _places(self) -> list[Place]:
        """Where profiles may be besides the usual places: where the caller said, in the file, beside it."""
        carried, name = self._reader.profile, self._reader.name
        inside = [Embedded(f"in {name}", carried.hash, carried.read)] if carried else []
        beside = [Path(name).parent] if Path(name).is_file() else []
        return [*self._offered, *inside, *beside]

    def choose_level(self, level: int) -> None:
        """Decode at a quality level of the several that a file has. Raises ``UsageError`` for one that it lacks."""
        codecs = [self[number] for number in range(len(self._rows))]
        levels = max((codec.quality_levels for codec in codecs), default=1)
        if not 0 <= level < levels:
            has = f"quality levels 0 to {levels - 1}" if levels > 1 else "one quality level, 0"
            raise UsageError(f"the file has {has}, not {level}", code="no-level")
        for number, codec in enumerate(codecs):
            self._loaded[number] = codec.at_level(min(level, codec.quality_levels - 1))

    def bound(self, number: int, block: Block) -> int:
        """``Codec.bound`` of a frame that is not trusted. Raises ``CorruptError`` if its codec makes no such block."""
        codec = self[number]
        try:
            if list(codec.groups(block.planes)) == [block.planes] and all(map(codec.supports, block.planes)):
                return codec.bound(block)
            problem = "it makes no such block"
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, UsageError) as error:
            problem = str(error)
        raise CorruptError(
            f"{block.planes[0]}, tokens {block.start}:{block.stop} does not fit codec {codec.name!r}: {problem}",
            code="codec-block",
        )


class StoredCache:
    """What a reader's header says, checked: ``cache_map``, ``files`` and ``tensors`` of the source, ``codecs``.

    ``check_end`` is called when all frames of a pipe have come, and raises if what follows must not be there. Raises
    ``CorruptError`` if the header's parts contradict each other.
    """

    def __init__(self, reader: Reader | StreamReader, check_end: Callable[[], None] = lambda: None) -> None:
        self.reader = reader
        self._check_end = check_end
        self.header = reader.header
        self.codecs = StoredCodecs(reader)
        sizes = reader.header.map.get("sizes")
        if not isinstance(sizes, list) or [type(size) for size in sizes] != [int] * len(reader.header.files):
            raise CorruptError("the header's map does not tell the sizes of its files", code="layout-map")
        self.files = tuple(
            SourceFile(path, text, size) for (path, text), size in zip(reader.header.files, sizes, strict=True)
        )
        tensors, self.metadata = tensors_of(self.files)
        self.cache_map = CacheMap.from_json(reader.header.map, tensors)
        if self.cache_map.planes != reader.header.planes:
            raise CorruptError("the header's planes are not those of its map", code="layout-map")

    @property
    def file(self) -> Reader:
        """The reader, if it can read at random. Raises ``UsageError`` for a pipe."""
        if isinstance(self.reader, Reader):
            return self.reader
        raise UsageError(f"{self.reader.name} is a pipe: save it to a file to read parts of it", code="pipe")

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(tensor_map.tensor for tensor_map in self.cache_map.maps)

    def select(self, layers: range | None = None, tokens: range | None = None) -> Restriction:
        """All of the cache, under its own headers, or a part of it. Raises ``UsageError`` for a part that is empty."""
        if layers is not None or tokens is not None:
            return restrict(self.cache_map, self.files, layers, tokens)
        origins = tuple(Origin(plane, 0, plane.tokens) for plane in self.cache_map.planes)
        return Restriction(self.files, self.tensors, self.cache_map, origins)

    def frames(self, selection: Restriction, allocate: Callable[[int], np.ndarray]) -> FileFrames | StreamFrames:
        """Access to the frames of ``selection``: at random, in memory that ``allocate`` gives, or as they come."""
        if isinstance(self.reader, StreamReader):
            return StreamFrames(self.reader, self.codecs, selection.origins, self._check_end)
        return FileFrames(self.reader, self.codecs, allocate)


class FileFrames:
    """Frames of a file, found by its index, read to memory that ``allocate`` gives: uint8, 8-byte aligned."""

    def __init__(
        self, reader: Reader, codecs: StoredCodecs, allocate: Callable[[int], np.ndarray] = frame_buffer
    ) -> None:
        self._reader = reader
        self._codecs = codecs
        self._allocate = allocate

    @cached_property
    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """The index sorted by group and token, and where each group starts in it."""
        array = self._reader.index.array
        order = np.lexsort((array["start"], array["group"]))
        return order, np.searchsorted(array["group"][order], np.arange(len(self._reader.header.groups) + 1))

    def entries(self, wants: Iterable[Want]) -> list[Entry]:
        """The frames that hold any of what is wanted, in file order."""
        order, first = self._order
        starts = self._reader.index.array["start"]
        found: set[int] = set()
        for group, start, stop in wants:
            rows = order[first[group] : first[group + 1]]
            low = np.searchsorted(starts[rows], start, side="right") - 1
            found.update(rows[low : np.searchsorted(starts[rows], stop)].tolist())
        return [self._reader.index[number] for number in sorted(found)]

    def chunks(self, wants: Iterable[Want], nbytes: int) -> Iterator[list[Frame]]:
        """The wanted frames, those of ``nbytes`` of blocks at a time, each checked."""
        for chunk in chunks(self.entries(wants), lambda entry: entry.block.nbytes, nbytes):
            # One buffer, so that one copy brings it to a device.
            runs = list(_runs(chunk))
            ends = list(accumulate(run[-1].offset + run[-1].length - run[0].offset + PADDING for run in runs))
            buffer = self._allocate(ends[-1])
            frames: list[Frame] = []
            for run, start, end in zip(runs, [0, *ends], ends, strict=False):
                frames += self._reader.read_frames(run, self._codecs.bound, buffer[start:end])
            yield frames

    def finish(self) -> None:
        """Nothing to do: the index was checked when the file was opened."""


class StreamFrames:
    """Frames of a pipe, which must come in the order of the units that want them."""

    def __init__(
        self, reader: StreamReader, codecs: StoredCodecs, origins: Sequence[Origin], check_end: Callable[[], None]
    ) -> None:
        self._frames = reader.frames(codecs.bound)
        self._check_end = check_end
        self._name = reader.name
        self._useful = {reader.header.group_of[o.plane.index]: range(o.start, o.stop) for o in origins}

    def chunks(self, wants: Iterable[Want], nbytes: int) -> Iterator[list[Frame]]:
        """The frames that hold what is wanted, some at a time, each checked; unneeded ones are passed over.

        Raises ``UnsupportedError`` when a frame of a later window comes first.
        """
        ranges: dict[int, list[range]] = {}
        for group, start, stop in wants:
            found = ranges.setdefault(group, [])
            joins = found and found[-1].stop == start
            found.append(range(found.pop().start if joins else start, stop))
        left = sum(len(tokens) for group in ranges.values() for tokens in group)
        yield from chunks(self._until(ranges, left), lambda frame: frame.entry.block.nbytes, nbytes)

    def _until(self, ranges: dict[int, list[range]], left: int) -> Iterator[Frame]:
        while left:
            frame = next(self._frames, None)
            if frame is None:
                raise CorruptError(f"{self._name} ends before all blocks have come", code="kvz-truncated")
            block, group = frame.entry.block, frame.entry.group
            held = sum(_overlap(block, tokens) for tokens in ranges.get(group, ()))
            if held != _overlap(block, self._useful.get(group, range(0))):
                raise UnsupportedError(
                    f"{self._name} comes in another order than its cache's: save it to a file, then decompress that",
                    code="stream-order",
                )
            left -= held
            if held:
                yield frame

    def finish(self) -> None:
        """Read to the end: only there a stream's index and trailer can be checked, and that nothing follows."""
        for _ in self._frames:
            pass
        self._check_end()


def _overlap(block: Block, tokens: range) -> int:
    return max(0, min(block.stop, tokens.stop) - max(block.start, tokens.start))


def _runs(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Entries that follow each other without a gap: what one read brings."""
    run: list[Entry] = []
    for entry in entries:
        if run and run[-1].offset + run[-1].length != entry.offset:
            yield run
            run = []
        run.append(entry)
    if run:
        yield run
