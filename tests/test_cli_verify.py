"""verify finds every kind of damage, and tells how far a lossy file is from its source."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from kvzip.quality import differences
from tests.cli import LAYERS, cache_file, kvzip, process

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return cache_file(tmp_path / "kv.safetensors")


@pytest.fixture
def packed(cache: Path) -> Path:
    assert kvzip("compress", cache, "-q") == 0
    return Path(f"{cache}.kvz")


@pytest.mark.parametrize("options", [[], ["--deep"]])
def test_a_sound_file_passes_from_a_file_and_from_a_pipe(packed: Path, options: list[str]) -> None:
    assert kvzip("verify", packed, *options) == 0
    assert process("verify", "-", *options, input=packed.read_bytes()).returncode == 0


def test_a_flipped_byte_anywhere_is_found_without_decoding(packed: Path, capsys: Capture) -> None:
    whole = packed.read_bytes()
    for position in range(0, len(whole), len(whole) // 97):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        packed.write_bytes(damaged)
        assert kvzip("verify", packed) in (3, 4), position
        assert capsys.readouterr().err.startswith("kvzip: ")


def test_damage_in_the_second_of_two_caches_is_found(packed: Path) -> None:
    one = packed.read_bytes()
    damaged = bytearray(one)
    damaged[len(damaged) // 2] ^= 1
    packed.write_bytes(one + damaged)
    assert kvzip("verify", packed) == 3
    assert process("verify", "-", input=packed.read_bytes()).returncode == 3


def test_against_the_source_a_lossless_file_has_no_error(cache: Path, packed: Path, capsys: Capture) -> None:
    assert kvzip("compress", cache, "-qf", "--codec", "raw") == 0
    assert kvzip("verify", packed, "--against", cache, "--fail-above", 0) == 0
    assert "layer 0 key" in capsys.readouterr().out


def test_against_another_cache_the_worst_layer_is_named_and_the_limit_fails(
    cache: Path, packed: Path, capsys: Capture
) -> None:
    arrays = safetensors.numpy.load_file(cache)
    arrays["layers.1.value"] = arrays["layers.1.value"] * np.float16(3)
    other = cache.parent / "other.safetensors"
    safetensors.numpy.save_file(arrays, other)
    assert kvzip("verify", packed, "--against", other) == 0
    assert "layer 1 value" in capsys.readouterr().out
    assert kvzip("verify", packed, "--against", other, "--fail-above", 0.5) == 1
    assert "1 of 7 planes" in (message := capsys.readouterr().err) and "layer 1 value" in message
    assert kvzip("verify", packed, "--against", other, "-v", "--progress", "json") == 0
    (errors,) = (
        event["errors"] for event in map(json.loads, capsys.readouterr().err.splitlines()) if "errors" in event
    )
    assert len(errors) == LAYERS * 2 + 1
    bad = next(e for e in errors if (e["layer"], e["kind"]) == (1, "value"))
    assert bad["relative_error"] == pytest.approx(2 / 3, abs=0.1)


def test_the_reference_may_have_another_layout(cache: Path, packed: Path) -> None:
    """The same numbers in LMCache's blob ``[L, 2, T, H, D]``: no difference beyond the codec's."""
    arrays = safetensors.numpy.load_file(cache)
    blob = np.stack(
        [[arrays[f"layers.{i}.{kind}"].transpose(1, 0, 2) for kind in ("key", "value")] for i in range(LAYERS)]
    )
    other = cache.parent / "blob.safetensors"
    safetensors.numpy.save_file({"kv": np.ascontiguousarray(blob)}, other)
    assert kvzip("compress", cache, "-qf", "--codec", "raw") == 0
    assert kvzip("verify", packed, "--against", other, "--layout", "L,kv,T,H,D", "--fail-above", 0) == 0


def test_a_reference_that_lacks_layers_or_tokens_is_an_error(cache: Path, packed: Path, capsys: Capture) -> None:
    arrays = safetensors.numpy.load_file(cache)
    other = cache.parent / "other.safetensors"
    safetensors.numpy.save_file({name: a for name, a in arrays.items() if "layers.2" not in name}, other)
    assert kvzip("verify", packed, "--against", other) == 1
    assert "layer 2" in capsys.readouterr().err
    cache_file(other, tokens=100)
    assert kvzip("verify", packed, "--against", other) == 1
    assert "100 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--fail-above 0.1", "--member 0", "--layout H,T,D", "--heads 2", "--head-dim 16", "--dtype float16"]
)
def test_what_is_said_of_a_reference_that_is_not_there_is_a_usage_error(
    packed: Path, capsys: Capture, option: str
) -> None:
    assert kvzip("verify", packed, *option.split()) == 2
    assert option.split()[0] in (said := capsys.readouterr().err) and "--against" in said


def test_differences_count_in_double_precision_and_take_nan_for_nan() -> None:
    x = np.array([[[1, np.nan, np.inf, 3]]], np.float32)
    same = differences(x, x.copy())
    assert (same.squared_error, same.max_abs, same.energy) == (0, 0, 10)
    y = x.copy()
    y[0, 0, 3] = 3.5
    assert differences(x, y).squared_error == 0.25 and differences(x, y).max_abs == 0.5
    for wrong in (0, np.nan, -np.inf):
        y[0, 0, 2] = wrong
        assert differences(x, y).max_abs == np.inf
    big = np.full((3000, 2, 128), 0.1, np.float32)
    assert differences(big, big + np.float32(1)).squared_error == pytest.approx(big.size, rel=1e-6)
