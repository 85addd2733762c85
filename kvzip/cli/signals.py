"""What a signal does: whenever it comes, the run ends with a message and its exit code, and nothing is left behind.

Until :func:`heed` has run, Ctrl-C shows a traceback: what is imported up to there, Python has loaded by itself. That is
why ``signal`` is not; it would load a dozen others.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # built into Python
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType

NAMES = {getattr(_signal, name): name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(_signal, name)}

AGAIN = 0.01
"""Seconds after which a signal that came at a bad moment is looked at again."""


class Stopped(BaseException):
    """A signal asks the process to end. No ``Exception``: nothing on the way shall take it for an error to handle."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


body: CodeType | None = None
"""The function in which a signal raises :class:`Stopped`, as there may be something to clean up; without one it ends
the process at once. Set without a call, so that no signal comes between.
"""

received: list[int] = []
"""The signals that have come, until they end the process."""


def heed() -> None:
    """From now on."""
    for number in NAMES:
        # What the parent ignores stays ignored: nohup, background jobs.
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, _received)


def _received(number: int, frame: FrameType | None) -> None:
    received.append(number)
    _end(frame)


def _end(frame: FrameType | None) -> None:
    number = received[0]
    if body is None:
        try:
            os.write(2, f"kvzip: stopped by {NAMES[number]}\n".encode())
        finally:  # if standard error is gone, the exit code remains
            os._exit(128 + number)
    if _is_lost(frame) and hasattr(_signal, "setitimer"):
        # Only from here on is the alarm ours: who starts us may have set one, to end us.
        _signal.signal(_signal.SIGALRM, lambda _, frame: _end(frame))
        _signal.setitimer(_signal.ITIMER_REAL, AGAIN)
    else:
        raise Stopped(number)


def _is_lost(frame: FrameType | None) -> bool:
    """Whether what is raised here would be printed and forgotten: so do the imports of numpy and its like, in C, and
    Python with what finalizers raise.
    """
    while frame is not None and frame.f_code is not body:
        if frame.f_code.co_filename.startswith("<frozen importlib") or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
