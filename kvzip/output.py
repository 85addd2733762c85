"""Where results go: a file or folder that appears complete or not at all, or a pipe that is written directly."""

from __future__ import annotations

import errno
import io
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvzip.errors import KvzipError, RefusedError

STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
"""Its names: opened by path, a redirected standard output would be written from its start again."""

NO_SPACE = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
"""Numbers of errors that writing alone meets; the system does not say of which file."""

_umask_lock = threading.Lock()


@contextmanager
def create_file(
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    sync: bool = False,
    sources: Iterable[str | os.PathLike[str]] = (),
    like: os.stat_result | None = None,
) -> Iterator[io.FileIO]:
    """Open ``target`` for unbuffered writing; on a clean exit it is there, on any error (Ctrl-C too) it never was.

    A plain file is written under a temporary name beside the target, with mode 0600, and renamed at the end; ``like``
    then gives it the permissions and modification time of its source, and ``sync`` forces it to disk first. ``"-"``,
    FIFOs and devices are written directly.

    Raises ``RefusedError`` when the target exists (unless ``force``) or is one of ``sources``.
    """
    path = Path(target)
    if str(target) in STDOUT or _is_special(path):
        yield from _direct(str(target))
        return
    path = _real(target)
    check_target(path, force=force, sources=sources)
    temporary = _temporary_name(path)
    try:
        try:
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        except OSError as error:
            raise cannot_write(path, error) from error
        with _closing(fd, path):
            yield io.FileIO(fd, "wb", closefd=False)
            _finish(fd, like)
            if sync:
                os.fsync(fd)
        _move(temporary, path, force)
        if sync:
            _sync(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def create_folder(
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    sync: bool = False,
    sources: Iterable[str | os.PathLike[str]] = (),
) -> Iterator[Path]:
    """A temporary folder beside ``target``, renamed to it on a clean exit and removed on any error.

    With ``force`` a folder in the way is moved aside first and deleted only when the new one stands; with ``sync`` all
    files have reached the disk by then.
    """
    path = _real(target)
    check_target(path, force=force, sources=sources)
    temporary = _temporary_name(path)
    old = temporary.with_suffix(".old")
    try:
        try:
            temporary.mkdir(mode=0o700)
        except OSError as error:
            raise cannot_write(path, error) from error
        try:
            yield temporary
            if sync:
                _sync(*temporary.rglob("*"), temporary)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise cannot_write(path, error) from error
            raise
        temporary.chmod(0o777 & ~_umask())
        if force and path.exists():
            path.rename(old)
        try:
            temporary.rename(path)
        except OSError as error:
            if old.exists():
                old.rename(path)
            raise cannot_write(path, error) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if sync:
        _sync(path.parent)
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)


def check_target(path: Path, *, force: bool = False, sources: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Refuse a target that exists (unless ``force``), or that is a source, under whatever name (never allowed)."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot_write(path, error) from error
    for source in sources:
        with suppress(OSError):
            if os.path.samestat(Path(source).stat(), found):
                raise RefusedError(f"{path}: is the source itself; the target needs another name", code="same-file")
    if not force:
        raise RefusedError(f"{path}: exists already", code="exists")


def _temporary_name(path: Path) -> Path:
    """A name beside ``path`` that nobody has. It is known before the file is there: a signal can come in between."""
    return path.parent / f".{path.name[:64]}.{secrets.token_hex(8)}.tmp"


def _real(target: str | os.PathLike[str]) -> Path:
    """Where a target lies: what a link leads to is replaced, not the link. An empty name is not the current folder."""
    if not os.fspath(target):
        raise cannot_write("''", FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    return Path(os.path.realpath(target))


def _is_special(path: Path) -> bool:
    """Whether the path is a FIFO or a device; what cannot be looked at is none."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _direct(target: str) -> Iterator[io.FileIO]:
    """Standard output or a special file; closed at the end so that the last write error is seen too."""
    name = "standard output" if target in STDOUT else target
    try:
        fd = os.dup(1) if target in STDOUT else os.open(target, os.O_WRONLY)
    except OSError as error:
        raise cannot_write(name, error) from error
    with _closing(fd, name):
        yield io.FileIO(fd, "wb", closefd=False)


@contextmanager
def _closing(fd: int, name: str | Path) -> Iterator[None]:
    """Close ``fd`` whatever happens; an error of that close is an error unless another one is under way.

    Lack of space is told with ``name``.
    """
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            os.close(fd)
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise cannot_write(name, error) from error
        raise
    try:
        os.close(fd)
    except OSError as error:
        raise cannot_write(name, error) from error


def _finish(fd: int, like: os.stat_result | None) -> None:
    """Give a finished file its permissions and, where it has a source file, that file's modification time."""
    if like is not None and stat.S_ISREG(like.st_mode):
        os.fchmod(fd, stat.S_IMODE(like.st_mode) & 0o777)
        os.utime(fd, ns=(like.st_atime_ns, like.st_mtime_ns))
    else:
        os.fchmod(fd, 0o666 & ~_umask())


def _move(temporary: Path, path: Path, force: bool) -> None:
    try:
        if not force:
            # A link fails where a rename would replace a file that appeared in the meantime.
            try:
                path.hardlink_to(temporary)
            except FileExistsError:
                check_target(path)
            except OSError:
                check_target(path)  # a file system without hard links
            else:
                temporary.unlink()
                return
        temporary.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def _sync(*paths: Path) -> None:
    """Force files, and the entries of folders, to disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _umask() -> int:
    with _umask_lock:  # the only way to read it is to set it
        mask = os.umask(0o077)
        os.umask(mask)
    return mask


def cannot_write(path: str | Path, error: OSError) -> KvzipError:
    """What is raised for an error of the system about a target."""
    return KvzipError(f"{path}: cannot be written: {error.strerror or error}", code="write-failed")
