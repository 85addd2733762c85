"""Every failure a user can meet, each with the exit code of the command line and a stable name.

A message names the file or tensor, what was expected and what was found, and how to mend it. The ``code`` never
changes once released: scripts may match on it.
"""

LONGEST = 2000
"""Characters of a message: names and shapes in a hostile file may have any length."""


class KvzipError(Exception):
    """Base of all errors that kvzip raises on purpose.

    Args:
        message: one or two sentences for a person.
        code: a stable kebab-case name of the failure for programs, such as ``"safetensors-overlap"``.
    """

    exit_code = 1
    default_code = "error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} [...] {message[-LONGEST // 2 :]}"
        super().__init__(message)
        self.code = code or self.default_code


class UsageError(KvzipError):
    """The request itself is wrong: an unknown codec, a bad option, an ambiguous layout."""

    exit_code = 2
    default_code = "usage"


class CorruptError(KvzipError):
    """The bytes contradict their own format: truncated, damaged or hostile."""

    exit_code = 3
    default_code = "corrupt"


class UnsupportedError(KvzipError):
    """The bytes are sound but need a newer kvzip, or a codec, profile or package that is not here."""

    exit_code = 4
    default_code = "unsupported"


class RefusedError(KvzipError):
    """The request would destroy or spill something: the output exists, the target is a terminal."""

    exit_code = 5
    default_code = "refused"


class PartialError(KvzipError):
    """Some of several items failed; the others are done."""

    exit_code = 6
    default_code = "partial"


class LimitError(KvzipError):
    """Out of memory, or beyond a limit that protects the machine."""

    exit_code = 7
    default_code = "limit"
