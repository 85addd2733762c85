"""What a caller may name as a source or a target, opened: paths, ``"-"``, streams, bytes, dictionaries of tensors."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from kvzip.container import Reader, Source, find_members, read_members
from kvzip.container.format import naming
from kvzip.devices.base import Device
from kvzip.errors import UsageError
from kvzip.gpu_border import GpuSource, is_on_gpu
from kvzip.output import STDOUT, create_file, create_folder
from kvzip.pipeline import StoredCache
from kvzip.tensorfile import SourceFile, TensorSink, TensorSource, from_arrays, open_sink, open_tensors
from kvzip.torch_border import is_torch, to_numpy

PathLike = str | os.PathLike[str]
Tensors = Mapping[str, Any]


@contextmanager
def open_stored(source: PathLike | BinaryIO | bytes, member: int | None = None) -> Iterator[StoredCache]:
    """A ``.kvz`` ready to be decoded: at random from files and bytes, front to back from pipes (``"-"`` too).

    ``member`` tells which of several concatenated caches is meant; without it there must be one. Raises ``UsageError``
    if there are more, or fewer.
    """
    source = _readable(source, "a path, a binary stream or bytes")
    if isinstance(source, (str, os.PathLike)) and str(source) != "-":
        if Path(source).is_fifo():
            with Path(source).open("rb") as fifo:
                yield from _stream_member(fifo, str(source), member)
        else:
            with open_reader(source, member) as reader:
                yield StoredCache(reader)
        return
    stream = sys.stdin.buffer if isinstance(source, (str, os.PathLike)) else source
    if stream.seekable():
        yield StoredCache(open_reader(stream, member))
    else:
        yield from _stream_member(stream, "standard input" if stream is sys.stdin.buffer else None, member)


def open_reader(source: PathLike | BinaryIO | bytes, member: int | None = None) -> Reader:
    """A random reader of one member of a path, a seekable stream or bytes; see :func:`open_stored`."""
    _check_number(member)
    opened = Source(_readable(source, "a path, a binary stream or bytes"))
    try:
        with naming(opened.name):
            spans = find_members(opened, member)
            _check_members(opened.name, len(spans), member)
            return Reader(opened, spans, member or 0)
    except BaseException:
        opened.close()
        raise


def _stream_member(stream: BinaryIO, name: str | None, member: int | None) -> Iterator[StoredCache]:
    _check_number(member)
    members = read_members(stream, name)
    for number, reader in enumerate(members):

        def check_end(name: str = reader.name) -> None:
            if member is None and next(members, None) is not None:
                _check_members(name, 2, member)

        if number == (member or 0):
            yield StoredCache(reader, check_end)
            return
    _check_members(reader.name, number + 1, member)


def _check_number(member: int | None) -> None:
    """Refuse what is the number of no member, whatever the file holds."""
    if member is not None and member < 0:
        raise UsageError(f"there is no member {member}: they are counted from 0", code="no-member")


def _check_members(name: str, found: int, member: int | None) -> None:
    if member is None and found > 1:
        raise UsageError(
            f"{name} holds {found} caches or more, one after the other: say which member is meant, counted from 0",
            code="several-members",
        )
    if member is not None and member >= found:
        raise UsageError(
            f"{name} holds {found} cache{'s' * (found != 1)}, there is no member {member}", code="no-member"
        )


@contextmanager
def open_restored(
    target: PathLike | BinaryIO,
    files: Sequence[SourceFile],
    *,
    source: Any = None,
    force: bool = False,
    sync: bool = False,
) -> Iterator[TensorSink]:
    """A sink for ``files``: a path is written as :mod:`kvzip.output` says, as a folder where the files have paths."""
    if not isinstance(target, (str, os.PathLike)):
        _check_stream(target, "target", "write")
        place: Any = nullcontext(target)
    elif any(file.path for file in files) and str(target) not in STDOUT:
        place = create_folder(target, force=force, sync=sync, sources=_paths(source))
    else:
        place = open_target(target, source, force=force, sync=sync)
    with place as where, open_sink(where, files) as sink:
        yield sink


@contextmanager
def open_source(
    source: PathLike | BinaryIO | bytes | TensorSource | Tensors, device: Device | None = None
) -> Iterator[TensorSource]:
    """Tensors to compress, from wherever a caller has them; those on a GPU stay there if ``device`` is one."""
    if isinstance(source, TensorSource):
        _check_not_closed(source, "source")
        yield source
    elif isinstance(source, Mapping):
        stay = device is not None and device.xp is not np
        tensors = {name: each if stay and is_on_gpu(each) else _array(name, each) for name, each in source.items()}
        if device is not None and any(map(is_on_gpu, tensors.values())):
            yield GpuSource(tensors, device)
        else:
            yield from_arrays(tensors)
    else:
        readable = _readable(source, "a path, a binary stream, bytes or tensors by name")
        with open_tensors(Path(readable) if isinstance(readable, os.PathLike) else readable) as opened:
            yield opened


@contextmanager
def open_target(target: PathLike | BinaryIO | None, source: Any, *, force: bool, sync: bool) -> Iterator[BinaryIO]:
    """Where a ``.kvz`` goes: a path as :mod:`kvzip.output` says, a stream that stays open, or memory (None)."""
    if target is None:
        yield io.BytesIO()
    elif isinstance(target, (str, os.PathLike)):
        paths = _paths(source)
        like = Path(paths[0]).stat() if paths else None
        with create_file(target, force=force, sync=sync, sources=paths, like=like) as stream:
            yield cast(BinaryIO, stream)
    else:
        _check_stream(target, "target", "write")
        yield target


def _readable(source: Any, kinds: str) -> PathLike | BinaryIO:
    """A path, or a binary stream, also of bytes. Raises ``UsageError``, naming ``kinds``, for what is neither."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return io.BytesIO(source)
    if not isinstance(source, (str, os.PathLike)):
        _check_stream(source, "source", "readinto", kinds)
    return cast(PathLike | BinaryIO, source)


def _check_stream(stream: Any, what: str, method: str, kinds: str = "a path or a binary stream") -> None:
    """Raise ``UsageError`` for what is no open stream of bytes."""
    if isinstance(stream, io.TextIOBase) or not hasattr(stream, method):
        raise UsageError(f"the {what} must be {kinds}, got {type(stream).__name__}", code="bad-argument")
    _check_not_closed(stream, what)


def _check_not_closed(given: Any, what: str) -> None:
    if getattr(given, "closed", False):
        raise UsageError(f"the {what} is closed: {getattr(given, 'name', given)}", code="closed")


def _array(name: Any, tensor: Any) -> np.ndarray:
    """A tensor on the host, in this machine's byte order. Raises ``UsageError`` for what is none, or has no name."""
    if not isinstance(name, str):
        raise UsageError(f"tensors have names that are texts, not {name!r}", code="bad-argument")
    if is_on_gpu(tensor) and not is_torch(tensor):
        raise UsageError(f"{name!r} is on a GPU, the device is the CPU: bring it to the host", code="bad-argument")
    try:
        array = to_numpy(tensor) if is_torch(tensor) else np.asarray(tensor)
    except ValueError as error:
        raise UsageError(f"{name!r} is no tensor: {error}", code="bad-argument") from error
    if array.dtype.kind in "OSU":
        raise UsageError(f"{name!r} is no tensor of numbers: its dtype is {array.dtype}", code="bad-argument")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _paths(source: Any) -> list[PathLike]:
    """The source's path, if it has one, for the same-file check and for mode and time."""
    if isinstance(source, TensorSource) and source.files and not source.files[0].header and Path(source.name).is_file():
        return [source.name]  # a file of raw bytes
    return [source] if isinstance(source, (str, os.PathLike)) and str(source) != "-" else []
