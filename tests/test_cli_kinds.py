"""A file of another kind than a verb takes is no damage: the message says what it is and which verb takes it."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.cli import cache_file, kvzip, process

Capture = pytest.CaptureFixture[str]

SAID = {
    "kvz": "is a .kvz file: kvzip decompress",
    "safetensors": "is a safetensors file, not a .kvz: kvzip compress",
    "pickle": "is a pickle: kvzip import",
    "zip": "is a zip archive",
}
TAKES_KVZ = ["verify", "verify --deep", "decompress", "decompress -o {out}", "export -o {out}", "repair -o {out}"]
TAKES_SAFETENSORS = ["compress -o {out}", "bench --quick --codec raw", "verify {kvz} --against"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One file of each kind, none with a suffix, and of no kind: random, text, zeros."""
    folder = tmp_path_factory.mktemp("kinds")
    cache = cache_file(folder / "safetensors")
    assert kvzip("compress", cache, "-q", "--codec", "raw", "-o", folder / "kvz") == 0
    archive = io.BytesIO()
    zipfile.ZipFile(archive, "w").writestr("data", b"x")
    for name, data in {
        "pickle": pickle.dumps([0.5] * 100),
        "zip": archive.getvalue(),
        "random": np.random.default_rng(0).bytes(4000),
        "text": b"some text, no tensors " * 9,
        "zeros": bytes(4000),
    }.items():
        (folder / name).write_bytes(data)
    return {path.name: path for path in folder.iterdir()}


def run(files: dict[str, Path], verb: str, kind: str, tmp_path: Path) -> int:
    return kvzip(*verb.format(out=tmp_path / "out", kvz=files["kvz"]).split(), files[kind])


@pytest.mark.parametrize(
    ("verb", "kind"),
    [(verb, kind) for verb in TAKES_KVZ for kind in ("safetensors", "pickle", "zip")]
    + [(verb, kind) for verb in TAKES_SAFETENSORS for kind in ("kvz", "pickle", "zip")]
    + [("inspect", "pickle"), ("inspect", "zip")]
    + [("import -o {out}", kind) for kind in ("kvz", "safetensors", "zip")],
)
def test_a_file_of_another_kind_is_a_usage_error(
    files: dict[str, Path], verb: str, kind: str, tmp_path: Path, capsys: Capture
) -> None:
    assert run(files, verb, kind, tmp_path) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert SAID[kind] in said and str(files[kind]) in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["random", "text", "zeros"])
@pytest.mark.parametrize("verb", [*TAKES_KVZ, *TAKES_SAFETENSORS, "inspect", "import -o {out}"])
def test_a_file_of_no_known_kind_may_be_damaged(
    files: dict[str, Path], verb: str, kind: str, tmp_path: Path, capsys: Capture
) -> None:
    """Where raw bytes could be meant, too, what is missing is named."""
    assert run(files, verb, kind, tmp_path) == 3
    assert verb not in TAKES_SAFETENSORS or "--shape" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_short_file_is_of_no_kind(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "short").write_text("hi")
    assert kvzip("compress", tmp_path / "short") == 3
    assert "no safetensors file, it has only 2 bytes" in capsys.readouterr().err


def test_pipes_of_another_kind_are_told_apart_too(files: dict[str, Path]) -> None:
    for verb, kind in (("decompress", "safetensors"), ("verify", "safetensors"), ("compress", "kvz")):
        done = process(verb, input=files[kind].read_bytes())
        assert (done.returncode, done.stdout) == (2, b"") and SAID[kind].encode() in done.stderr


def test_a_file_that_is_not_there_is_said_before_its_name_is_judged(tmp_path: Path, capsys: Capture) -> None:
    for verb in ("decompress", "export"):
        assert kvzip(verb, tmp_path / "missing") == 1
        assert "No such file" in capsys.readouterr().err
