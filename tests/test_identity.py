"""A cache says which model and tokens it belongs to, and is not handed out for any other."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import kvzip
from kvzip.container import Reader
from kvzip.errors import KvzipError, UsageError
from kvzip.identity import check, describe, identify, read_token_ids
from tests.cli import TOKENS, cache_file
from tests.cli import kvzip as command

Capture = pytest.CaptureFixture[str]
IDS = [5, 0, 151643, 7]


def test_the_hash_is_of_little_endian_64_bit_integers() -> None:
    """So that any program can make it, from ids of any width."""
    expected = hashlib.sha256(b"".join(number.to_bytes(8, "little") for number in IDS)).hexdigest()
    found = identify("m", IDS)
    assert found == {"model": "m", "token_count": 4, "token_sha256": expected}
    for dtype in (np.int32, np.uint32, np.int64, ">i8"):
        assert identify(token_ids=np.array([IDS], dtype)) == {
            key: found[key] for key in ("token_count", "token_sha256")
        }
    assert identify() == {}


@pytest.mark.parametrize(
    ("model", "tokens", "code"),
    [
        ("m", IDS, ""),
        ("m", None, ""),
        (None, [*IDS, 9], ""),
        ("M", None, "wrong-model"),
        (None, IDS[:3], "wrong-tokens"),
        (None, [*IDS[:3], 8], "wrong-tokens"),
        (None, [1, *IDS], "wrong-tokens"),
    ],
)
def test_a_cache_of_the_first_tokens_is_as_good(model: str | None, tokens: list[int] | None, code: str) -> None:
    """A prefix is valid on its own; more tokens than expected, or others, are not."""
    assert outcome(identify("m", IDS), model, tokens) == code


def test_what_is_not_recorded_cannot_be_checked() -> None:
    assert outcome({}, "m", None) == outcome(identify("m"), None, IDS) == outcome({"token_count": "4"}, None, IDS)
    assert outcome({}, "m", None) == "no-identity"
    assert outcome({"token_count": -1, "token_sha256": 3, "model": []}, None, IDS) == "wrong-tokens"
    assert outcome({}, None, None) == ""


def outcome(identity: dict[str, Any], model: str | None, tokens: list[int] | None) -> str:
    try:
        check(identity, model, tokens)
    except KvzipError as error:
        assert error.exit_code == 1
        return error.code
    return ""


def test_token_ids_are_read_from_what_programs_write(tmp_path: Path) -> None:
    array = np.array(IDS)
    (tmp_path / "a.txt").write_text("5 0\n151643, 7\n")
    (tmp_path / "b.json").write_text(json.dumps(IDS))
    (tmp_path / "c.json").write_text(json.dumps([IDS], indent=1))
    np.save(tmp_path / "d.npy", array.astype(np.int32)[None])
    safetensors.numpy.save_file({"x": np.zeros(3), "input_ids": array}, tmp_path / "e.safetensors")
    for path in tmp_path.iterdir():
        np.testing.assert_array_equal(read_token_ids(path), array)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"1 2 x"),
        ("a.txt", b"\xff\xfe"),
        ("a.txt", b"1 99999999999999999999"),
        ("a.json", b'{"ids": [1]}'),
        ("a.npy", b"not numpy"),
        (
            "a.npy",
            b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }" + b" " * 59 + b"\n(.",
        ),
        ("a.safetensors", safetensors.numpy.save({"x": np.zeros(3)})),
        ("a.safetensors", safetensors.numpy.save({"token_ids": np.zeros(3)})),
        ("a.safetensors", safetensors.numpy.save({"token_ids": np.zeros((2, 3), np.int64)})),
        ("a.safetensors", safetensors.numpy.save({"token_ids": np.full(3, 1 << 63, np.uint64)})),
    ],
)
def test_what_holds_no_token_ids_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    """Pickled objects in a .npy among them: they are never loaded."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=name) as error:
        read_token_ids(tmp_path / name)
    assert error.value.code == "token-ids"


def test_from_python(tmp_path: Path) -> None:
    values = np.zeros((2, 4, 8), np.float16)
    data = kvzip.compress({"layers.0.key": values, "layers.0.value": values}, identity=identify("m", IDS))
    assert len(kvzip.decompress(data, expect_model="m", expect_tokens=IDS)) == 2
    with pytest.raises(KvzipError) as error:
        kvzip.decompress(data, tmp_path / "out", expect_model="other")
    assert error.value.code == "wrong-model"
    assert list(tmp_path.iterdir()) == []


def test_from_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    """Recorded from a file or from a tensor of the cache, shown by inspect, checked by decompress."""
    cache = cache_file(tmp_path / "kv.safetensors")
    ids = tmp_path / "ids.txt"
    ids.write_text(" ".join(map(str, range(TOKENS))))
    packed = tmp_path / "a.kvz"
    assert command("compress", cache, "--model", "qwen", "--token-ids", "@input_ids", "-o", packed) == 0
    assert command("compress", cache, "--model", "qwen", "--token-ids", ids, "-o", tmp_path / "b.kvz") == 0
    assert packed.read_bytes() == (tmp_path / "b.kvz").read_bytes()
    assert Reader.open(packed).header.identity == identify("qwen", np.arange(TOKENS))
    assert command("inspect", packed) == 0
    assert f"qwen, {TOKENS} tokens (SHA-256 " in capsys.readouterr().out
    target = tmp_path / "out.safetensors"
    checks = ["-o", target, "-f", "--expect-model", "qwen", "--expect-tokens", ids]
    assert command("decompress", packed, *checks) == 0
    target.unlink()
    ids.write_text("1 2 3")
    assert command("decompress", packed, *checks) == 1
    assert "are expected" in capsys.readouterr().err
    assert command("decompress", packed, "-o", target, "--expect-model", "llama") == 1
    assert not target.exists()
    assert command("decompress", packed, "-t", "--expect-model", "llama") == 2
    assert command("compress", cache, "--token-ids", "@nothing", "-o", target) == 2


def test_the_line_for_people() -> None:
    assert describe({}) == ""
    assert describe({"model": "m"}) == "m"
    assert describe(identify("m", IDS)).startswith("m, 4 tokens (SHA-256 ")
    assert describe({"revision": "main"}) == '{"revision": "main"}'
