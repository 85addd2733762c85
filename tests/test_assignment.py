"""Codecs chosen apart for keys, values and layers: who gets which plane, what the header records, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvzip
from kvzip.cache import Plane
from kvzip.errors import UsageError
from kvzip.pipeline import Choice, assign
from tests.cli import cache_file
from tests.cli import kvzip as command

PLANES = [Plane(n, n // 2, ("key", "value")[n % 2], 300, 2, 32, "bfloat16") for n in range(8)]
OTHER = Plane(8, 0, "bytes", 99, 1, 1, "uint8")


def names(choice: Choice, planes: list[Plane]) -> str:
    assignment = assign(planes, choice)
    return " ".join(assignment.codec_of(plane).name for plane in planes)


def test_a_layer_goes_before_a_kind_and_a_kind_before_the_rest() -> None:
    assert names(Choice.of("fp8"), PLANES) == " ".join(["fp8"] * 8)
    assert names(Choice.of("fp8", "int8"), PLANES) == " ".join(["int8", "fp8"] * 4)
    assert names(Choice.of("fp8", "int8", "kivi:bits=2"), PLANES) == " ".join(["int8", "kivi"] * 4)
    assert names(Choice.of("fp8", "int8", None, "0-1:raw,3-:int4"), PLANES) == "raw raw raw raw int8 fp8 int4 int4"
    assert names(Choice.of("fp8", layers="2:raw,0-:int4"), PLANES) == "int4 int4 int4 int4 raw raw int4 int4"


def test_latents_get_the_codec_of_the_rest() -> None:
    latent = Plane(0, 0, "latent", 10, 1, 576, "bfloat16")
    assert names(Choice.of("fp8", "int8", "int4"), [latent]) == "fp8"


def test_options_hold_for_their_own_codec() -> None:
    choice = Choice.of("cachegen", "kivi:bits=2,residual=64", None, "0-1:kivi:bits=4,residual=32,2:fp8", level=7)
    assert choice.codec.config()["level"] == 7
    assert choice.keys is not None and choice.keys.config() == {"bits": 2, "residual": 64, "tuned": False}
    assert [(first, last, codec.name) for first, last, codec in choice.layers] == [(0, 1, "kivi"), (2, 2, "fp8")]
    assert choice.layers[0][2].config() == {"bits": 4, "residual": 32, "tuned": False}


def test_equal_specs_are_one_codec_of_the_file() -> None:
    assignment = assign(PLANES, Choice.of("fp8", "int8", "int8", "0:fp8,3:fp8"))
    assert sorted(codec.name for codec in assignment.codecs) == ["fp8", "int8"]


def test_other_tensors_are_kept_without_loss() -> None:
    """By lossless; or by raw, if raw is all that was asked for."""
    for codec, expected in (("fp8", "lossless"), ("raw", "raw"), ("lossless", "lossless")):
        assignment = assign([*PLANES, OTHER], Choice.of(codec))
        assert assignment.codec_of(OTHER).name == expected
        assert len(assignment.codecs) == (2 if codec == "fp8" else 1)


def test_what_a_codec_does_not_take_is_kept_without_loss_and_said() -> None:
    told: list[str] = []
    planes = [Plane(0, 0, "key", 10, 1, 8, "float8_e4m3fn"), Plane(1, 0, "value", 10, 1, 8, "bfloat16")]
    assignment = assign(planes, Choice.of("kivi"), told.append)
    assert [assignment.codec_of(plane).name for plane in planes] == ["lossless", "kivi"]
    assert len(told) == 1 and "float8_e4m3fn" in told[0] and "without loss" in told[0]


@pytest.mark.parametrize("text", ["", "raw", "0-1", "x:raw", "3-1:raw", "0-1:raw,5", "0-1:raw,bits=2", "bits=2,0:raw"])
def test_layers_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Choice.of("fp8", layers=text)


def test_layers_that_the_cache_does_not_have_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no layer 4-, .* 0 to 3"):
        Choice.of("fp8", layers="0:raw,4-:int4").check(PLANES)


def cache(layers: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"layers.{layer}.{kind}": rng.normal(size=(2, 200, 32)).astype(np.float16)
        for layer in range(layers)
        for kind in ("key", "value")
    }


def test_the_header_records_who_coded_what() -> None:
    """A reader sees of each plane its codec and what that codec tells of it."""
    packed = kvzip.compress(cache(), codec="fp8", k_codec="int8", layer_codec="0:lossless,2:kivi:bits=2")
    with kvzip.open(packed) as opened:
        header = opened.header
    found = {
        (plane.layer, plane.kind): (header.codecs[codec]["name"], spec.get("bits"))
        for plane, codec, spec in zip(header.planes, header.plane_codec, header.specs, strict=True)
    }
    assert [found[layer, "key"] for layer in range(3)] == [("lossless", None), ("int8", 8), ("kivi", 2)]
    assert [found[layer, "value"] for layer in range(3)] == [("lossless", None), ("fp8", 8), ("kivi", 2)]


def test_each_part_has_its_own_loss() -> None:
    arrays = cache()
    back = kvzip.decompress(kvzip.compress(arrays, codec="fp8", k_codec="int8", layer_codec="0:lossless,2:kivi:bits=2"))
    error = {
        name: float(np.abs(back[name].astype(np.float64) - array.astype(np.float64)).mean())
        for name, array in arrays.items()
    }
    assert error["layers.0.key"] == error["layers.0.value"] == 0
    assert 0 < error["layers.1.key"] < error["layers.1.value"] < error["layers.2.key"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = cache_file(tmp_path / "kv.safetensors")
    assert command("compress", source, "--codec", "fp8", "--k-codec", "int8", "--layer-codec", "1-:lossless") == 0
    assert "fp8, keys int8, layers 1-:lossless" in capsys.readouterr().err
    with kvzip.open(tmp_path / "kv.safetensors.kvz") as opened:
        assert sorted(codec["name"] for codec in opened.header.codecs) == ["fp8", "int8", "lossless"]
    assert command("compress", source, "--layer-codec", "7-:raw", "-f") == 2
    assert "no layer 7-" in capsys.readouterr().err
