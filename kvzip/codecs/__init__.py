"""The codec registry: names to classes, loaded only when asked for.

kvzip's own stand in :data:`BUILT_IN`, so that a plain checkout has them, too; another package's in its entry-point
group ``kvzip.codecs``; one that only this process has is added by :func:`register_codec`. Nothing here imports a codec
until its name is used.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from kvzip.codecs.base import Codec
from kvzip.errors import CorruptError, UnsupportedError, UsageError

__all__ = ["available_codecs", "codec_class", "get_codec", "load_codec", "options_of", "parse_spec", "register_codec"]

GROUP = "kvzip.codecs"

BUILT_IN = {
    name: EntryPoint(name, f"kvzip.codecs.{place}", GROUP)
    for name, place in (
        ("raw", "raw:Raw"),
        ("naive", "raw:Raw"),
        ("lossless", "lossless:Lossless"),
        ("fp8", "fp8:Fp8"),
        ("int8", "integers:Int8"),
        ("int4", "integers:Int4"),
        ("kivi", "kivi:Kivi"),
        ("turboquant", "turboquant:TurboQuant"),
        ("cachegen", "cachegen:CacheGen"),
        ("kvtc", "kvtc:KvTc"),
    )
}
"""kvzip's own codecs by name; no package can shadow one."""

CodecClass = TypeVar("CodecClass", bound=type[Codec])

_registered: dict[str, type[Codec]] = {}


@cache
def _installed() -> dict[str, EntryPoint]:
    """Other packages' codecs by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def register_codec(cls: CodecClass) -> CodecClass:
    """Add a codec class under its ``name`` for this process; usable as a decorator. The last of equal names wins."""
    _registered[cls.name] = cls
    return cls


def available_codecs() -> list[str]:
    """The names that :func:`get_codec` knows, sorted, without importing any codec."""
    return sorted({*_registered, *BUILT_IN, *_installed()})


def codec_class(name: str) -> type[Codec]:
    """The class registered as ``name``. Raises ``UsageError`` with the nearest name when there is none."""
    if name in _registered:
        return _registered[name]
    point = BUILT_IN.get(name) or _installed().get(name)
    if point is None:
        hint = suggest(name, available_codecs())
        raise UsageError(
            f"unknown codec {name!r}{hint}; known are {', '.join(available_codecs())} "
            "('kvzip compress --codec help' has their options)",
            code="codec-unknown",
        )
    try:
        cls: type[Codec] = point.load()
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"codec {name!r} ({point.value}) cannot be loaded: {error}; install what its package needs",
            code="codec-import",
        ) from error
    _registered[name] = cls
    return cls


def get_codec(spec: str | Codec, **options: Any) -> Codec:
    """A codec from ``"name"`` or ``"name:option=value,option=value"``, or the codec itself if it is one already.

    Values are JSON where they parse as JSON (``8``, ``true``, ``[1, 2]``), otherwise text; keyword arguments win over
    the spec's. Raises ``UsageError`` for an unknown codec or option and for values that the codec refuses.
    """
    if isinstance(spec, Codec):
        if options:
            raise UsageError(
                f"options ({', '.join(options)}) were given beside a finished {spec.name} codec; set them on the codec",
                code="codec-option",
            )
        return spec
    if not isinstance(spec, str):
        raise UsageError(f"a codec is a name such as 'kivi:bits=2', or a codec object, not {spec!r}", code="codec-spec")
    name, parsed = parse_spec(spec)
    return _build(codec_class(name), {**parsed, **options})


def options_of(cls: type[Codec]) -> list[inspect.Parameter]:
    """What a codec class takes, with its defaults."""
    # A class without an __init__ of its own shows object's (self, *args, **kwargs), which takes nothing.
    own = cls.__init__ is not object.__init__
    return list(inspect.signature(cls.__init__).parameters.values())[1:] if own else []


def load_codec(name: str, config: Mapping[str, Any]) -> Codec:
    """The codec that a file's header names. The config is untrusted.

    Raises ``UnsupportedError`` when the codec is not installed and ``CorruptError`` when it refuses the config.
    """
    try:
        cls = codec_class(name)
    except UsageError as error:
        raise UnsupportedError(
            f"the file needs the codec {name!r}, which is not installed here", code="codec-unknown"
        ) from error
    try:
        return cls.from_config(config)
    except (UsageError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptError(
            f"the header's configuration of codec {name!r} is invalid: {error}", code="codec-config"
        ) from error


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """``"name:a=1,b=x"`` as ``("name", {"a": 1, "b": "x"})``; a comma without ``option=`` after it is a value's."""
    name, _, text = spec.partition(":")
    pairs: list[tuple[str, str]] = []
    for piece in text.split(",") if text else ():
        option, equals, value = piece.partition("=")
        if equals:
            pairs.append((option.strip().replace("-", "_"), value))
        elif pairs:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{piece}")
        else:
            raise UsageError(f"codec {spec!r}: expected option=value, found {piece!r}", code="codec-spec")
    return name.strip(), {option: _value(value) for option, value in pairs}


def suggest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _build(cls: type[Codec], options: Mapping[str, Any]) -> Codec:
    parameters = options_of(cls)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in parameters]
        for option in options:
            if option not in known:
                takes = f"it takes {', '.join(known)}" if known else "it takes none"
                raise UsageError(
                    f"codec {cls.name!r} has no option {option!r}{suggest(option, known)}; {takes}", code="codec-option"
                )
    try:
        return cls(**options)
    except UsageError as error:
        error.code = "codec-option" if error.code == UsageError.default_code else error.code
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(f"codec {cls.name!r}: {error}", code="codec-option") from error
