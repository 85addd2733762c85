"""Reading the bytes of one file: at any offset of files and arrays, forward only of pipes."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from kvzip.errors import LimitError, UsageError

CHUNK = 1 << 20


class Reader(Protocol):
    """Random or forward-only access to the bytes of one file."""

    seekable: bool

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset`` on; returns the bytes read, fewer only at the end of the file."""

    def close(self) -> None: ...


def as_bytes(buffer: Any) -> memoryview:
    """The bytes of a C-contiguous buffer or array, of any dtype and shape, without a copy."""
    if isinstance(buffer, np.ndarray):  # numpy exports no buffer of an ml_dtypes array
        buffer = buffer.reshape(-1).view(np.uint8) if buffer.flags.c_contiguous else buffer
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(bytearray(0))


class FileReader:
    """A regular file: positioned reads, from any thread. Never mapped: a file that shrinks must be an error, no
    signal."""

    seekable = True

    def __init__(self, file: BinaryIO, base: int = 0) -> None:
        self._file, self._base = file, base
        self.size = os.fstat(file.fileno()).st_size - base

    def read_into(self, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < buffer.nbytes:
            read = _pread(self._file, buffer[done:], self._base + offset + done)
            if not read:
                break
            done += read
        return done

    def close(self) -> None:
        self._file.close()


if hasattr(os, "preadv"):

    def _pread(file: BinaryIO, buffer: memoryview, offset: int) -> int:
        return os.preadv(file.fileno(), [buffer], offset)

else:  # Windows
    import threading

    _seek_lock = threading.Lock()

    def _pread(file: BinaryIO, buffer: memoryview, offset: int) -> int:
        with _seek_lock:
            file.seek(offset)
            return file.readinto(buffer) or 0  # type: ignore[attr-defined]


class PipeReader:
    """A stream that only goes forward; bytes left out are read and dropped."""

    seekable = False

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream, self._name = stream, name
        self._position = 0

    def read_into(self, offset: int, buffer: memoryview) -> int:
        if offset < self._position:
            raise UsageError(f"{self._name} is a pipe: byte {offset} has passed already", code="pipe-backwards")
        scrap = memoryview(bytearray(min(CHUNK, offset - self._position)))
        while self._position < offset:
            if not self._fill(scrap[: offset - self._position]):
                return 0
        return self._fill(buffer)

    def _fill(self, buffer: memoryview) -> int:
        done = 0
        while done < buffer.nbytes:
            read = self._stream.readinto(buffer[done:])  # type: ignore[attr-defined]
            if not read:
                break
            done += read
        self._position += done
        return done

    def close(self) -> None:
        """The stream belongs to the caller."""


class ArrayReader:
    """Pieces of memory, read as if they lay one after the other in a file."""

    seekable = True

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = [piece for piece in pieces if piece.nbytes]
        self._starts = np.cumsum([0, *(piece.nbytes for piece in self._pieces)])
        self.size = int(self._starts[-1])

    def read_into(self, offset: int, buffer: memoryview) -> int:
        wanted = max(0, min(buffer.nbytes, self.size - offset))
        done = 0
        while done < wanted:
            number = int(np.searchsorted(self._starts, offset + done, side="right")) - 1
            begin = offset + done - int(self._starts[number])
            piece = self._pieces[number][begin : begin + wanted - done]
            buffer[done : done + piece.nbytes] = piece
            done += piece.nbytes
        return done

    def close(self) -> None:
        self._pieces = []


def is_text(path: str) -> bool:
    """Whether a path can be written as UTF-8: one with stray bytes, or from a hostile file, cannot."""
    return path == path.encode(errors="replace").decode()


def open_reader(path: Path) -> FileReader:
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:
        if error.errno in (23, 24):  # ENFILE, EMFILE
            raise LimitError(f"{path}: too many open files; raise the limit (ulimit -n)", code="open-files") from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UsageError(f"{path} is no regular file", code="not-a-file")
    return FileReader(file)


class OwnedPipe(PipeReader):
    def close(self) -> None:
        self._stream.close()
