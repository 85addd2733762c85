"""How far a run has come: a bar on a terminal, JSON lines for jobs, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvzip.cli.messages import Messages

BAR_AFTER = 0.5
"""Seconds before a bar appears: what is done sooner needs none, nor the time to load rich."""
JSON_EVERY = 0.2
"""Seconds between two JSON lines."""

Update = Callable[[int], None]
"""``update(n)``: n more bytes of tensors are done. May be called from any thread."""


class ProgressStyle(StrEnum):
    """The choices of ``--progress``."""

    AUTO = "auto"
    JSON = "json"
    NONE = "none"


@contextmanager
def progress(
    verb: str, name: str, style: ProgressStyle, messages: Messages, total: Callable[[], int | None]
) -> Iterator[Update]:
    """What to call while ``verb`` works on the input ``name``; ``total`` (None: unknown) is asked if somebody looks."""
    if style is ProgressStyle.JSON:
        lines = _JsonLines(verb, name, messages, total())
        yield lines.update
        lines.tell()
    elif style is ProgressStyle.AUTO and not messages.quiet and sys.stderr.isatty():
        bar = _Bar(name, total())
        try:
            yield bar.update
        finally:
            bar.close()
    else:
        yield lambda _: None


class _JsonLines:
    """A JSON line now and then, and one at the end."""

    def __init__(self, verb: str, name: str, messages: Messages, total: int | None) -> None:
        self._verb, self._name, self._messages, self._total = verb, name, messages, total
        self._done = 0
        self._start = self._last = time.monotonic()

    def update(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._last >= JSON_EVERY:
            self.tell()

    def tell(self) -> None:
        self._last = time.monotonic()
        seconds = round(self._last - self._start, 3)
        self._messages.event(
            "progress", verb=self._verb, input=self._name, done=self._done, total=self._total, seconds=seconds
        )


class _Bar:
    """A rich progress bar that appears once a run turns out to take long, and leaves no trace."""

    def __init__(self, name: str, total: int | None) -> None:
        self._name, self._total = name, total
        self._done = 0
        self._start = time.monotonic()
        self._bar: Any = None

    def update(self, count: int) -> None:
        self._done += count
        if self._bar is None:
            if time.monotonic() - self._start < BAR_AFTER:
                return
            self._open()
        self._bar.update(0, completed=self._done)

    def _open(self) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        columns = (
            TextColumn(escape(Path(self._name).name[-32:])),
            BarColumn(),
            DownloadColumn(),
            Speed(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.add_task("", total=self._total)
        self._bar.start()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
