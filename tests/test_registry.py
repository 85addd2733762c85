"""Codecs are found by name, take their options from text, and refuse what they do not know with a hint."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from kvzip import codecs
from kvzip.cache import Block, Plane
from kvzip.codecs import available_codecs, codec_class, get_codec, load_codec, parse_spec, register_codec
from kvzip.codecs.base import Batch
from kvzip.codecs.raw import Raw
from kvzip.devices.base import Device
from kvzip.errors import CorruptError, UnsupportedError, UsageError


class Host(Device):
    """A device without kernels: enough for codecs that launch none."""

    name = "host"
    xp = np

    def launch(self, kernel: str, warps: int, *arguments: Any) -> None:
        raise AssertionError("this codec launches no kernel")

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def to_device(self, array: Any) -> Any:
        return array

    def to_host(self, array: Any) -> Any:
        return array


@register_codec
class Optional(Raw):
    name = "test-optional"

    def __init__(self, bits: int = 8, scale: str = "none", fast: bool = False) -> None:
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, found {bits}")
        self.bits, self.scale, self.fast = bits, scale, fast

    def config(self) -> dict[str, Any]:
        return {"bits": self.bits, "scale": self.scale, "fast": self.fast}


def test_a_spec_gives_typed_options_and_keyword_arguments_win() -> None:
    codec = get_codec("test-optional:bits=4,scale=head,fast=true")
    assert codec.config() == {"bits": 4, "scale": "head", "fast": True}
    assert get_codec("test-optional:bits=4", bits=8).config()["bits"] == 8
    assert get_codec(codec) is codec


def test_commas_inside_a_value_stay_there() -> None:
    assert parse_spec("x:k-bins=0-9:32,10-:16,sinks=1") == ("x", {"k_bins": "0-9:32,10-:16", "sinks": "1"})
    assert parse_spec("x:a=[1,2],b=") == ("x", {"a": "[1,2]", "b": ""})


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("test-optionl", "did you mean 'test-optional'"),
        ("test-optional:bit=8", "did you mean 'bits'"),
        ("test-optional:bits=5", "4 or 8"),
        ("test-optional:bits", "option=value"),
        ("test-optional:bits=4,bits=8", "bits is given twice"),
        ("raw:level=3", "takes none"),
        ("", "unknown codec"),
    ],
)
def test_an_unknown_name_or_option_is_refused_with_a_hint(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        get_codec(spec)


def test_options_beside_a_finished_codec_are_refused() -> None:
    with pytest.raises(UsageError, match="bits"):
        get_codec(Raw(), bits=8)


def test_a_header_that_names_a_missing_codec_or_a_bad_config_says_which() -> None:
    assert load_codec("test-optional", {"bits": 4}).config()["bits"] == 4
    with pytest.raises(UnsupportedError, match="no-such"):
        load_codec("no-such", {})
    for config in ({"bits": 5}, {"unknown": 1}, {"bits": "x"}):
        with pytest.raises(CorruptError, match="test-optional"):
            load_codec("test-optional", config)


def test_the_packages_own_codecs_are_found_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain checkout has them all, under their names; no package that is installed can put itself in their place."""
    other = EntryPoint("raw", "no_such_package:Raw", codecs.GROUP)
    for installed in ({}, {"raw": other, "other": other}):
        monkeypatch.setattr(codecs, "_installed", lambda found=installed: found)
        named = {name: codec_class(name).name for name in codecs.BUILT_IN}
        assert named == {name: "raw" if name == "naive" else name for name in codecs.BUILT_IN}
    assert "other" in available_codecs()
    with pytest.raises(UnsupportedError, match="no_such_package"):
        codec_class("other")


def test_the_packages_own_codecs_are_listed_without_being_imported() -> None:
    assert {"raw", "fp8", "cachegen"} <= set(available_codecs())
    code = "import sys, kvzip.codecs as c; c.available_codecs(); print({'kvzip.codecs.raw', 'torch'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8", "float8_e4m3fn"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
@pytest.mark.parametrize("shape", [(5, 3, 4), (1, 1, 1), (0, 2, 8), (7, 2, 3)])
def test_raw_gives_every_bit_back_whatever_the_memory_order(
    dtype: str, order: tuple[int, int, int], shape: tuple[int, int, int]
) -> None:
    """A format depends on geometry, never on memory order: the section is the same for both."""
    rng = np.random.default_rng(0)
    plane = Plane(0, 0, "key", *shape, dtype)
    data = rng.integers(0, 256, plane.nbytes, dtype=np.uint8).view(dtype).reshape(shape)
    strided = np.ascontiguousarray(data.transpose(order)).transpose(order)
    block = Block((plane,), 0, shape[0])
    (encoded,) = Raw().encode(Batch([block], [strided]), Host())
    assert bytes(encoded.sections["DATA"]) == data.tobytes()
    assert encoded.sections["DATA"].size <= Raw().bound(block)

    back = np.zeros([shape[axis] for axis in order], dtype).transpose(order)
    Raw().decode(Batch([block], [back]), [encoded.sections], Host())
    assert back.tobytes() == data.tobytes()


def test_raw_joins_the_planes_of_a_group() -> None:
    planes = tuple(Plane(i, i, "key", 4, 2, 3, "float16") for i in range(3))
    arrays = [np.arange(24, dtype=np.float16).reshape(4, 2, 3) + 100 * i for i in range(3)]
    block = Block(planes, 0, 4)
    (encoded,) = Raw().encode(Batch([block], arrays), Host())
    back = [np.zeros_like(array) for array in arrays]
    Raw().decode(Batch([block], back), [encoded.sections], Host())
    np.testing.assert_array_equal(back, arrays)


@pytest.mark.parametrize("sections", [{}, {"DATA": np.zeros(3, np.uint8)}, {"DATA": np.zeros(49, np.uint8)}])
def test_raw_refuses_any_other_length(sections: dict[str, Any]) -> None:
    plane = Plane(0, 3, "value", 4, 2, 3, "float16")
    with pytest.raises(CorruptError, match="layer 3 value"):
        Raw().decode(Batch([Block((plane,), 0, 4)], [np.zeros((4, 2, 3), np.float16)]), [sections], Host())
