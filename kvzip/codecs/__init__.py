"""The codec registry: names to classes, loaded only when asked for.

kvzip's own stand in :data:`BUILT_IN`, so that a plain checkout has them, too; another package's in its entry-point
group ``kvzip.codecs``; one that only this process has is added by :func:`register_codec`. Nothing here imports a codec
until its name is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from kvzip.codecs.base import Codec
from kvzip.codecs.options import options_of, suggest
from kvzip.errors import CorruptError, UnsupportedError, UsageError

__all__ = ["available_codecs", "codec_class", "get_codec", "load_codec", "parse_spec", "register_codec"]

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

    A value is read as the codec's constructor has it annotated; keyword arguments win over the spec's. Raises
    ``UsageError`` for an unknown codec or option, and for values of another type or that the codec refuses.
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
    name, texts = parse_spec(spec)
    cls = codec_class(name)
    given = {**options_of(cls).parse(texts), **options}
    try:
        return cls(**given)
    except UsageError as error:
        error.code = "codec-option" if error.code == UsageError.default_code else error.code
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise UsageError(f"codec {cls.name!r}: {error}", code="codec-option") from error


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


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """``"name:a=1,b=x"`` as ``("name", {"a": "1", "b": "x"})``; a comma without ``option=`` after it is a value's."""
    name, _, text = spec.partition(":")
    options: dict[str, str] = {}
    for piece in text.split(",") if text else ():
        word, equals, value = piece.partition("=")
        if equals:
            option = word.strip().replace("-", "_")
            if option in options:
                raise UsageError(f"codec {spec!r}: {option} is given twice", code="codec-spec")
            options[option] = value
        elif options:
            options[option] += f",{piece}"
        else:
            raise UsageError(f"codec {spec!r}: expected option=value, found {piece!r}", code="codec-spec")
    return name.strip(), options
