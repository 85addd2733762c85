"""From exceptions to what a person reads and what a script tests."""

from __future__ import annotations

import errno
import signal
from typing import NamedTuple

from kvzip.cli.signals import Stopped
from kvzip.errors import KvzipError, LimitError, UsageError
from kvzip.output import NO_SPACE, cannot_write

CLOSED_PIPE = 128 + 13
"""As if SIGPIPE had ended the run: what reads our output (``| head``) has seen enough."""

EXIT_CODES = """\
\b
Exit codes:
  0    done
  1    failed: no such file, no space, errors above --fail-above
  2    wrong usage
  3    the input is damaged
  4    the input needs a newer kvzip, or a codec or package that is not here
  5    refused: the output exists, or is a terminal
  6    some of several inputs failed
  7    out of memory, or beyond a limit
  130  Ctrl-C; 143 SIGTERM; 141 what reads the output has gone (128 + signal)"""
"""The same for every verb: shown by ``--help``."""


ADVICE = {
    "exists": "; use -f to overwrite it, or -o for another name",
    "several-members": " (--member 0, --member 1...)",
}
"""What the command line adds to a message, by its stable name: the Python API has other ways."""

WORDING = {
    "Input should be a valid integer, unable to parse string as an integer": "must be a whole number",
    "Input should be a valid number, unable to parse string as a number": "must be a number",
    "Input should be": "must be",
    "Value error, ": "",
}
"""What a person understands of Typer's messages about values."""


class Failure(NamedTuple):
    """One failure: a message, its stable name (see :mod:`kvzip.errors`) and the exit code."""

    message: str
    code: str
    exit_code: int


def explain(error: BaseException) -> Failure:
    """What to say about any exception."""
    if isinstance(error, KvzipError):
        return Failure(str(error) + ADVICE.get(error.code, ""), error.code, error.exit_code)
    if isinstance(error, Stopped):
        return Failure(f"stopped by {signal.Signals(error.number).name}", "stopped", 128 + error.number)
    if isinstance(error, KeyboardInterrupt):
        return Failure("stopped by SIGINT", "stopped", 130)
    if _is_exhaustion(error):
        return Failure(f"out of memory{f': {error}' if str(error) else ''}", "memory", LimitError.exit_code)
    if isinstance(error, OSError) and error.errno in NO_SPACE and error.filename is None:
        # Files tell their names themselves (kvzip.output): this is where answers are printed.
        return explain(cannot_write("standard output", error))
    if isinstance(error, OSError):
        return Failure(_system_message(error), "system", 1)
    if hasattr(error, "format_message"):  # Typer's own, whose class has no public name
        return Failure(_usage_message(error), "usage", UsageError.exit_code)
    name = type(error).__name__
    return Failure(f"a bug in kvzip: {name}: {error}; please report it with what KVZIP_DEBUG=1 shows", "internal", 1)


def is_closed_pipe(error: BaseException | None) -> bool:
    """Whether an error is, or stems from, a reader of our output that has gone."""
    while error is not None:
        if isinstance(error, BrokenPipeError):
            return True
        error = error.__cause__
    return False


def _is_exhaustion(error: BaseException) -> bool:
    """Whether the system has given all memory or threads that it would."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or "can't start new thread" in str(error)


def _system_message(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename or repr('')}: {reason}" if error.filename is not None else reason


def _usage_message(error: BaseException) -> str:
    context = getattr(error, "ctx", None)
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    for theirs, ours in WORDING.items():
        message = message.replace(theirs, ours)
    see = f"see '{context.command_path} --help'" if context else ""
    return f"{message} ({see})" if see and message.endswith("?") else f"{message}{see and '; '}{see}"
