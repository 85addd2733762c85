"""Values of codec options have the type that the constructor tells, wherever they come from: text, Python, a header."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from kvzip.codecs import BUILT_IN, codec_class, get_codec, load_codec, register_codec
from kvzip.codecs.cachegen import CacheGen
from kvzip.codecs.fp8 import Fp8
from kvzip.codecs.integers import Int8
from kvzip.codecs.kivi import Kivi
from kvzip.codecs.kvtc import KvTc
from kvzip.codecs.options import options_of
from kvzip.codecs.raw import Raw
from kvzip.errors import CorruptError, UsageError

if TYPE_CHECKING:
    from decimal import Decimal

WRONG = {
    bool: ("true or false", ["no", "yes", "off", "0", "1", "2.5", "", "null", "truee"], [0, 1, 1.0, "true", "no"]),
    int: ("a whole number", ["1.5", "4.0", "1e30", "true", "abc", "", "0x10", "1_0", "null"], [4.0, True, "4", [4]]),
    float: ("a number", ["abc", "true", "", "nan", "inf", "1_0", "1,5", "null"], [True, "1", [1.0], 1j]),
}
"""By type: what is expected, texts and values that are none."""


def typed() -> list[tuple[str, str, Any]]:
    """Codec, option and type of all options that take no text."""
    options = [(name, option) for name in BUILT_IN for option in options_of(codec_class(name)).values()]
    assert all(option.kinds for _, option in options)
    return [(name, option.name, option.kinds[0]) for name, option in options if option.kinds[0] in WRONG]


@pytest.mark.parametrize(("name", "option", "kind"), typed(), ids=lambda part: getattr(part, "__name__", part))
def test_a_value_of_another_type_is_refused(name: str, option: str, kind: type) -> None:
    """With the option, what was expected and what was found, from text and from Python; in a header it is damage."""
    expected, texts, values = WRONG[kind]
    for text in texts:
        with pytest.raises(UsageError) as error:
            get_codec(f"{name}:{option}={text}")
        assert str(error.value) == f"codec {name!r}: {option} must be {expected}, got {text!r}"
        assert error.value.code == "codec-option"
    for value in values:
        for make in (codec_class(name), lambda **options: get_codec(name, **options)):
            with pytest.raises(UsageError, match=f"{option} must be {expected}, got ") as error:
                make(**{option: value})
            assert error.value.code == "codec-option"
        with pytest.raises(CorruptError, match=f"{option} must be {expected}") as damage:
            load_codec(name, {option: value})
        assert damage.value.code == "codec-config"


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ("int8:symmetric=False", Int8(symmetric=False)),
        ("int8:symmetric=TRUE,tuned=True", Int8(tuned=True)),
        ("kivi:bits= 2,residual=+0,tuned=false", Kivi(bits=2, residual=0)),
        ("fp8:saturate=False", Fp8(saturate=False)),
        ("cachegen:k_bins=16,v-bins=0-1:32,2-:8", CacheGen(k_bins="0-:16", v_bins="0-1:32,2-:8")),
        ("kvtc:step=1,rope=none", KvTc(step=1.0, rope="none")),
        ("kvtc:step=5E-1,rope=theta=1e4", KvTc(step=0.5, rope="theta=1e4")),
        ('kvtc:rope={"kinds":[{"theta":10000.0},null]}', KvTc(rope={"kinds": [{"theta": 1e4}, None]})),
    ],
)
def test_values_are_read_as_their_type(spec: str, same: Any) -> None:
    assert get_codec(spec).config() == same.config()


def test_numbers_of_numpy_become_pythons() -> None:
    config = Kivi(bits=np.int32(2), residual=np.uint8(8), tuned=np.bool_(True)).config()
    assert [type(value) for value in config.values()] == [int, int, bool]
    assert config == {"bits": 2, "residual": 8, "tuned": True}
    assert KvTc(step=np.float32(1)).config()["step_at"] == 0


@pytest.mark.parametrize("other", ["step=1", "bits=2", "max_error=0.1"])
def test_levels_of_kvtc_exclude_what_else_tells_the_step(other: str) -> None:
    """The usual level does so, too, where it is written; where it is not, the step is that level's."""
    assert get_codec("kvtc").config() == get_codec("kvtc:level=5").config()
    for level in (5, 6):
        with pytest.raises(UsageError, match="exclude each other"):
            get_codec(f"kvtc:level={level},{other}")


def test_any_number_of_sinks_can_be_coded() -> None:
    """More than tokens can be counted: then all are exact."""
    import kvzip

    tensors = {f"layers.0.{kind}": np.random.default_rng(0).random((2, 40, 32), "f4") for kind in ("key", "value")}
    for codec in ("cachegen", "cachegen:coder=range", "cachegen:levels=2", "kvtc:rope=none", "turboquant"):
        back = kvzip.decompress(kvzip.compress(tensors, codec=codec, device="cpu", sinks=10**25), device="cpu")
        assert all((back[name] == tensors[name]).all() for name in tensors), codec


@register_codec
class Theirs(Raw):
    """A codec of somebody else: some types are known here, the others are its own business."""

    name = "test-theirs"

    def __init__(
        self, count: int | str = 1, *, path: str | os.PathLike[str] = "", table: Mapping[str, int] | None = None,
        mode: Literal["a", "b"] = "a", sizes: tuple[int, ...] = (), limit: float | None = 5, free=None, **others: Any,
    ) -> None:  # fmt: skip
        self.given = {"count": count, "path": path, "table": table, "mode": mode, "sizes": sizes, "limit": limit}
        self.given |= {"free": free, **others}


@register_codec
class Unresolved(Raw):
    """Its annotations cannot be looked up while it runs."""

    name = "test-unresolved"

    def __init__(self, *, exact: Decimal | None = None, bits: int = 8) -> None:
        self.given = {"exact": exact, "bits": bits}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("count=7", 7), ("count=all", "all"), ("count=7.5", "7.5"), ("path=12", "12"), ('table={"a":1}', {"a": 1}),
        ("mode=b", "b"), ("sizes=[1,2]", [1, 2]), ("limit=2", 2.0), ("free=true", True), ("free=x", "x"),
        ("more=3", 3), ("more=TRUE", "TRUE"),
    ],
)  # fmt: skip
def test_codecs_of_others_get_values_of_their_types(text: str, value: Any) -> None:
    found = get_codec(f"test-theirs:{text}").given[text.partition("=")[0]]  # type: ignore[attr-defined]
    assert (found, type(found)) == (value, type(value))


def test_what_others_leave_untyped_is_left_to_them() -> None:
    assert Theirs("x", sizes=(1,), limit=None, more={1}).given["more"] == {1}
    with pytest.raises(UsageError, match="count must be a whole number or text, got 1\\.5"):
        Theirs(count=1.5)
    with pytest.raises(UsageError, match="count must be a whole number or text, got 1\\.5"):
        Theirs(1.5)
    assert type(Theirs(np.int32(1)).given["count"]) is int
    with pytest.raises(TypeError, match="positional"):
        Theirs(1, "path")  # type: ignore[misc]
    with pytest.raises(UsageError, match="table must be a JSON object"):
        get_codec("test-theirs:table=[1]")
    assert get_codec("test-unresolved:exact=1.5,bits=x").given == {"exact": 1.5, "bits": "x"}  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="no option 'bit'; did you mean 'bits'"):
        Unresolved(bit=8)
