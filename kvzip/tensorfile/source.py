"""Where tensors come from: a file, a folder, a pipe, raw bytes or arrays in memory, all read alike."""

from __future__ import annotations

import errno
import io
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from kvzip.errors import CorruptError, UnsupportedError, UsageError
from kvzip.tensorfile.header import (
    RAW_BYTES,
    TAGS,
    SourceFile,
    TensorInfo,
    check_size,
    data_size,
    header_bytes,
    no_json,
    parse_header,
    raw_tensor,
    read_length,
)
from kvzip.tensorfile.readers import (
    CHUNK,
    ArrayReader,
    FileReader,
    OwnedPipe,
    PipeReader,
    Reader,
    as_bytes,
    is_text,
    open_reader,
)


class TensorSource:
    """Tensors of one or several files, and their bytes.

    Attributes:
        files: the files, each with its exact header bytes.
        tensors: all tensors in (file, offset) order.
        metadata: ``__metadata__``; in a folder that of all files together, where the first to name a key wins.
        seekable: whether bytes can be read in any order, and by several threads at once.
        name: what messages call the source.
        closed: whether it can no longer be read.
        allocate: makes the buffers that :meth:`read_runs` fills, if they cannot be any host memory.
    """

    allocate: Callable[[int], Any] | None = None

    def __init__(
        self,
        name: str,
        files: Sequence[SourceFile],
        tensors: Sequence[TensorInfo],
        metadata: Mapping[str, str],
        readers: Sequence[Reader],
    ) -> None:
        self.name = name
        self.files = tuple(files)
        self.tensors = tuple(tensors)
        self.metadata = dict(metadata)
        self.seekable = all(reader.seekable for reader in readers)
        self._readers = tuple(readers)
        self.closed = False

    def read_into(self, file: int, offset: int, buffer: Any) -> None:
        """Fill a writable, C-contiguous buffer with the bytes of a file from ``offset`` (of the file's first byte) on.

        A pipe only goes forward. Raises ``CorruptError`` if the file ends too early: a file may shrink while it is
        read.
        """
        view = as_bytes(buffer)
        read = self._readers[file].read_into(offset, view)
        if read != view.nbytes:
            raise CorruptError(
                f"{self.file_name(file)} ends at byte {offset + read}, in the middle of its data: expected "
                f"{self.files[file].size} bytes",
                code="source-truncated",
            )

    def read_runs(self, file: int, offsets: Sequence[int], nbytes: int, buffer: Any) -> None:
        """Fill ``buffer`` with runs of ``nbytes`` bytes each, one after the other (see ``Slab.runs``)."""
        view = as_bytes(buffer)
        for number, offset in enumerate(offsets):
            self.read_into(file, offset, view[number * nbytes : (number + 1) * nbytes])

    def finish(self) -> None:
        """Check that a pipe ends where its header says. Files were checked when they were opened."""
        if self.seekable:
            return
        for number, file in enumerate(self.files):
            if self._readers[number].read_into(file.size, memoryview(bytearray(1))):
                raise CorruptError(
                    f"{self.file_name(number)} goes on after the {file.size} bytes that its header declares",
                    code="safetensors-trailing-bytes",
                )

    def file_name(self, file: int) -> str:
        """What messages call a file."""
        path = self.files[file].path
        return f"{self.name}/{path}" if path else self.name

    def close(self) -> None:
        self.closed = True
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_tensors(source: str | Path | BinaryIO) -> TensorSource:
    """Open a safetensors file, a folder with everything in it, a binary stream, or standard input (``"-"``).

    In a folder, files that are safetensors by content are opened as such, whatever their suffix; any other file
    counts as one tensor of raw bytes. Symbolic links to files are read, those to folders are not followed. Raises
    ``CorruptError`` naming the file, ``UsageError`` for what cannot be a source or is a file of another kind, and lets
    ``OSError`` through.
    """
    if isinstance(source, str) and source == "-":
        return _open_stream(sys.stdin.buffer, "standard input")
    if isinstance(source, (str, Path)):
        if source == "":  # no file's name; to Path the current folder's
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        path = Path(source)
        return _open_folder(path) if path.is_dir() else _open_file(path)
    return _open_stream(source, str(getattr(source, "name", "stream")))


def open_raw(path: str | Path, shape: Sequence[int], dtype: str) -> TensorSource:
    """Open a file of raw bytes (LMCache ``.data``, SGLang ``.bin``) as one tensor ``kv`` of ``shape`` and numpy
    ``dtype``.

    Raises ``UsageError`` if the file's size is another.
    """
    if dtype not in TAGS:
        raise UsageError(f"unknown dtype {dtype!r}; known are {', '.join(sorted(TAGS))}", code="unknown-dtype")
    path = Path(path)
    reader = open_reader(path)
    size = reader.size
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if size != expected:
        reader.close()
        raise UsageError(f"{path} has {size} bytes, but {dtype} {list(shape)} needs {expected}", code="raw-size")
    tensor = TensorInfo("kv", TAGS[dtype], dtype, tuple(shape), 0, size)
    return TensorSource(str(path), [SourceFile("", b"", size)], [tensor], {}, [reader])


def from_arrays(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> TensorSource:
    """A source of numpy arrays, under the header that the safetensors library would write for them.

    Arrays that are not C-contiguous are copied; the others are read in place. Raises ``UnsupportedError`` for a dtype
    that the format lacks.
    """
    header = arrays_header({name: (array.dtype.name, array.shape) for name, array in arrays.items()}, metadata or {})
    tensors, found = parse_header(header, "arrays")
    whole = (np.ascontiguousarray(arrays[tensor.name]) for tensor in tensors)
    reader = ArrayReader([as_bytes(header), *(as_bytes(array) for array in whole)])
    return TensorSource("arrays", [SourceFile("", header, reader.size)], tensors, found, [reader])


def arrays_header(arrays: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The header that the safetensors library would write for arrays of these dtypes (numpy's names) and shapes."""
    for name, (dtype, _) in arrays.items():
        if dtype not in TAGS:
            raise UnsupportedError(f"tensor {name!r}: safetensors has no dtype {dtype}", code="safetensors-dtype")
    # The library's order: wide dtypes first, so that every tensor is aligned, then by name.
    infos = [
        TensorInfo(name, TAGS[dtype], dtype, shape, 0, math.prod(shape) * np.dtype(dtype).itemsize)
        for name, (dtype, shape) in sorted(arrays.items(), key=lambda item: (-list(TAGS).index(item[1][0]), item[0]))
    ]
    return header_bytes(infos, metadata)


def _open_file(path: Path) -> TensorSource:
    if path.exists() and not path.is_file():  # a FIFO or a device
        return _open_stream(path.open("rb", buffering=0), str(path), owned=True)
    reader = open_reader(path)
    try:
        return _single(str(path), reader, reader.size)
    except BaseException:
        reader.close()
        raise


def _open_stream(stream: BinaryIO, name: str, *, owned: bool = False) -> TensorSource:
    try:
        regular = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, AttributeError, io.UnsupportedOperation):
        regular = False
    if regular:  # `kvzip ... < file`: as good as a file, from where its position stands
        base = stream.tell()
        reader = FileReader(os.fdopen(os.dup(stream.fileno()), "rb", buffering=0), base)
        return _single(name, reader, reader.size)
    return _single(name, OwnedPipe(stream, name) if owned else PipeReader(stream, name), None)


def _single(name: str, reader: Reader, size: int | None) -> TensorSource:
    header = _read_header(reader, name, size)
    tensors, metadata = parse_header(header, name)
    declared = len(header) + data_size(tensors)
    if size is not None:
        check_size(name, len(header), tensors, size)
    return TensorSource(name, [SourceFile("", header, declared)], tensors, metadata, [reader])


def _read_header(reader: Reader, name: str, size: int | None) -> bytes:
    prefix = bytearray(8)
    read = reader.read_into(0, memoryview(prefix))
    length = read_length(bytes(prefix[:read]), name)
    if size is not None and 8 + length > size:
        raise CorruptError(
            f"{name} is truncated, or no safetensors file: it declares a header of {length} bytes, the file has {size}"
            f"{RAW_BYTES}",
            code="safetensors-truncated",
        )
    header = prefix
    while len(header) < 8 + length:  # by pieces: a pipe's declared length is not to be trusted with memory
        piece = bytearray(min(CHUNK, 8 + length - len(header)))
        read = reader.read_into(len(header), memoryview(piece))
        header += piece[:read]
        if read < len(piece):
            break
        if len(header) > 8 and header[8:9] != b"{":
            break
    if len(header) < 8 + length and header[8:9] != b"{":
        raise no_json(name)
    return bytes(header)


def _natural(path: str) -> list[tuple[int, str] | tuple[int, int]]:
    """A key that sorts ``layers.2`` before ``layers.10``."""
    return [(1, int(part)) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path)]


def _open_folder(folder: Path) -> TensorSource:
    files: list[SourceFile] = []
    tensors: list[TensorInfo] = []
    metadata: dict[str, str] = {}
    readers: list[FileReader] = []
    try:
        for path in _walk(folder):
            reader = open_reader(folder / path)
            readers.append(reader)
            header, found, its_metadata = _open_member(folder, path, reader, len(files))
            files.append(SourceFile(path, header, reader.size))
            tensors += found
            metadata = {**its_metadata, **metadata}
    except BaseException:
        for reader in readers:
            reader.close()
        raise
    return TensorSource(str(folder), files, tensors, metadata, readers)


def _walk(folder: Path) -> list[str]:
    paths = [
        (Path(root) / name).relative_to(folder).as_posix()
        for root, _, names in os.walk(folder, onerror=_raise)
        for name in names
    ]
    if not paths:
        raise UsageError(f"{folder} holds no files", code="empty-folder")
    for path in paths:
        if not is_text(path):
            raise UsageError(f"{folder}: the file name {path!r} is not UTF-8", code="file-name")
    return sorted(paths, key=lambda path: (_natural(path), path))


def _raise(error: OSError) -> None:
    raise error


def _open_member(
    folder: Path, path: str, reader: FileReader, index: int
) -> tuple[bytes, list[TensorInfo], dict[str, str]]:
    name = str(folder / path)
    start = bytearray(9)
    reader.read_into(0, memoryview(start))
    length = int.from_bytes(start[:8], "little")
    is_safetensors = start[8:] == b"{" and 8 + length <= reader.size
    if not is_safetensors and not path.endswith(".safetensors"):
        return b"", [raw_tensor(path, reader.size, file=index)], {}
    try:
        header = _read_header(reader, name, reader.size)
        tensors, metadata = parse_header(header, name, file=index, path=path)
        check_size(name, len(header), tensors, reader.size)
    except CorruptError:
        if path.endswith(".safetensors"):
            raise
        return b"", [raw_tensor(path, reader.size, file=index)], {}
    return header, tensors, metadata
