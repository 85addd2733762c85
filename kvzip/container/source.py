"""Reads at any offset, from several threads at once, of a path or a seekable stream."""

from __future__ import annotations

import io
import os
import threading
from typing import Any, BinaryIO

from kvzip.errors import CorruptError, UsageError


class Source:
    """A file of ``size`` bytes under ``name``. Streams without a file descriptor are read under a lock."""

    def __init__(self, source: str | os.PathLike[str] | BinaryIO) -> None:
        self._lock = threading.Lock()
        self._owned = isinstance(source, str | os.PathLike)
        self._closed = False
        self._file = io.FileIO(os.fspath(source)) if isinstance(source, str | os.PathLike) else source
        self.name = str(getattr(self._file, "name", "the stream"))
        if not self._file.seekable():
            self.close()
            raise UsageError(f"{self.name} cannot be read at random: save it as a file first", code="kvz-pipe")
        self.size = self._file.seek(0, io.SEEK_END)
        self._fd = self._descriptor()

    def _descriptor(self) -> int | None:
        try:
            return self._file.fileno() if hasattr(os, "preadv") else None
        except (OSError, AttributeError):
            return None

    def read_into(self, offset: int, target: Any) -> None:
        """Fill ``target`` (a writable buffer of bytes) from ``offset``. Raises CorruptError if the file ends before."""
        view = memoryview(target)
        done = 0
        while done < len(view):
            count = self._some(offset + done, view[done:])
            if not count:
                raise CorruptError(
                    f"the file ends at byte {offset + done}, {len(view) - done} bytes too early", code="kvz-truncated"
                )
            done += count

    def check_open(self) -> None:
        """Raise UsageError if the file was closed, here or by whom it belongs to.

        Its descriptor may be another file's by then.
        """
        if self._closed or getattr(self._file, "closed", False):
            raise UsageError(f"{self.name}: the cache is closed", code="closed")

    def _some(self, offset: int, view: memoryview) -> int:
        self.check_open()
        if self._fd is not None:
            return os.preadv(self._fd, [view], offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.readinto(view) or 0  # type: ignore[attr-defined]

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes. The caller has checked ``length`` against ``size``."""
        if length > self.size - offset:
            raise CorruptError(f"the file ends at byte {self.size}, before {offset + length}", code="kvz-truncated")
        data = bytearray(length)
        self.read_into(offset, data)
        return bytes(data)

    def close(self) -> None:
        """Read no more; a stream of the caller's stays open."""
        self._closed = True
        if self._owned:
            self._file.close()
