"""Everything that is said on standard error: lines for people, or JSON lines for jobs."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any, ClassVar

from kvzip.cli.failures import Failure
from kvzip.cli.text import plain


class Messages:
    """The voice of one run.

    Args:
        quiet: only errors.
        verbose: details too.
        as_json: one JSON object per line, each with an ``event``: ``progress``, ``notice``, ``result`` or ``error``.

    Attributes:
        input: the input that is worked on, if it is one; JSON lines of errors name it.
    """

    current: ClassVar[Messages]
    input: str | None = None

    def __init__(self, quiet: bool = False, verbose: int = 0, as_json: bool = False) -> None:
        self.quiet = quiet
        self.verbose = 0 if quiet else verbose
        self.as_json = as_json
        Messages.current = self

    @classmethod
    def reset(cls) -> Messages:
        """What speaks until the options are known."""
        return cls()

    def error(self, failure: Failure) -> None:
        """What failed, and why."""
        which = {} if self.input is None else {"input": self.input}
        self._put("error", failure.message, **which, code=failure.code, exit_code=failure.exit_code)

    def notice(self, text: str) -> None:
        """What a user should know though nothing failed."""
        if not self.quiet:
            self._put("notice", text)

    def detail(self, text: str) -> None:
        """What only ``-v`` shows."""
        if self.verbose:
            self._put("notice", text)

    def result(self, text: str, **fields: Any) -> None:
        """What was done: a line of text, or the fields as JSON."""
        if self.as_json:
            self.event("result", **fields)
        elif not self.quiet:
            self._write(plain(text))

    def answer(self, text: str, **fields: Any) -> None:
        """What was asked for: text on standard output, or the fields as JSON beside the other events."""
        if self.as_json:
            self.event("result", **fields)
        else:
            print(plain(text))

    def event(self, event: str, **fields: Any) -> None:
        """One JSON line."""
        self._write(json.dumps({"event": event, **fields}))

    def _put(self, event: str, text: str, **fields: Any) -> None:
        if self.as_json:
            self.event(event, message=text, **fields)
        else:
            self._write(f"kvzip: {plain(text)}" if event == "error" else f"kvzip: note: {plain(text)}")

    @staticmethod
    def _write(line: str) -> None:
        # If standard error is gone, the exit code remains.
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
