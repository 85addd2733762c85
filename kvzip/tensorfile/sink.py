"""Where restored tensors go: a file, a folder, a pipe or arrays, the headers written exactly as they came."""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

import numpy as np

from kvzip.errors import CorruptError, RefusedError
from kvzip.tensorfile.header import SourceFile, TensorInfo
from kvzip.tensorfile.readers import as_bytes, is_text

_FORBIDDEN = "\\:\0" if os.name == "nt" else "\0"


class Writer(Protocol):
    """Random or forward-only writing of one file."""

    seekable: bool

    def write_at(self, offset: int, buffer: memoryview) -> None: ...

    def close(self) -> None: ...


class TensorSink:
    """Writes files whose headers and sizes are known from the start.

    The headers are written at once (in a pipe: as soon as they are due). ``seekable`` tells whether :meth:`write_at`
    takes pieces in any order and from several threads; otherwise they must come in order, without gaps.
    """

    def __init__(self, files: Sequence[SourceFile], writers: Sequence[Writer]) -> None:
        self.files = tuple(files)
        self.seekable = all(writer.seekable for writer in writers)
        self._writers = tuple(writers)
        for file, writer in zip(self.files, self._writers, strict=True):
            writer.write_at(0, memoryview(file.header))

    def write_at(self, file: int, offset: int, buffer: Any) -> None:
        """Write the bytes of a C-contiguous buffer at ``offset`` of a file, counted from its first byte."""
        self._writers[file].write_at(offset, as_bytes(buffer))

    def write_runs(self, file: int, offsets: Sequence[int], nbytes: int, buffer: Any) -> None:
        """Write ``buffer`` as runs of ``nbytes`` bytes each (see ``Slab.runs``)."""
        view = as_bytes(buffer)
        for number, offset in enumerate(offsets):
            self.write_at(file, offset, view[number * nbytes : (number + 1) * nbytes])

    def close(self) -> None:
        """Flush and close; raises ``OSError`` for errors that only show now."""
        for writer in self._writers:
            writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_sink(target: str | Path | BinaryIO, files: Sequence[SourceFile]) -> TensorSink:
    """A sink for ``files``: a path (a folder where the files have paths, which is created), or a binary stream.

    A stream on a regular file is written at its position and stays open; so does a pipe. Raises ``RefusedError`` for
    a folder into a stream and ``CorruptError`` for file paths that lead out of the folder: they come from a file.
    """
    if not isinstance(target, (str, Path)):
        if len(files) != 1 or files[0].path:
            raise RefusedError(
                "the cache is a folder of files: give a folder to write, not a pipe", code="folder-to-pipe"
            )
        return TensorSink(files, [_stream_writer(target, files[0].size)])
    if len(files) == 1 and not files[0].path:
        return TensorSink(files, [_FileWriter(Path(target).open("wb", buffering=0), files[0].size)])
    folder = Path(target)
    _check_paths(files)
    writers: list[Writer] = []
    try:
        for file in files:
            path = folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            writers.append(_FileWriter(path.open("xb", buffering=0), file.size))
        return TensorSink(files, writers)
    except BaseException:
        for writer in writers:
            writer.close()
        raise


class ArraySink:
    """Collects restored tensors as numpy arrays, in ``arrays`` by label. Interface as :class:`TensorSink`."""

    seekable = True

    def __init__(self, tensors: Sequence[TensorInfo]) -> None:
        ordered = sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset, tensor.nbytes))
        self._tensors = [tensor for tensor in ordered if tensor.nbytes]
        self._places = [(tensor.file, tensor.offset) for tensor in self._tensors]
        self._bytes = {tensor.label: np.empty(tensor.nbytes, np.uint8) for tensor in ordered}
        self.arrays = {tensor.label: _shaped(self._bytes[tensor.label], tensor) for tensor in tensors}

    def write_at(self, file: int, offset: int, buffer: Any) -> None:
        """As :meth:`TensorSink.write_at`, for a piece within one tensor."""
        view = np.frombuffer(as_bytes(buffer), np.uint8)
        if view.size:
            tensor = self._tensors[bisect_right(self._places, (file, offset)) - 1]
            begin = offset - tensor.offset
            self._bytes[tensor.label][begin : begin + view.size] = view

    def write_runs(self, file: int, offsets: Sequence[int], nbytes: int, buffer: Any) -> None:
        """As :meth:`TensorSink.write_runs`."""
        view = as_bytes(buffer)
        for number, offset in enumerate(offsets):
            self.write_at(file, offset, view[number * nbytes : (number + 1) * nbytes])

    def close(self) -> None:
        """Nothing to do."""


def _shaped(data: np.ndarray, tensor: TensorInfo) -> np.ndarray:
    array = data.view(tensor.dtype)
    fits = array.size == np.prod(tensor.shape, dtype=np.int64)
    return array.reshape(tensor.shape) if fits else array  # packed 4- and 6-bit numbers stay bytes


def _check_paths(files: Sequence[SourceFile]) -> None:
    seen: set[str] = set()
    for file in files:
        path = PurePosixPath(file.path)
        parts = path.parts
        escapes = not parts or path.is_absolute() or ".." in parts or any(c in file.path for c in _FORBIDDEN)
        if escapes or str(path) != file.path or not is_text(file.path) or file.path in seen:
            raise CorruptError(f"{file.path!r} is no path to restore a file under", code="unsafe-path")
        seen.add(file.path)


class _FileWriter:
    """A regular file of known size: positioned writes, from any thread."""

    seekable = True

    def __init__(self, file: BinaryIO, size: int, base: int = 0, *, owned: bool = True) -> None:
        self._file, self._size, self._base, self._owned = file, size, base, owned
        file.truncate(base + size)

    def write_at(self, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < buffer.nbytes:
            done += _pwrite(self._file, buffer[done:], self._base + offset + done)

    def close(self) -> None:
        if self._owned:
            self._file.close()
        else:  # what the shell writes next must come after it
            self._file.seek(self._base + self._size)


if hasattr(os, "pwrite"):

    def _pwrite(file: BinaryIO, buffer: memoryview, offset: int) -> int:
        return os.pwrite(file.fileno(), buffer, offset)

else:  # Windows
    import threading

    _seek_lock = threading.Lock()

    def _pwrite(file: BinaryIO, buffer: memoryview, offset: int) -> int:
        with _seek_lock:
            file.seek(offset)
            return file.write(buffer)


class _PipeWriter:
    """A stream that only goes forward."""

    seekable = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._position = 0

    def write_at(self, offset: int, buffer: memoryview) -> None:
        if buffer.nbytes and offset != self._position:
            raise ValueError(f"a pipe is at byte {self._position}, it cannot be written at {offset}")
        done = 0
        while done < buffer.nbytes:
            done += self._stream.write(buffer[done:])
        self._position += done

    def close(self) -> None:
        self._stream.flush()


def _stream_writer(stream: BinaryIO, size: int) -> Writer:
    try:
        regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, AttributeError):
        regular = False
    if not regular or _appends(stream.fileno()):
        return _PipeWriter(stream)
    stream.flush()
    return _FileWriter(stream, size, stream.tell(), owned=False)


def _appends(descriptor: int) -> bool:
    """Whether a descriptor was opened with ``>>``: positioned writes would all go to its end."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND)
