"""compress --report and --fail-above: no loss goes unseen, and none above the limit counts as success."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import LAYERS, cache_file, kvzip

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return cache_file(tmp_path / "kv.safetensors")


def test_the_report_has_every_layer_and_names_the_worst(cache: Path, capsys: Capture) -> None:
    assert kvzip("compress", cache, "--codec", "fp8", "--report") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines[3 : 3 + LAYERS]] == [str(layer) for layer in range(LAYERS)]
    worst = max(
        (float(value), layer) for layer, line in enumerate(lines[3 : 3 + LAYERS]) for value in line.split()[1:3]
    )
    assert lines[-1].startswith(f"  worst: layer {worst[1]} ") and lines[-1].endswith(f"{worst[0]:.3g}")


def test_the_report_of_a_lossless_codec_says_so(cache: Path, capsys: Capture) -> None:
    assert kvzip("compress", cache, "--codec", "raw", "--report", "--fail-above", 0) == 0
    assert "nothing was lost" in capsys.readouterr().err


def test_the_report_for_jobs_has_every_plane(cache: Path, capsys: Capture) -> None:
    assert kvzip("compress", cache, "--report", "--progress", "json") == 0
    results = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (result,) = (event for event in results if event["event"] == "result")
    assert len(result["errors"]) == 2 * LAYERS


def test_errors_above_the_limit_fail_and_keep_the_source(cache: Path, capsys: Capture) -> None:
    assert kvzip("compress", cache, "--codec", "fp8", "--fail-above", 0.001, "--rm") == 1
    message = capsys.readouterr().err
    assert f"{2 * LAYERS} of {2 * LAYERS} planes" in message and "the worst is layer" in message
    assert cache.exists() and Path(f"{cache}.kvz").exists()
    assert kvzip("compress", cache, "--codec", "fp8", "--fail-above", 0.5, "--rm", "-f") == 0
    assert not cache.exists()
