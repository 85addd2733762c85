"""The command line: one module per verb, and here the one place where a run ends.

Whatever happens, it ends with a message on standard error and a documented exit code, never with a traceback; with
``KVZIP_DEBUG=1`` errors are raised instead.
"""

from __future__ import annotations

import os
import sys

from kvzip.cli import signals

TYPE_CHECKING = False  # typing itself takes its time, in which a signal would show a traceback
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["main", "run"]


def main() -> NoReturn:
    """Run the command line of this process and exit."""
    signals.heed()
    _open_closed_streams()
    sys.stdin.buffer.raw.name = "standard input"  # type: ignore[union-attr]  # for messages, in place of <stdin>
    code = run(sys.argv[1:])
    _leave_quietly()
    # Not by Python's own way out: that takes 50 ms to free all objects one by one, and aborts if a reader that still
    # waits for a pipe holds its lock. Whatever had to be closed has been, by the block that opened it.
    os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run the command line ``arguments`` and return the exit code."""
    from kvzip.cli.failures import CLOSED_PIPE, explain, is_closed_pipe
    from kvzip.cli.messages import Messages

    Messages.reset()
    try:
        _invoke(arguments)
        sys.stdout.flush()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BaseException as error:
        if is_closed_pipe(error):
            return CLOSED_PIPE
        if os.environ.get("KVZIP_DEBUG", "0") not in ("", "0") and not isinstance(error, signals.Stopped):
            raise
        # A signal may come out as another error: what an import is stopped by, some take for its own failure.
        failure = explain(signals.Stopped(signals.received[0]) if signals.received else error)
        Messages.current.error(failure)
        return failure.exit_code
    return 0


def _invoke(arguments: Sequence[str]) -> None:
    import typer

    from kvzip.cli.app import VERBS, application

    if "_KVZIP_COMPLETE" in os.environ:  # the shell asks what could come next
        application()(prog_name="kvzip")
    # Not by calling it: that has ways of its own to end on errors of the system and on signals.
    command = typer.main.get_command(application(arguments[:1] if arguments and arguments[0] in VERBS else VERBS))
    try:
        with command.make_context("kvzip", list(arguments)) as context:
            signals.body = _invoke.__code__
            command.invoke(context)
    except typer.Exit as end:
        sys.stdout.flush()
        sys.exit(end.exit_code)
    finally:
        signals.body = None


def _open_closed_streams() -> None:
    """Where a shell has closed a standard stream (``2>&-``), the next file would become it, and messages data.

    Reading finds nothing, messages are lost, and output fails as it does for other commands: it cannot be written.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their numbers
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            setattr(sys, name, os.fdopen(number, mode))


def _leave_quietly() -> None:
    """What Python still wants to flush at exit must not complain about a reader that has gone."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
