"""What a newcomer tries is answered truthfully: by its own name, in numbers a person wrote, with what to do instead."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import kvzip as api
from kvzip.cli import text
from kvzip.codecs import available_codecs, codec_class
from kvzip.codecs.options import options_of
from kvzip.errors import RefusedError, UsageError
from tests.cli import LAYERS, TOKENS, cache_file, kvzip, process

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return cache_file(tmp_path / "kv.safetensors")


@pytest.fixture
def packed(cache: Path) -> Path:
    assert kvzip("compress", cache, "-q", "--codec", "raw") == 0
    return Path(f"{cache}.kvz")


def test_a_pipe_is_not_read_twice(cache: Path, packed: Path) -> None:
    """Sound data from a pipe is never called damaged."""
    done = process("verify", "--against", cache, input=packed.read_bytes())
    assert done.returncode == 2
    assert b"is a pipe" in done.stderr
    with packed.open("rb") as file:
        assert process("verify", "--against", cache, stdin=file).returncode == 0


@pytest.mark.parametrize(("count", "recorded"), [(TOKENS, TOKENS), (TOKENS + 50, TOKENS), (20, 20)])
def test_token_ids_are_those_of_the_cache(cache: Path, count: int, recorded: int, capsys: Capture) -> None:
    """No more ids are recorded than the cache has tokens, and a count that differs is told."""
    ids = cache.with_name("ids.json")
    ids.write_text(json.dumps(list(range(count))))
    assert kvzip("compress", cache, "--codec", "raw", "--token-ids", ids) == 0
    assert ("token ids for a cache of" in capsys.readouterr().err) == (count != TOKENS)
    with api.open(f"{cache}.kvz") as opened:
        assert opened.header.identity["token_count"] == recorded
    assert kvzip("decompress", f"{cache}.kvz", "--expect-tokens", ids, "-f", "-o", cache.with_name("back")) == 0


def test_kivi_says_when_it_quantized_nothing(cache: Path, capsys: Capture) -> None:
    assert kvzip("compress", cache, "--codec", "kivi:residual=150") == 0
    assert "all 150 tokens are within residual=150: nothing was quantized" in capsys.readouterr().err
    assert kvzip("compress", cache, "--codec", "kivi:residual=64", "-f") == 0
    assert "nothing was quantized" not in capsys.readouterr().err


@pytest.mark.parametrize(("option", "span"), [("--layers", "40:"), ("--tokens", "512:")])
def test_an_open_end_is_told_as_it_was_written(packed: Path, option: str, span: str, capsys: Capture) -> None:
    assert kvzip("decompress", packed, option, span, "-o", packed.with_name("part")) == 2
    assert f"is in {span};" in capsys.readouterr().err


def test_tokens_beyond_the_end_are_an_error_everywhere(packed: Path) -> None:
    """``Cache.key`` refuses what ``decompress`` refuses, and clips what it clips."""
    with api.open(packed) as opened:
        assert opened.key(0, tokens=slice(TOKENS - 1, 1024)).shape[0] == 1
        for read in (opened.key, opened.value):
            with pytest.raises(UsageError, match="no token is in") as error:
                read(0, tokens=slice(512, 1024))
            assert error.value.code == "tokens-range"


def test_the_codecs_are_listed(capsys: Capture) -> None:
    """``--codec help`` and the help name every codec that there is, and no other."""
    assert kvzip("compress", "--codec", "help") == 0
    table = capsys.readouterr().out
    assert {line.split()[0] for line in table.splitlines()[1:]} == set(available_codecs())
    assert kvzip("compress", "--help") == 0
    told = " ".join(capsys.readouterr().out.split())
    classes = {name: codec_class(name) for name in available_codecs()}
    builtin = [name for name, cls in classes.items() if cls.__module__.startswith("kvzip.") and cls.name == name]
    assert all(name in told.partition("--codec NAME")[2][:200] for name in builtin)
    assert kvzip("compress", "--codec", "zip", "kv.safetensors") == 2
    assert "--codec help" in capsys.readouterr().err


def test_the_manual_and_the_table_have_the_same_options(capsys: Capture) -> None:
    """All but those that are found out from the cache."""
    manual = (Path(__file__).parents[1] / "docs" / "cli.md").read_text(encoding="utf-8")
    assert kvzip("compress", "--codec", "help") == 0
    table = {
        words[0]: {word.partition("=")[0] for word in words[1:]}
        for words in map(str.split, capsys.readouterr().out.splitlines())
    }
    for name in ("cachegen", "kvtc", "turboquant", "kivi", "fp8", "int8", "int4"):
        listed = {
            option
            for codecs, options in re.findall(r"^\| ([^|]*) \| ([^|]*) \|", manual, re.M)
            if f"`{name}`" in codecs
            for option in re.findall(r"`(\w+)`", options)
        }
        assert listed == table[name] == options_of(codec_class(name)).keys() - codec_class(name).found


def test_the_result_names_the_codecs_that_were_used(cache: Path, capsys: Capture) -> None:
    assert kvzip("compress", cache, "--k-codec", "int8", "--v-codec", "int4") == 0
    said = capsys.readouterr().err
    assert "keys int8, values int4" in said
    assert "cachegen" not in said
    assert kvzip("compress", cache, "-f", "--k-codec", "int8") == 0
    assert "cachegen, keys int8" in capsys.readouterr().err
    assert kvzip("compress", cache, "-f", "--codec", "naive") == 0
    assert ".kvz), naive, " in capsys.readouterr().err
    numbers = cache.with_name("numbers.safetensors")
    save_file({"layers.0.key": np.ones((2, 9, 4), "i4"), "layers.0.value": np.ones((2, 9, 4), "i4")}, numbers)
    assert kvzip("compress", numbers) == 0
    assert ".kvz), lossless, " in capsys.readouterr().err


def test_layers_that_are_not_there_need_an_open_end(cache: Path, capsys: Capture) -> None:
    assert kvzip("compress", cache, "--layer-codec", "0-99:raw") == 2
    assert f"ends with layer {LAYERS - 1}" in capsys.readouterr().err
    assert kvzip("compress", cache, "--layer-codec", "0-:raw") == 0


def test_an_option_of_another_codec_says_whose_it_is(cache: Path, capsys: Capture) -> None:
    assert kvzip("compress", cache, "--bits", "2") == 2
    assert "--bits belongs to --codec kvtc" in capsys.readouterr().err
    assert kvzip("compress", cache, "--codec", "kvtc", "--coder", "range") == 2
    assert "--coder belongs to --codec cachegen" in capsys.readouterr().err
    assert kvzip("compress", cache, "--k-codec", "kvtc", "--bits", "2") == 2
    assert "as in kvtc:bits=" in capsys.readouterr().err


def test_an_option_is_told_once(cache: Path, capsys: Capture) -> None:
    assert kvzip("compress", cache, "--codec", "cachegen:level=3", "--level", "5") == 2
    assert "both tell level" in capsys.readouterr().err
    assert kvzip("compress", cache, "--codec", "cachegen:level=3,level=5") == 2
    assert "level is given twice" in capsys.readouterr().err


@pytest.mark.parametrize("apart", [("--k-codec", "int8", "--v-codec", "int4"), ("--layer-codec", "0-:int8")])
def test_options_for_a_codec_that_codes_nothing_are_refused(
    cache: Path, apart: tuple[str, ...], capsys: Capture
) -> None:
    assert kvzip("compress", cache, *apart, "--level", "3", "--sinks", "4") == 2
    assert "level, sinks: for codec 'cachegen', which has nothing to code" in capsys.readouterr().err
    assert kvzip("compress", cache, *apart[:2], "--level", "3") == (0 if "--k-codec" in apart else 2)


@pytest.mark.parametrize("value", ["12", "x"])
def test_values_are_refused_in_our_words(cache: Path, value: str, capsys: Capture) -> None:
    for option in ("--level", "--block-tokens"):
        assert kvzip("compress", cache, option, value if value == "x" else f"-{value}") == 2
        said = capsys.readouterr().err
        assert "must be" in said
        assert "Input" not in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("compres",), "'compres'. Did you mean 'compress', 'decompress'? (see 'kvzip --help')\n"),
        (("compress", "--progress", "loud"), "'--progress': 'loud' is not one of 'auto', 'json', 'none'; see"),
        (("compress", "FILE", "--embed-profile"), ": no codec of the file uses a profile that could be embedded\n"),
        (("compress", "FILE", "--heads", "5"), "2 heads, not --heads 5\n"),
        (("compress", "FILE", "--head-dim", "9"), "2 heads, not --head-dim 9\n"),
        (("compress", "FILE", "--heads", "2", "--head-dim", "9"), "2 heads, not --heads 2 --head-dim 9\n"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_said_in_words(cache: Path, arguments: tuple[str, ...], told: str, capsys: Capture) -> None:
    assert kvzip(*(cache if argument == "FILE" else argument for argument in arguments)) == 2
    assert told in capsys.readouterr().err


def test_standard_input_is_called_so_as_a_file_and_as_a_pipe(cache: Path, packed: Path) -> None:
    for verb, path in (("compress", cache), ("decompress", packed), ("verify", packed)):
        path.write_bytes(path.read_bytes()[:2000])
        with path.open("rb") as file:
            for done in (process(verb, stdin=file), process(verb, input=path.read_bytes())):
                assert done.returncode == 3 and done.stderr.startswith(b"kvzip: standard input"), done.stderr
                assert b"stdin" not in done.stderr


def test_an_empty_name_is_no_file(cache: Path, packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Python takes it for the current folder."""
    monkeypatch.chdir(cache.parent)
    before = sorted(cache.parent.iterdir())
    for arguments in [
        *(
            [verb, ""]
            for verb in ("compress", "decompress", "inspect", "verify", "bench", "repair", "import", "export")
        ),
        *(["compress", cache, "-f", option, ""] for option in ("-o", "--profile", "--model-config", "--token-ids")),
        *(["decompress", packed, "-f", option, ""] for option in ("-o", "--profile", "--expect-tokens")),
        *(["bench", cache, option, ""] for option in ("--queries", "--model", "--text", "--plot")),
        *(["train", cache, "-o", name, option, ""] for name in ("", "x") for option in ("--state", "--model-config")),
        ["inspect", packed, "--plot", ""],
        ["verify", packed, "--against", ""],
    ]:
        assert kvzip(*arguments) == 1, arguments
        assert "'': No such file or directory" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        api.compress("")
    assert sorted(cache.parent.iterdir()) == before


@pytest.mark.parametrize(
    "useless", [("-o", "x"), ("-c",), ("--layers", "0"), ("--tokens", ":8"), ("--member", "0"), ("--level", "0")]
)
def test_a_test_refuses_what_it_has_no_use_for(packed: Path, useless: tuple[str, ...], capsys: Capture) -> None:
    assert kvzip("decompress", "-t", packed, *useless) == 2
    assert f"leave out {useless[0]}" in capsys.readouterr().err
    assert kvzip("decompress", "-t", packed) == 0


def test_the_api_gives_no_advice_for_the_command_line(cache: Path, packed: Path, capsys: Capture) -> None:
    with pytest.raises(RefusedError) as error:
        api.compress(cache, packed)
    assert "-f" not in str(error.value)
    assert kvzip("compress", cache) == 5
    assert "use -f to overwrite it" in capsys.readouterr().err
    with pytest.raises(UsageError, match="a codec is a name"):
        api.compress(cache, codec=None)
    with api.open(packed) as opened:
        assert len(repr(opened)) < 200
    assert len(repr(api.compress(cache, packed, codec="raw", force=True))) < 200


def test_one_is_no_plural() -> None:
    assert [text.count(number, "head") for number in (0, 1, 2)] == ["0 heads", "1 head", "2 heads"]


def test_auto_says_that_it_took_a_gpu(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    from tests.emulator.devices import cuda_on_emulator

    monkeypatch.setattr("kvzip.devices._cuda", lambda index: cuda_on_emulator())
    for device, said in (("auto", True), ("cuda", False), ("cpu", False)):
        assert kvzip("compress", "-f", "--device", device, "--codec", "fp8", cache) == 0
        assert ("kvzip: note: running on cuda:0, Emulated GPU" in capsys.readouterr().err) == said
