"""What options a codec takes: the annotations of its constructor tell, and here alone values are held against them.

A class checks its options itself (:class:`CodecType`), whoever makes a codec: the command line, Python, or a header.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import types
import typing
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from kvzip.errors import UsageError

INTEGER = re.compile(r"[+-]?[0-9]{1,99}")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


class Kind(NamedTuple):
    """A type of values: in words, the classes that have it, and what makes such a value the codec's."""

    what: str
    classes: type | tuple[type, ...]
    make: Callable[[Any], Any]


def same(value: Any) -> Any:
    return value


KINDS: dict[Any, Kind] = {
    bool: Kind("true or false", (bool, np.bool_), bool),
    int: Kind("a whole number", Integral, int),
    float: Kind("a number", Real, float),
    Mapping: Kind("a JSON object", Mapping, same),
    str: Kind("text", str, same),
    os.PathLike: Kind("a path", os.PathLike, same),
}
"""By the type of an annotation, in the order in which those of a union are tried."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a codec.

    Attributes:
        codec: whose it is, for messages.
        default: ``inspect.Parameter.empty`` if it must be given.
        kinds: the types of its values, keys of :data:`KINDS`; none if any value is left to the codec.
        optional: whether it may be None, too.
    """

    codec: str
    name: str
    default: Any
    kinds: tuple[Any, ...] = ()
    optional: bool = False

    def __str__(self) -> str:
        """The option with its default as a user writes it; nothing stands for what is found out or left out."""
        unknown = self.default is None or self.default is inspect.Parameter.empty
        return f"{self.name}={'' if unknown else json.dumps(self.default, default=str).strip(chr(34))}"

    def parse(self, text: str) -> Any:
        """The value that a user writes so; of an option of unknown type it is JSON where that can be, else the text."""
        if self.kinds:
            return self._first(_readings(text), text)
        try:
            return json.loads(text)
        except ValueError:
            return text

    def check(self, value: Any) -> Any:
        """A value as the codec wants it: numbers of numpy become Python's."""
        if not self.kinds or (value is None and self.optional):
            return value
        return self._first((value,), value)

    def _first(self, readings: Iterable[Any], given: Any) -> Any:
        """The first reading that has one of the types. Raises ``UsageError`` if none has."""
        for reading in readings:
            for kind in self.kinds:
                # Python counts truth values as numbers.
                if isinstance(reading, KINDS[kind].classes) and (kind is bool or not isinstance(reading, bool)):
                    return KINDS[kind].make(reading)
        expected = " or ".join(KINDS[kind].what for kind in self.kinds)
        raise UsageError(f"codec {self.codec!r}: {self.name} must be {expected}, got {given!r}", code="codec-option")


class Options(dict[str, Option]):
    """A codec's options by name.

    ``others``: whether it takes more than it names. ``placed``: how many, the first, may be given without their names.
    """

    def __init__(self, codec: str, options: Iterable[Option], others: bool = False, placed: int = 0) -> None:
        super().__init__((option.name, option) for option in options)
        self.codec, self.others, self.placed = codec, others, placed

    def find(self, name: str) -> Option:
        """Raises ``UsageError`` with the nearest name for an option that there is not."""
        if name in self:
            return self[name]
        if self.others:
            return Option(self.codec, name, None)
        takes = f"it takes {', '.join(self)}" if self else "it takes none"
        raise UsageError(
            f"codec {self.codec!r} has no option {name!r}{suggest(name, self)}; {takes}", code="codec-option"
        )

    def parse(self, texts: Mapping[str, str]) -> dict[str, Any]:
        return {name: self.find(name).parse(text) for name, text in texts.items()}

    def check(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.find(name).check(value) for name, value in values.items()}

    def check_placed(self, values: Sequence[Any]) -> list[Any]:
        """Values without names, in order. Those beyond ``placed`` are as they were: the constructor may refuse them."""
        placed = list(self.values())[: self.placed]
        return [*map(Option.check, placed, values), *values[self.placed :]]


class CodecType(ABCMeta):
    """The class of codec classes: they check their options before ``__init__`` sees them."""

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        taken = options_of(cls)
        return super().__call__(*taken.check_placed(arguments), **taken.check(options))


@cache
def options_of(cls: type) -> Options:
    """What a codec class takes."""
    init: Any = cls.__init__  # type: ignore[misc]
    name = getattr(cls, "name", cls.__name__)
    # A class without an __init__ of its own shows object's (self, *args, **kwargs), which takes nothing.
    if init is object.__init__:
        return Options(name, ())
    try:
        hints = typing.get_type_hints(init)
    except (AttributeError, NameError, SyntaxError, TypeError):  # such as what is imported for type checkers alone
        hints = {}
    _, *parameters = inspect.signature(init).parameters.values()
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    options = (_option(name, one, hints.get(one.name)) for one in named)
    others = any(one.kind is one.VAR_KEYWORD for one in parameters)
    return Options(name, options, others, placed=sum(one.kind is not one.KEYWORD_ONLY for one in named))


def suggest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _option(codec: str, parameter: inspect.Parameter, hint: Any) -> Option:
    """An option without kinds where one of its types is not known here, or there is no annotation."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    found = {typing.get_origin(part) or part for part in (typing.get_args(hint) if union else (hint,))}
    optional = types.NoneType in found or parameter.default is None
    found.discard(types.NoneType)
    kinds = tuple(kind for kind in KINDS if kind in found) if found <= KINDS.keys() else ()
    return Option(codec, parameter.name, parameter.default, kinds, optional)


def _readings(text: str) -> Iterator[Any]:
    """What a written value may mean, as a text last."""
    word = text.strip()
    if word.lower() in ("true", "false"):
        yield word.lower() == "true"
    elif INTEGER.fullmatch(word):
        yield int(word)
    elif NUMBER.fullmatch(word):
        yield float(word)
    elif word.startswith("{"):
        with suppress(ValueError):
            yield json.loads(word)
    yield text
