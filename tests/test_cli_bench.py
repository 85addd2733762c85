"""bench measures what a user would get: the size of the real file, and the errors after decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvzip.bench import load, measure
from kvzip.codecs import get_codec
from kvzip.devices import get_device
from kvzip.errors import UsageError
from kvzip.layouts import map_cache
from kvzip.tensorfile import open_tensors
from tests.cli import LAYERS, TOKENS, cache_file, kvzip, process

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return cache_file(tmp_path / "kv.safetensors")


def rows(capsys: Capture, *arguments: object) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert kvzip("bench", "--json", "--seconds", 0, *arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "kvzip-bench/1"
    return {row["codec"]: row for row in found["rows"]}


def test_every_codec_is_measured_and_the_lossless_ones_have_no_error(cache: Path, capsys: Capture) -> None:
    found = rows(capsys, cache)
    assert {"raw", "fp8", "cachegen"} <= set(found)
    for row in found.values():
        assert row["encode_gb_per_s"] > 0 and row["decode_gb_per_s"] > 0 and row["runs"] >= 3
        assert len(row["errors"]) == 2 * LAYERS
    assert {error["relative_error"] for error in found["raw"]["errors"]} == {0}
    assert all(0.01 < error["relative_error"] < 0.05 for error in found["fp8"]["errors"])
    assert found["cachegen"]["bits_per_element"] < found["fp8"]["bits_per_element"] < found["raw"]["bits_per_element"]


def test_sizes_and_errors_are_those_of_the_file_that_compress_writes(cache: Path, capsys: Capture) -> None:
    spec = "cachegen:level=7,sinks=0"
    row = rows(capsys, cache, "--codec", spec)[spec]
    assert kvzip("compress", cache, "--codec", spec) == 0
    capsys.readouterr()
    assert kvzip("inspect", "--json", f"{cache}.kvz") == 0
    (member,) = json.loads(capsys.readouterr().out)["members"]
    # The file also holds the source's header, its layout and a tensor that is no KV.
    assert 0 < member["bytes"] - row["stored_bytes"] < 4000
    recorded = [plane["relative_error"] for plane in member["planes"] if plane["kind"] != "bytes"]
    assert [error["relative_error"] for error in row["errors"]] == pytest.approx(recorded, rel=1e-3)


def test_of_a_large_cache_the_first_tokens_are_measured(tmp_path: Path) -> None:
    path = cache_file(tmp_path / "kv.safetensors", tokens=3000)
    with open_tensors(path) as source:
        cache_map = map_cache(source)
        sample = load(source, cache_map, max_bytes=source.files[0].size // 2)
        whole = load(source, cache_map)
    assert (sample.tokens, whole.tokens) == (1024, 3000)
    for part, all_of_it in zip(sample.arrays, whole.arrays, strict=True):
        assert (part == all_of_it[:1024]).all()
    row = measure(sample, get_codec("fp8"), get_device("cpu"), seconds=0)
    assert row.bits_per_element == pytest.approx(8.1, abs=0.1)


def test_the_table_has_a_row_for_each_codec(cache: Path, capsys: Capture) -> None:
    assert kvzip("bench", cache, "--codec", "raw", "--codec", "cachegen", "--seconds", 0, "-T", 1) == 0
    table = capsys.readouterr().out
    for words in (f"{TOKENS} tokens", "1 thread", "raw", "cachegen", "bits/element", "decode GB/s", "none"):
        assert words in table


def test_what_cannot_be_measured_is_told(cache: Path, tmp_path: Path) -> None:
    assert kvzip("bench", cache, "--layout", "none") == 2
    assert process("bench", "-", input=cache.read_bytes()).returncode == 2
    with open_tensors(cache) as source, pytest.raises(UsageError, match="no keys"):
        load(source, map_cache(source, "none"))
