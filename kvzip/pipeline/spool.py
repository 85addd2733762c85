"""Temporary files for what can neither be read nor written front to back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from kvzip.errors import LimitError
from kvzip.output import NO_SPACE
from kvzip.tensorfile import TensorSink, TensorSource, open_sink, open_tensors

PIECE = 4 << 20
OUT_OF_ORDER = "the planes are not coded in the order of their tensors"


@contextmanager
def spooled_source(
    source: TensorSource, notice: Callable[[str], None], reason: str = OUT_OF_ORDER
) -> Iterator[TensorSource]:
    """A copy of ``source`` in the temporary folder, which can be read at random."""
    with _spool(f"{source.name} is a pipe, but {reason}", sum(file.size for file in source.files), notice) as file:
        with _enough_room():
            _fill(source, file)
        with open_tensors(file) as copy:
            copy.name = source.name
            yield copy


@contextmanager
def spooled_sink(sink: TensorSink, notice: Callable[[str], None]) -> Iterator[TensorSink]:
    """A temporary file that can be written at random, and is copied to ``sink`` on a clean exit."""
    (target,) = sink.files
    with _spool(f"the output is a pipe, but {OUT_OF_ORDER}", target.size, notice) as file:
        with _enough_room():
            yield open_sink(file, sink.files)
        file.seek(position := len(target.header))
        while piece := file.read(PIECE):
            sink.write_at(0, position, piece)
            position += len(piece)


@contextmanager
def _spool(why: str, size: int, notice: Callable[[str], None]) -> Iterator[BinaryIO]:
    folder = tempfile.gettempdir()
    notice(f"{why}: {size} bytes go through a temporary file in {folder} (TMPDIR)")
    stats = os.statvfs(folder) if hasattr(os, "statvfs") else None
    if stats is not None and stats.f_bavail * stats.f_frsize < size:
        raise _no_room()
    with tempfile.TemporaryFile(buffering=0) as file:
        yield file


@contextmanager
def _enough_room() -> Iterator[None]:
    """Others write to the temporary folder, too."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise _no_room() from error
        raise


def _no_room() -> LimitError:
    folder = tempfile.gettempdir()
    return LimitError(
        f"the temporary folder {folder} has too little room; set TMPDIR, or use files instead of pipes",
        code="spool-space",
    )


def _fill(source: TensorSource, file: BinaryIO) -> None:
    (origin,) = source.files
    file.write(origin.header)
    buffer = memoryview(bytearray(PIECE))
    for position in range(len(origin.header), origin.size, PIECE):
        piece = buffer[: min(PIECE, origin.size - position)]
        source.read_into(0, position, piece)
        while piece:
            piece = piece[file.write(piece) :]
    source.finish()
    file.seek(0)
