"""``kvzip repair`` writes a sound file, says what is missing, and ends with 3 when anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvzip.container import Reader
from tests.cli import cache_file, kvzip, process

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    cache = cache_file(tmp_path / "kv.safetensors")
    assert kvzip("compress", cache, "-q", "--codec", "raw", "--block-tokens", "64") == 0
    return Path(f"{cache}.kvz")


def broken(packed: Path) -> bytes:
    """A byte of a second block turned over; the file is left so."""
    with Reader.open(packed) as reader:
        offset = next(entry.offset for entry in reader.index if entry.block.start == 64)
    data = bytearray(packed.read_bytes())
    data[offset + 100] ^= 0x40
    packed.write_bytes(data)
    return bytes(data)


def test_a_damaged_file_is_saved_in_part(packed: Path, capsys: Capture) -> None:
    """Exit code 3, and a file beside it that verifies, decompresses and inspects like any other."""
    data = broken(packed)
    assert kvzip("repair", packed) == 3
    said = capsys.readouterr().err
    assert "damaged: bytes" in said
    assert "missing: layer " in said
    assert "is missing" in said
    saved = packed.with_name("kv.safetensors.repaired.kvz")
    assert packed.read_bytes() == data
    for verb in (("verify", "--deep"), ("inspect",)):
        assert kvzip(*verb, saved) == 0
    assert kvzip("decompress", saved) == 0


def test_a_file_without_its_end_is_saved(packed: Path) -> None:
    packed.write_bytes(packed.read_bytes()[:-200])
    assert kvzip("repair", packed, "-o", packed.with_name("out.kvz")) == 0
    assert kvzip("verify", "--deep", packed.with_name("out.kvz")) == 0


def test_jobs_read_what_is_missing(packed: Path, capsys: Capture) -> None:
    broken(packed)
    assert kvzip("repair", packed, "--progress=json") == 3
    result, error = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (result["event"], result["complete"], error["code"]) == ("result", False, "repaired-part")
    (missing,) = result["missing"]
    assert missing.keys() == {"layer", "kind", "start", "stop"}
    assert (result["tokens"], missing["start"], missing["stop"]) == (64, 64, 128)


def test_what_cannot_be_saved_leaves_no_output(packed: Path, tmp_path: Path) -> None:
    for data in (b"", b"text" * 100, packed.read_bytes()[40:]):
        source = tmp_path / "bad.kvz"
        source.write_bytes(data)
        assert kvzip("repair", source) == 3
    assert not (tmp_path / "bad.repaired.kvz").exists()


def test_a_cache_that_is_lost_is_told_beside_the_saved_one(packed: Path, capsys: Capture) -> None:
    """Exit code 3, one result each; the file that is written holds the saved one alone."""
    whole = packed.read_bytes()
    packed.write_bytes(whole + whole[: len(whole) // 8])
    assert kvzip("repair", packed, "--progress=json") == 3
    first, second, error = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(r["input"], r["complete"]) for r in (first, second)] == [
        (f"{packed}, member 0", True),
        (f"{packed}, member 1", False),
    ]
    assert (second["layers"], error["code"]) == ([], "repaired-part")
    assert packed.with_name("kv.safetensors.repaired.kvz").read_bytes() == whole
    assert kvzip("repair", packed, "-f") == 3
    assert "member 1: nothing of it is saved: the first tokens" in capsys.readouterr().err


def test_existing_files_are_not_overwritten(packed: Path) -> None:
    saved = packed.with_name("kv.safetensors.repaired.kvz")
    saved.write_bytes(b"mine")
    assert kvzip("repair", packed) == 5
    assert kvzip("repair", packed, "-o", packed, "-f") == 5
    assert saved.read_bytes() == b"mine"
    assert kvzip("repair", packed, "-f") == 0
    assert saved.read_bytes() == packed.read_bytes()


def test_from_standard_input_to_standard_output(packed: Path) -> None:
    """A redirected file can be read at random; a pipe cannot, and is told so."""
    whole = packed.read_bytes()
    packed.write_bytes(whole[:-10])
    with packed.open("rb") as file:
        assert process("repair", stdin=file).stdout == whole
    assert process("repair", input=whole).returncode == 2


def test_what_is_intact_and_left_out_is_named(packed: Path, capsys: Capture) -> None:
    """Saved, missing and left out are the whole cache, and each is told."""
    broken(packed)
    assert kvzip("repair", packed, "--progress=json") == 3
    result = json.loads(capsys.readouterr().err.splitlines()[0])
    with Reader.open(packed) as reader:
        planes = [plane for plane in reader.header.planes if plane.kind != "bytes"]
    told = [(r["layer"], r["kind"], r["start"], r["stop"]) for r in [*result["missing"], *result["left_out"]]]
    beyond = {(p.layer, p.kind, token) for p in planes for token in range(64, p.tokens)}
    assert {(layer, kind, token) for layer, kind, a, b in told for token in range(a, b)} == beyond
    assert kvzip("repair", packed, "-f") == 3
    said = capsys.readouterr().err
    assert "left out, though intact: layer" in said
    assert "--whole-layers" in said
