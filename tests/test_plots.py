"""Pictures show what was measured; where matplotlib is missing only the message is tested (test_cli_bench)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvzip.bench.picture import pareto
from tests.cli import LAYERS, cache_file, kvzip

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    pytest.importorskip("matplotlib")
    return cache_file(tmp_path / "kv.safetensors")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were drawn."""
    import kvzip.bench.picture
    import kvzip.bytes_picture

    found: list[Any] = []
    rendered = kvzip.bytes_picture.rendered

    def keep(figure: Any, suffix: str) -> bytes:
        found.append(figure)
        return rendered(figure, suffix)

    monkeypatch.setattr(kvzip.bytes_picture, "rendered", keep)
    monkeypatch.setattr(kvzip.bench.picture, "rendered", keep)
    return found


def test_no_point_of_the_front_is_beaten_and_every_other_is() -> None:
    points = [(2.0, 3.0), (1.0, 9.0), (2.0, 4.0), (3.0, 3.0), (4.0, 1.0), (5.0, 2.0)]
    front = pareto(points)
    assert [points[number] for number in front] == [(1.0, 9.0), (2.0, 3.0), (4.0, 1.0)]
    for number, point in enumerate(points):
        better = [p for p in points if p != point and p[0] <= point[0] and p[1] <= point[1]]
        assert bool(better) != (number in front)


def test_bench_draws_every_codec_and_every_layer(cache: Path, tmp_path: Path, figures: list[Any]) -> None:
    target = tmp_path / "rates.png"
    arguments = ("bench", cache, "--codecs", "raw,fp8,cachegen,cachegen:level=3", "--seconds", 0, "--plot", target)
    assert kvzip(*arguments) == 0
    assert target.read_bytes().startswith(PNG)
    rates, errors = figures[0].axes[:2]
    assert "bits per element" in rates.get_xlabel() and "error" in rates.get_ylabel()
    words = {text.get_text() for text in rates.texts}
    assert {"raw", "fp8", "cachegen", "level=3"} <= words
    assert errors.images[0].get_array().shape == (3, LAYERS)
    assert kvzip(*arguments) == 5 and kvzip(*arguments, "-f") == 0


def test_a_picture_of_lossless_codecs_needs_no_errors(cache: Path, tmp_path: Path) -> None:
    assert kvzip("bench", cache, "--codec", "raw", "--seconds", 0, "--plot", tmp_path / "raw.svg") == 0
    assert b"<svg" in (tmp_path / "raw.svg").read_bytes()


def test_inspect_draws_the_bytes_of_every_layer(cache: Path, tmp_path: Path, figures: list[Any]) -> None:
    assert kvzip("compress", cache) == 0
    assert kvzip("inspect", f"{cache}.kvz", "--plot", tmp_path / "bytes.png") == 0
    assert (tmp_path / "bytes.png").read_bytes().startswith(PNG)
    (axes,) = figures[0].axes
    heights = [bar.get_height() for bar in axes.patches if bar.get_height()]
    stored = Path(f"{cache}.kvz").stat().st_size / 1000
    assert 0.5 * stored < sum(heights) < stored
    assert "kB" in axes.get_ylabel() and axes.get_xlabel() == "layer"


def test_what_cannot_be_drawn_is_told(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "x.png"
    assert kvzip("inspect", cache, "--plot", target) == 2 and not target.exists()
    assert "no .kvz" in capsys.readouterr().err
    assert kvzip("compress", cache) == 0
    assert kvzip("inspect", f"{cache}.kvz", f"{cache}.kvz", "--plot", target) == 2
    assert kvzip("bench", cache, "--codec", "raw", "--plot", cache) == 2
