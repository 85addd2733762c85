"""One or many inputs, each with its own target."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvzip.cli.failures import explain, is_closed_pipe
from kvzip.cli.messages import Messages
from kvzip.errors import KvzipError, PartialError, RefusedError, UsageError
from kvzip.output import STDOUT

SUFFIX = ".kvz"


def for_each(inputs: Sequence[str], work: Callable[[str], None], done: str, messages: Messages) -> None:
    """Run ``work`` for every input, past those that fail.

    A single input raises its own error; of several, each failure is told, then ``PartialError`` counts them.
    """
    if len(inputs) == 1:
        (messages.input,) = inputs
        work(inputs[0])
        return
    failed = 0
    for name in one_by_one(inputs, messages):
        try:
            work(name)
        except (KvzipError, OSError, MemoryError) as error:
            if is_closed_pipe(error):
                raise
            failed += 1
            messages.error(explain(error))
    if failed:
        raise PartialError(f"{failed} of {len(inputs)} inputs failed, {len(inputs) - failed} {done}")


def one_by_one(inputs: Sequence[str], messages: Messages) -> Iterator[str]:
    """The inputs, each as what errors are about for its turn; afterwards they are about all, or about the only one."""
    for name in inputs:
        messages.input = name
        yield name
    if len(inputs) > 1:
        messages.input = None


def compressed_name(name: str) -> str:
    """Where the compressed form of an input goes by default. Raises ``UsageError`` for what is compressed already."""
    if name.endswith(SUFFIX):
        raise UsageError(
            f"{name}: ends in {SUFFIX} already; kvzip decompress restores it, -o compresses it all the same",
            code="has-suffix",
        )
    return "-" if name == "-" else os.path.normpath(name) + SUFFIX


def restored_name(name: str) -> str:
    """Where the restored form of an input goes by default.

    Raises ``UsageError`` when the name does not tell; ``KvzipError`` or ``OSError`` when there is no ``.kvz`` either.
    """
    if name == "-":
        return "-"
    stem = name.removesuffix(SUFFIX)
    if stem == name or Path(stem).name in ("", SUFFIX):
        _check_kvz(name)
        raise UsageError(f"{name}: does not end in {SUFFIX}, so the target must be named with -o", code="no-suffix")
    return stem


def _check_kvz(name: str) -> None:
    """Raise what decompressing would, if the first bytes of a file say that it is no ``.kvz``."""
    from kvzip.container import format as fmt

    if Path(name).is_file() or not Path(name).exists():
        with Path(name).open("rb") as file, fmt.naming(name):
            start = file.read(fmt.PROLOGUE.size)
            fmt.check_kind(start)
            fmt.check_prologue(start)


def check_targets(
    inputs: Sequence[str], output: str | None, stdout: bool, *, force: bool, keep: bool, remove: bool
) -> str | None:
    """The target that the options name, or None if each input has its own.

    Raises:
        UsageError: two targets, one target for several inputs, or --rm where there is no file to go back to.
        RefusedError: the target is a terminal.
    """
    if stdout and output not in (None, "-"):
        raise UsageError(f"-c and -o {output} contradict each other", code="two-targets")
    if keep and remove:
        raise UsageError("--keep and --rm contradict each other", code="keep-and-remove")
    target = "-" if stdout else output
    if target is not None and len(inputs) > 1:
        raise UsageError(f"{len(inputs)} inputs cannot go into one output; leave out -o and -c", code="many-to-one")
    if remove and any(name == "-" or (Path(name).exists() and not Path(name).is_file()) for name in inputs):
        raise UsageError("--rm removes files only, not folders or pipes", code="rm-input")
    if remove and target is not None and not _is_plain(target):
        raise UsageError("--rm needs an output that stays: a file", code="rm-output")
    if (target == "-" or (target is None and "-" in inputs)) and sys.stdout.isatty() and not force:
        raise RefusedError(
            "standard output is a terminal: redirect it, name a file with -o, or insist with -f", code="terminal"
        )
    return target


def remove_source(name: str, before: os.stat_result, check: Callable[[], None]) -> None:
    """Remove an input whose output is on disk, once ``check`` has read that back without raising."""
    check()
    now = Path(name).stat()
    if (now.st_ino, now.st_size, now.st_mtime_ns) != (before.st_ino, before.st_size, before.st_mtime_ns):
        raise RefusedError(f"{name}: changed while it was read, so it is kept", code="source-changed")
    Path(name).unlink()


def _is_plain(target: str) -> bool:
    return target not in STDOUT and (Path(target).is_file() or not Path(target).exists())
