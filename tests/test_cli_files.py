"""compress and decompress treat files as zstd does: names, targets, many inputs, and what they refuse to destroy."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import kvzip.api
from tests.cli import cache_file, process
from tests.cli import kvzip as command

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return cache_file(tmp_path / "kv.safetensors")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_compress_adds_a_suffix_and_decompress_takes_it_off(cache: Path) -> None:
    original = cache.read_bytes()
    assert command("compress", cache, "--codec", "raw") == 0
    assert names(cache.parent) == ["kv.safetensors", "kv.safetensors.kvz"]
    cache.unlink()
    assert command("decompress", f"{cache}.kvz") == 0
    assert cache.read_bytes() == original


def test_pipes_work_in_both_directions_and_nothing_but_data_is_on_them(cache: Path) -> None:
    packed = process("compress", "--codec", "raw", input=cache.read_bytes())
    assert process("decompress", "-", input=packed.stdout).stdout == cache.read_bytes()
    assert process("decompress", "-c", "-", input=packed.stdout).stdout == cache.read_bytes()
    with cache.open("rb") as file:
        assert process("compress", "-", "--codec", "raw", stdin=file).stdout == packed.stdout


def test_the_summary_tells_sizes_codec_and_the_worst_layers(cache: Path, capsys: Capture) -> None:
    assert command("compress", cache) == 0
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    for word in ("kv.safetensors:", "%", "kv.safetensors.kvz", "cachegen", "key 0.", "value 0.", "(layer "):
        assert word in err


def test_quiet_is_quiet_and_errors_are_heard_all_the_same(cache: Path, capsys: Capture) -> None:
    assert command("compress", cache, "-q") == 0
    assert capsys.readouterr() == ("", "")
    assert command("compress", cache, "-q") == 5
    assert "exists" in capsys.readouterr().err


def test_an_existing_target_is_refused_without_f_and_nobody_is_asked(cache: Path, capsys: Capture) -> None:
    target = Path(f"{cache}.kvz")
    target.write_bytes(b"precious")
    assert command("compress", cache) == 5
    assert target.read_bytes() == b"precious" and "-f" in capsys.readouterr().err
    assert command("compress", cache, "-f") == 0
    assert target.read_bytes() != b"precious"


def test_the_input_is_never_the_output(cache: Path) -> None:
    before = cache.read_bytes()
    (cache.parent / "link").hardlink_to(cache)
    for target in (cache, cache.parent / "link"):
        assert command("compress", cache, "-f", "-o", target) == 5
    assert cache.read_bytes() == before


def test_many_inputs_go_on_past_a_bad_one_and_say_so(cache: Path, capsys: Capture) -> None:
    other = cache_file(cache.parent / "other.safetensors", seed=8)
    (cache.parent / "bad").write_bytes(b"no cache at all")
    assert command("compress", cache, cache.parent / "missing", cache.parent / "bad", other) == 6
    assert {"kv.safetensors.kvz", "other.safetensors.kvz"} <= set(names(cache.parent))
    assert "bad.kvz" not in names(cache.parent)
    assert "2 of 4 inputs failed, 2 compressed" in capsys.readouterr().err


@pytest.mark.parametrize("target", [["-c"], ["-o", "one.kvz"], ["-o", "-"]])
def test_many_inputs_never_go_into_one_output(cache: Path, target: list[str]) -> None:
    assert command("compress", cache, cache, *target) == 2
    assert names(cache.parent) == ["kv.safetensors"]


def test_rm_removes_the_source_once_its_output_has_been_read_back(cache: Path) -> None:
    original = cache.read_bytes()
    assert command("compress", cache, "--codec", "raw", "--rm") == 0
    assert names(cache.parent) == ["kv.safetensors.kvz"]
    assert command("decompress", f"{cache}.kvz", "--rm") == 0
    assert names(cache.parent) == ["kv.safetensors"] and cache.read_bytes() == original


def test_rm_keeps_the_source_when_the_output_does_not_read_back(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = kvzip.api.compress

    def damaging(source: str, target: str, **options: object) -> object:
        report = real(source, target, **options)
        with Path(target).open("r+b") as file:
            file.seek(-200, os.SEEK_END)
            file.write(b"\xff" * 8)
        return report

    monkeypatch.setattr(kvzip.api, "compress", damaging)
    assert command("compress", cache, "--rm") == 3
    assert cache.exists()


def test_rm_keeps_the_compressed_file_when_the_restored_one_differs(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kvzip.api.decompress

    def damaging(source: str, target: str, **options: object) -> object:
        report = real(source, target, **options)
        with Path(target).open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\x11\x22\x33\x44")
        return report

    monkeypatch.setattr(kvzip.api, "decompress", damaging)
    assert command("compress", cache, "--codec", "raw", "--rm") == 0
    assert command("decompress", f"{cache}.kvz", "--rm") == 1
    assert Path(f"{cache}.kvz").exists()


@pytest.mark.parametrize(
    "options", [["-c"], ["-o", "-"], ["-o", "/dev/null"], ["-k"]], ids=["stdout", "dash", "device", "keep"]
)
def test_rm_is_refused_where_nothing_would_be_left(cache: Path, options: list[str]) -> None:
    assert command("compress", cache, "--rm", *options) == 2
    assert cache.exists()


def test_rm_is_refused_for_a_part_of_a_cache_and_for_a_test(cache: Path) -> None:
    assert command("compress", cache) == 0
    for options in (["--layers", "0"], ["--tokens", ":8"], ["-t"]):
        assert command("decompress", f"{cache}.kvz", "-f", "--rm", *options) == 2
    assert Path(f"{cache}.kvz").exists()


def test_decompress_needs_a_name_that_tells_its_target(cache: Path, capsys: Capture) -> None:
    assert command("compress", cache, "-o", cache.parent / "cache.bin") == 0
    assert command("decompress", cache.parent / "cache.bin") == 2
    assert "-o" in capsys.readouterr().err


def test_a_part_keeps_the_names_with_smaller_shapes(cache: Path) -> None:
    assert command("compress", cache, "--codec", "raw", "--block-tokens", 64) == 0
    part = cache.parent / "part"
    assert command("decompress", f"{cache}.kvz", "--layers", "1:", "--tokens", "60:70", "-o", part) == 0
    found, whole = safetensors.numpy.load_file(part), safetensors.numpy.load_file(cache)
    assert set(found) == {name for name in whole if "layers.0" not in name}
    assert (found["layers.2.value"] == whole["layers.2.value"][:, 60:70]).all()


@pytest.mark.parametrize("text", ["", "x", "3:3", "5:2", "-1:4", "1:2:3", ":"])
def test_a_range_that_says_nothing_is_a_usage_error(cache: Path, text: str) -> None:
    assert command("compress", cache) == 0
    expected = 0 if text == ":" else 2
    assert command("decompress", f"{cache}.kvz", f"--tokens={text}", "-f") == expected


def test_t_decodes_and_writes_nothing(cache: Path, capsys: Capture) -> None:
    """What it would leave undone is refused."""
    assert command("compress", cache, "--rm") == 0
    for given in ("-o", "--layers", "--tokens", "--member", "--level", "--expect-model", "--expect-tokens"):
        assert command("decompress", "-t", f"{cache}.kvz", given, "0") == 2
        assert given in capsys.readouterr().err
    assert command("decompress", "-t", f"{cache}.kvz") == 0
    assert names(cache.parent) == ["kv.safetensors.kvz"]


def test_of_several_caches_in_a_file_one_must_be_named(cache: Path, capsys: Capture) -> None:
    other = cache_file(cache.parent / "other", seed=8)
    both = cache.parent / "both.kvz"
    both.write_bytes(b"".join(process("compress", "-c", "--codec", "raw", path).stdout for path in (cache, other)))
    target = cache.parent / "back"
    for verb in (("decompress", "-o", target), ("export", "-o", target), ("verify", "--against", cache)):
        capsys.readouterr()
        assert command(*verb, both) == 2
        assert "--member 0" in capsys.readouterr().err
    assert command("decompress", both, "--member", 1, "-o", target) == 0
    assert target.read_bytes() == other.read_bytes()
    assert command("verify", both, "--deep") == 0
    assert command("verify", both, "--member", 1, "--against", other, "--fail-above", 0) == 0
    for number, path in enumerate((cache, other)):
        one = path.with_suffix(".one.kvz")
        assert command("compress", path, "--codec", "raw", "-o", one) == 0
        assert command("export", one, "-o", f"{one}.blob") == 0
        assert command("export", both, "--member", number, "-f", "-o", target) == 0
        assert target.read_bytes() == Path(f"{one}.blob").read_bytes()


@pytest.mark.parametrize(
    ("behind", "code"), [("another cache", 2), ("half a cache", 2), ("a few of its bytes", 3), ("bytes", 3)]
)
def test_what_comes_behind_the_cache_in_a_pipe_leaves_no_target(cache: Path, behind: str, code: int) -> None:
    """Nor what was there: neither is replaced before the pipe's end is known."""
    one = process("compress", "-c", "--codec", "raw", cache).stdout
    rest = {
        "another cache": one,
        "half a cache": one[: len(one) // 2],
        "a few of its bytes": one[:5],
        "bytes": b"anything",
    }[behind]
    target = cache.parent / "back"
    assert process("decompress", "-o", target, input=one + rest).returncode == code
    assert names(cache.parent) == ["kv.safetensors"]
    target.write_bytes(b"mine")
    assert process("decompress", "-f", "-o", target, input=one + rest).returncode == code
    assert target.read_bytes() == b"mine"
    assert process("decompress", "-f", "-o", target, input=one).returncode == 0
    assert target.read_bytes() == cache.read_bytes()
    if "cache" in behind:
        assert process("decompress", "-f", "--member", 0, "-o", target, input=one + rest).returncode == 0


def test_a_source_that_goes_on_in_a_pipe_leaves_no_target(cache: Path) -> None:
    """Whether it is read once or goes through a temporary file."""
    for codec in ("raw", "kvtc"):
        options = ["--codec", codec, "-o", cache.parent / "kv.kvz"]
        assert process("compress", *options, input=cache.read_bytes() + b"more").returncode == 3
        assert names(cache.parent) == ["kv.safetensors"]


def test_options_reach_the_codec(cache: Path, capsys: Capture) -> None:
    given = ["--k-bins", "0-1:32,2-:16", "--v-bins", "0-:8", "--sinks", "4", "--level", "5"]
    assert command("compress", cache, *given) == 0
    capsys.readouterr()
    assert command("inspect", "--json", f"{cache}.kvz") == 0
    (member,) = json.loads(capsys.readouterr().out)["members"]
    (config,) = (codec["config"] for codec in member["codecs"] if codec["name"] == "cachegen")
    assert config["sinks"] == 4
    assert member["channel_specs"] == {
        "key": [{"layers": [0, 1], "bins": 32}, {"layers": [2], "bins": 16}],
        "value": [{"layers": [0, 1, 2], "bins": 8}],
    }


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--codec", "cachgen"], "cachegen"),
        (["--codec", "fp8:scal=head"], "scale"),
        (["--codec", "raw", "--level", "3"], "level"),
        (["--level", "10"], "--level"),
        (["--k-bins", "many"], "k_bins"),
        (["--coder", "huffman"], "huffman"),
        (["--layout", "Q,Z"], "layout"),
        (["--device", "gpu"], "gpu"),
        (["-T", "-1"], "--threads"),
        (["--progress", "loud"], "loud"),
    ],
)
def test_a_wrong_option_is_a_usage_error_that_names_it(
    cache: Path, capsys: Capture, options: list[str], word: str
) -> None:
    assert command("compress", cache, *options) == 2
    assert word in capsys.readouterr().err
    assert names(cache.parent) == ["kv.safetensors"]


def test_mode_and_time_of_a_file_are_kept(cache: Path) -> None:
    cache.chmod(0o640)
    os.utime(cache, ns=(10**18, 10**18))
    assert command("compress", cache) == 0
    found = Path(f"{cache}.kvz").stat()
    assert (found.st_mode & 0o777, found.st_mtime_ns) == (0o640, 10**18)


def test_json_progress_is_one_object_a_line_and_ends_with_the_result(cache: Path, capsys: Capture) -> None:
    assert command("compress", cache, "--progress", "json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines[-2:]] == ["progress", "result"]
    assert lines[-2]["done"] == lines[-2]["total"] - (cache.stat().st_size - _tensor_bytes(cache))
    assert lines[-1]["stored_bytes"] == Path(f"{cache}.kvz").stat().st_size
    assert {error["kind"] for error in lines[-1]["worst_errors"]} == {"key", "value"}
    assert command("compress", cache, "--progress", "json") == 5
    (line,) = [json.loads(line) for line in capsys.readouterr().err.splitlines() if '"error"' in line]
    assert (line["code"], line["exit_code"]) == ("exists", 5)


def test_on_a_terminal_a_bar_appears_when_it_takes_long(
    cache: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvzip.cli.progress.BAR_AFTER", 0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    assert command("compress", cache) == 0
    shown = capsys.readouterr().err
    assert "kv.safetensors" in shown and "kB" in shown.split("\x1b[2K")[0]
    for quiet in (["-q"], ["--progress", "none", "-q"]):
        assert command("compress", cache, "-f", *quiet) == 0
        assert capsys.readouterr().err == ""


def test_what_is_compressed_already_is_not_compressed_again_by_accident(cache: Path, capsys: Capture) -> None:
    assert command("compress", cache) == 0
    assert command("compress", f"{cache}.kvz") == 2
    assert "already" in capsys.readouterr().err


def _tensor_bytes(path: Path) -> int:
    return sum(array.nbytes for array in safetensors.numpy.load_file(path).values())


def test_raw_bytes_get_their_geometry_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LMCache's .data and SGLang's .bin have no header: with shape, dtype and layout they come back byte for byte."""
    source = tmp_path / "chunk.data"
    source.write_bytes(np.random.default_rng(0).bytes(2 * 3 * 40 * 32 * 2))
    told = ["--layout", "kv,L,T,C", "--heads", "2"]
    assert command("compress", source, "--shape", "2,3,40,32", "--dtype", "float16", "--codec", "lossless", *told) == 0
    packed = tmp_path / "chunk.data.kvz"
    assert command("decompress", packed, "-o", tmp_path / "back.data") == 0
    assert (tmp_path / "back.data").read_bytes() == source.read_bytes()
    capsys.readouterr()
    assert command("compress", source) == 3
    assert "--shape" in capsys.readouterr().err
    assert command("inspect", packed) == 0
    assert "3 layers (0-2), keys and values: 40 tokens x 2 heads x 16, float16" in capsys.readouterr().out
    assert command("compress", "-f", source, "--shape", "2,3,41,32", *told) == 2
    assert "needs 15744" in capsys.readouterr().err
    assert command("compress", "-f", source, "--dtype", "float16", *told) == 2
    assert "--dtype: only with --shape" in capsys.readouterr().err
    for wrong in ("2,x", "", "-1,3"):
        assert command("compress", "-f", source, f"--shape={wrong}", *told) == 2
    assert command("compress", "-f", source, "-o", source, "--shape", "2,3,40,32", *told) == 5
    assert source.stat().st_size == 2 * 3 * 40 * 32 * 2


def test_raw_bytes_are_a_reference_and_are_read_back(tmp_path: Path, capsys: Capture) -> None:
    """verify tells the distance from them, by a shape alone or another layout; --rm compares what was restored."""
    numbers = np.random.default_rng(0).standard_normal((2, 3, 40, 32)).astype(np.float16)
    source, packed = tmp_path / "chunk.data", tmp_path / "chunk.data.kvz"
    source.write_bytes(numbers.tobytes())
    shape = ["--shape", "2,3,40,32", "--dtype", "float16"]
    assert command("compress", source, *shape, "--layout", "kv,L,T,C", "--heads", "2", "--codec", "raw") == 0
    capsys.readouterr()
    assert command("verify", packed, "--against", source, *shape, "--fail-above", 0) == 0
    numbers[1, 2] *= 2
    source.write_bytes(np.ascontiguousarray(numbers.transpose(1, 0, 2, 3)).tobytes())
    other = ["--shape", "3,2,40,32", "--dtype", "float16", "--layout", "L,kv,T,C", "--heads", "2"]
    capsys.readouterr()
    assert command("verify", packed, "--against", source, *other) == 0
    said = capsys.readouterr().out.split()
    assert said[said.index("key") + 1 : said.index("value") + 2] == ["0", "0", "layer", "2", "value", "0.5"]
    assert command("verify", packed, "--against", source) == 3
    assert "--shape" in capsys.readouterr().err
    assert command("verify", packed, "--against", source, *shape[2:]) == 2
    assert "--dtype: only with --shape" in capsys.readouterr().err
    assert command("verify", packed, *shape) == 2
    assert "--against" in capsys.readouterr().err
    assert command("decompress", packed, "-f", "--rm") == 0
    assert names(tmp_path) == ["chunk.data"]
