"""``kvzip import`` and ``kvzip export`` on LMCache's files: files, pipes, chunks, and what they say when they fail."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

import kvzip
from kvzip.devices.base import Device
from kvzip.lmcache import cachegen
from kvzip.lmcache.blob import read_blob, write_blob
from tests import cli, codecs
from tests.reference import golden

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def chunks(tmp_path: Path, cpu: Device) -> list[Path]:
    """Three chunks of one cache of 70 tokens, as LMCache writes them."""
    kv = codecs.numbers(70, 4, 32).reshape(2, 2, 70, 1, 32)
    paths = [tmp_path / f"{start}.bin" for start in (0, 32, 64)]
    for path in paths:
        piece = np.ascontiguousarray(kv[:, :, int(path.stem) : int(path.stem) + 32])
        path.write_bytes(write_blob(cachegen.encode(piece, [32, 32], [32, 32], cpu)))
    return paths


def test_chunks_go_in_and_come_out(chunks: list[Path], tmp_path: Path) -> None:
    packed = tmp_path / "kv.kvz"
    assert cli.kvzip("import", *chunks, "-o", packed, "-q") == 0
    assert kvzip.decompress(packed)["kv_chunk"].shape == (2, 2, 70, 1, 32)
    assert cli.kvzip("export", packed, "--chunk", "32", "-o", tmp_path / "out", "-q") == 0
    out = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in out] == [f"{start:08d}.cachegen" for start in (0, 32, 64)]
    assert [path.read_bytes() for path in out] == [path.read_bytes() for path in chunks]


def test_names_follow_the_inputs(chunks: list[Path], tmp_path: Path) -> None:
    assert cli.kvzip("import", chunks[0], "-q") == 0
    assert cli.kvzip("export", f"{chunks[0]}.kvz", "-q") == 0
    assert Path(f"{chunks[0]}.cachegen").read_bytes() == chunks[0].read_bytes()
    assert cli.kvzip("export", f"{chunks[0]}.kvz", "-q") == 5, "what exists is not overwritten"


def test_pipes(chunks: list[Path]) -> None:
    packed = cli.process("import", "--coder", "range", input=chunks[0].read_bytes())
    assert packed.returncode == 0
    back = cli.process("export", input=packed.stdout)
    assert back.stdout == chunks[0].read_bytes()
    part = cli.process("export", "--tokens", "8:20", input=packed.stdout)
    assert read_blob(part.stdout).tokens == 12


def test_fp8_needs_its_shape(tmp_path: Path) -> None:
    case = golden.load_case("fp8-real-e5m2")
    file = tmp_path / "kv.fp8"
    file.write_bytes(case.encoded)
    _, layers, tokens, channels = case.input.shape
    shape = f"{layers},{tokens},2,{channels // 2}"
    assert cli.kvzip("import", "--format", "fp8-e5m2", file) == 2
    assert cli.kvzip("import", "--format", "fp8-e5m2", "--shape", "6,20", file) == 2
    assert cli.kvzip("import", "--format", "fp8-e5m2", "--shape", shape, file) == 0
    assert cli.kvzip("export", f"{file}.kvz", "--format", "fp8-e5m2", "-o", tmp_path / "back") == 0
    assert (tmp_path / "back").read_bytes() == case.encoded


def _turboquant(name: str) -> tuple[golden.Case, np.ndarray, np.ndarray, list[str]]:
    """A case, its input and output as ``[layers, 2, tokens, heads, head_dim]``, and what the bytes do not say."""
    case = golden.load_case(name)
    _, layers, tokens, width = case.input.shape
    shape = (layers, tokens, width // case.options["head_dim"], case.options["head_dim"])
    given, decoded = (
        np.ascontiguousarray(kv.reshape(2, layers, *shape[1:]).swapaxes(0, 1)) for kv in (case.input, case.decoded)
    )
    told = ["--shape", ",".join(map(str, shape)), "--dtype", case.input.dtype.name]
    return case, given, decoded, ["--format", "turboquant", "--preset", case.options["preset"], *told]


@pytest.mark.parametrize("name", golden.names("turboquant"))
def test_turboquant_objects_are_those_of_lmcache(name: str, tmp_path: Path) -> None:
    """Of the numbers, each byte that LMCache writes; of its bytes, each bit that it reads, and the same bytes again."""
    case, given, decoded, options = _turboquant(name)
    kvzip.compress({"kv_chunk": given}, tmp_path / "given.kvz", codec="lossless", layout="lmcache-blob")
    assert cli.kvzip("export", tmp_path / "given.kvz", *options[:4], "-o", tmp_path / "object") == 0
    assert (tmp_path / "object").read_bytes() == case.encoded

    packed, length = tmp_path / "kv.kvz", given.shape[2]
    assert cli.kvzip("import", tmp_path / "object", *options, "--block-tokens", "8", "-o", packed) == 0
    assert golden.same_bits(kvzip.decompress(packed)["kv_chunk"], decoded)
    assert cli.kvzip("export", packed, "--format", "turboquant", "-o", tmp_path / "back") == 0
    assert (tmp_path / "back").read_bytes() == case.encoded

    part = ("--shape", options[5].replace(f",{length},", ",9,"))
    assert cli.kvzip("export", packed, "--format", "turboquant", "--tokens", "5:14", "-o", tmp_path / "part") == 0
    twice = (tmp_path / "part", tmp_path / "part")
    assert cli.kvzip("import", *twice, *options[:4], *part, *options[6:], "-o", tmp_path / "twice.kvz") == 0
    expected = np.concatenate([decoded[:, :, 5:14]] * 2, axis=2)
    assert golden.same_bits(kvzip.decompress(tmp_path / "twice.kvz")["kv_chunk"], expected)


def test_turboquant_codes_of_a_kvz_are_those_that_it_was_made_with(tmp_path: Path, capsys: Capture) -> None:
    """A .kvz with LMCache's codes gives LMCache's object of the numbers that it no longer has; another says so."""
    case, given, _, options = _turboquant("turboquant_3bit_nc-real-qwen-d64")
    for codec in ("turboquant:preset=3bit_nc,tuned=false", "turboquant:preset=3bit_nc", "int8"):
        packed, back = tmp_path / "kv.kvz", tmp_path / "back"
        kvzip.compress({"kv_chunk": given}, packed, codec=codec, layout="lmcache-blob", force=True)
        assert cli.kvzip("export", packed, *options[:4], "-o", back, "-f") == 0
        assert (back.read_bytes() == case.encoded) == ("false" in codec)
        assert ("a second time" in capsys.readouterr().err) == ("false" not in codec)


def test_turboquant_needs_its_shape_and_preset(tmp_path: Path) -> None:
    case, _, _, options = _turboquant("turboquant_4bit_nc-random-d128")
    file = tmp_path / "object"
    file.write_bytes(case.encoded)
    assert cli.kvzip("import", file, *options[:4]) == 2
    assert cli.kvzip("import", file, *options, "--preset", "5bit") == 2
    assert cli.kvzip("import", file, *options, "--shape", "6,20,1,512") == 2
    assert cli.kvzip("import", file, *options, "--shape", "3,20,1,64") == 2, "fewer layers than stay raw"
    assert cli.kvzip("import", file, *options, "--preset", "3bit_nc") == 3
    file.write_bytes(case.encoded[:-1])
    assert cli.kvzip("import", file, *options) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["object"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--shape", "1,1,1,8"], "shape"),
        (["--dtype", "float16"], "--dtype"),
        (["--preset", "4bit_nc"], "preset"),
        (["--format", "fp8-e4m3fn", "--shape", "1,4,1,8", "--k-bins", "0:16"], "k_bins"),
        (["--format", "fp8-e5m2", "--shape", "1,4,1,8", "--coder", "range"], "coder"),
        (["--format", "fp8-e5m2", "--shape", "1,4,1,8", "--preset", "4bit_nc"], "preset"),
        (["--format", "turboquant", "--shape", "1,4,1,8", "--v-bins", "0:16"], "v_bins"),
        (["--format", "fp8-e4m3fn", "--dtype", "float16"], "--dtype"),
    ],
)
def test_import_refuses_options_of_another_format(
    options: list[str], told: str, tmp_path: Path, capsys: Capture
) -> None:
    """No option is dropped in silence."""
    (tmp_path / "chunk").write_bytes(pickle.dumps(b"") + bytes(64))
    assert cli.kvzip("import", tmp_path / "chunk", *options, "-o", tmp_path / "made.kvz") == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["chunk"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--preset", "4bit_nc"], "preset"),
        (["--format", "fp8-e4m3fn", "--k-bins", "0:16"], "k_bins"),
        (["--format", "fp8-e5m2", "--preset", "4bit_nc"], "preset"),
        (["--format", "turboquant", "--v-bins", "0:16"], "v_bins"),
    ],
)
def test_export_refuses_options_of_another_format(
    options: list[str], told: str, tmp_path: Path, capsys: Capture
) -> None:
    kvzip.compress(
        {"kv_chunk": np.ones((1, 2, 4, 1, 8), np.float32)}, tmp_path / "kv.kvz", layout="lmcache-blob", codec="raw"
    )
    assert cli.kvzip("export", tmp_path / "kv.kvz", *options, "-o", tmp_path / "made") == 2
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kv.kvz"]


def test_a_hostile_pickle_is_refused_and_nothing_written(tmp_path: Path, capsys: Capture) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(tmp_path / 'marker')!r}, 'w')",)

    file = tmp_path / "evil.bin"
    file.write_bytes(pickle.dumps(Evil()))
    assert cli.kvzip("import", file) == 4
    assert "builtins.exec" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["evil.bin"]


def test_the_result_is_told_to_programs(chunks: list[Path], tmp_path: Path, capsys: Capture) -> None:
    assert cli.kvzip("import", *chunks, "-o", tmp_path / "kv.kvz", "--progress", "json") == 0
    (event,) = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert event["verb"] == "import" and event["stored_bytes"] == (tmp_path / "kv.kvz").stat().st_size
    assert event["original_bytes"] == sum(path.stat().st_size for path in chunks)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("import", "gone.bin"), "gone.bin"),
        (("import", "FIRST", "gone.bin", "-o", "kv.kvz"), "gone.bin"),
        (("import", "FIRST", "FIRST", "-o", "no/folder/kv.kvz"), None),
        (("export", "gone.kvz"), "gone.kvz"),
    ],
)
def test_an_error_names_the_input_that_it_is_about(
    arguments: tuple[str, ...], named: str | None, chunks: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(chunks[0].parent)
    given = [chunks[0].name if argument == "FIRST" else argument for argument in arguments]
    assert cli.kvzip(*given, "--progress", "json") == 1
    assert json.loads(capsys.readouterr().err.splitlines()[-1]).get("input") == named


@pytest.mark.parametrize(
    "arguments",
    [
        ("import", "a.bin", "b.bin"),
        ("import", "."),
        ("export", "."),
        ("export", "kv.kvz", "--chunk", "4", "-c"),
        ("export", "kv.kvz", "--tokens", "70:"),
        ("export", "kv.kvz", "--format", "kivi"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], chunks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(chunks[0].parent)
    assert cli.kvzip("import", *chunks, "-o", "kv.kvz", "-q") == 0
    assert cli.kvzip(*arguments) == 2
