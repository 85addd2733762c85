"""bench measures what a user would get: the size of the real file, and the errors after decoding."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from kvzip.bench import load, measure
from kvzip.codecs import get_codec
from kvzip.devices import get_device
from kvzip.errors import KvzipError, UsageError
from kvzip.layouts import map_cache
from kvzip.tensorfile import open_tensors
from tests.cli import DIM, HEADS, LAYERS, TOKENS, cache_file, kvzip, process

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
    assert found["copy"]["peer"] and found["copy"]["ratio"] == 1
    for row in (row for row in found.values() if not row["peer"]):
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
    for words in (f"{TOKENS} tokens", "1 thread", "raw", "cachegen", "bits/el", "decode GB/s", "none", "copy"):
        assert words in table
    assert "queries drawn" in table and "load time" in table and "pays below" in table and "zstd" not in table


def test_csv_has_a_line_for_each_row(cache: Path, capsys: Capture) -> None:
    assert kvzip("bench", cache, "--codecs", "raw,fp8:scale=head", "--csv", "--link", "3GB", "--seconds", 0) == 0
    found = {line["codec"]: line for line in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert set(found) == {"raw", "fp8:scale=head", "copy"}
    assert float(found["fp8:scale=head"]["ratio"]) > 1.5 and float(found["raw"]["load_seconds_3GB"]) > 0
    assert kvzip("bench", cache, "--csv", "--json") == 2


def test_two_runs_print_the_same_sizes_and_errors(cache: Path, capsys: Capture) -> None:
    keys = ("stored_bytes", "errors", "attention", "attention_output_error", "logits_error")
    first, second = (rows(capsys, cache, "--quick") for _ in range(2))
    assert [[row[key] for key in keys] for row in first.values()] == [
        [row[key] for key in keys] for row in second.values()
    ]


def test_real_queries_are_named(cache: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "queries.safetensors"
    queries = np.random.default_rng(0).normal(size=(HEADS, 5, DIM)).astype(np.float32)
    safetensors.numpy.save_file({f"layers.{layer}.query": queries for layer in range(LAYERS)}, path)
    assert kvzip("bench", cache, "--codec", "fp8", "--seconds", 0, "--queries", path) == 0
    assert "queries.safetensors" in capsys.readouterr().out


def test_ctrl_c_prints_what_is_done(cache: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvzip.bench.steps.copying", stop)
    assert kvzip("bench", cache, "--quick", "--codecs", "raw,fp8") == 130
    table = capsys.readouterr().out
    assert "2 of 3 rows" in table and "fp8" in table
    assert kvzip("bench", cache, "--quick", "--codecs", "raw,fp8", "--json") == 130
    assert json.loads(capsys.readouterr().out)["complete"] is False


def test_a_codec_that_fails_is_left_out_unless_it_was_named(
    cache: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise KvzipError("needs what is not here")

    monkeypatch.setattr("kvzip.codecs.fp8.Fp8.encode", fail)
    assert kvzip("bench", cache, "--quick") == 0
    shown = capsys.readouterr()
    assert "fp8 is left out: needs what is not here" in shown.err and "cachegen" in shown.out
    assert kvzip("bench", cache, "--quick", "--codec", "fp8") == 1


def test_progress_is_told_to_jobs(cache: Path, capsys: Capture) -> None:
    assert kvzip("bench", cache, "--codecs", "raw,fp8", "--seconds", 0, "--progress", "json") == 0
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    done = [event for event in events if event["event"] == "progress"][-1]
    assert done["verb"] == "bench" and done["done"] == done["total"] > 0


@pytest.mark.parametrize(
    "options, words",
    [
        (["--codecs", "fp9"], "did you mean 'fp8'"),
        (["--codec", "fp8:scal=head"], "did you mean 'scale'"),
        (["--link", "25gb"], "expected a speed"),
        (["--text", "text.txt"], "--text needs --model"),
        (["--model", "nowhere.gguf"], "no such model"),
        (["--plot", "picture.bmp"], "ends in .png"),
    ],
)
def test_wrong_requests_are_told(cache: Path, capsys: Capture, options: list[str], words: str) -> None:
    assert kvzip("bench", cache, *options) == 2
    assert words in capsys.readouterr().err


def test_missing_extras_say_what_to_install(
    cache: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("torch", "transformers", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "model.gguf").touch()
    assert kvzip("bench", cache, "--model", tmp_path / "model.gguf") == 4
    assert "kvzip[eval]" in capsys.readouterr().err
    assert kvzip("bench", cache, "--plot", tmp_path / "p.png") == 4
    assert "kvzip[plot]" in capsys.readouterr().err


def test_what_cannot_be_measured_is_told(cache: Path, tmp_path: Path) -> None:
    assert kvzip("bench", cache, "--layout", "none") == 2
    assert process("bench", "-", input=cache.read_bytes()).returncode == 2
    with open_tensors(cache) as source, pytest.raises(UsageError, match="no keys"):
        load(source, map_cache(source, "none"))
