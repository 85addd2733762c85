"""What to measure: what a user names, or a ladder of presets and levels of every codec that is here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvzip.codecs import available_codecs, codec_class, get_codec
from kvzip.codecs.base import Codec
from kvzip.errors import KvzipError

ENTRY = re.compile(r"[A-Za-z][\w-]*\s*(:|$)")
"""How an entry of a list begins; any other piece between commas belongs to the entry before it."""


class Candidate(NamedTuple):
    """A codec and the name by which ``--codec`` takes it."""

    name: str
    codec: Codec


def candidates(specs: Sequence[str] | None = None, quick: bool = False) -> list[Candidate]:
    """What ``specs`` name, each one codec or several with commas between; without any, the ladder of every codec.

    Args:
        quick: of a ladder, only the codec's defaults.

    Raises ``UsageError`` for an unknown codec or option, with the nearest name.
    """
    if specs:
        return [Candidate(name, get_codec(name)) for spec in specs for name in split(spec)]
    return [rung for name in available_codecs() for rung in _ladder(name, quick)]


def split(text: str) -> list[str]:
    """``"a,b:x=1,y=2,c"`` as ``["a", "b:x=1,y=2", "c"]``."""
    entries: list[str] = []
    for piece in text.split(","):
        if not entries or ENTRY.match(piece):
            entries.append(piece)
        else:
            entries[-1] += f",{piece}"
    return entries


def _ladder(name: str, quick: bool) -> Iterator[Candidate]:
    """One codec's rungs. What cannot be built here (a package or a profile is missing) is not in the ladder."""
    try:
        if (cls := codec_class(name)).name != name:
            return  # a second name of the same codec
        rungs = cls.ladder()
        for options in rungs[:1] if quick else rungs:
            spec = f"{name}:{options}" if options else name
            yield Candidate(spec, get_codec(spec))
    except KvzipError:
        return
