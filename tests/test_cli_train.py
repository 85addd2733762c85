"""Promises of ``kvzip train`` and of ``--profile``: a profile is learned, shown, found, embedded and missed clearly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import kvzip as package
from kvzip.profiles import library
from kvzip.profiles.files import open_caches
from tests import profiles
from tests.cli import kvzip

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

needs_torch = pytest.mark.skipif(torch is None, reason="training needs the extra torch")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(library.ENVIRONMENT, raising=False)


def tensors(seed: int, tokens: int = 300) -> dict[str, np.ndarray]:
    keys, values = profiles.cache(seed, tokens)
    planes = {"key": keys, "value": values}
    return {
        f"layers.{i}.{kind}": np.ascontiguousarray(plane[i].swapaxes(0, 1)).astype(ml_dtypes.bfloat16)
        for kind, plane in planes.items()
        for i in range(profiles.LAYERS)
    }


@pytest.fixture
def caches(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"cache-{seed}.safetensors" for seed in range(3)]
    for seed, path in enumerate(paths):
        save_file(tensors(seed), path)
    return paths


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profiles" / "toy.kvp"
    path.parent.mkdir()
    profiles.profile().write(path)
    return path


def report(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------------------------------------ train


@needs_torch
def test_train_learns_says_and_shows(
    caches: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """The rotation is found and said, data and gain are told, and the profile makes files smaller."""
    out = tmp_path / "model.kvp"
    assert kvzip("train", *caches, "-o", out, "--group", 2, "--model", "toy", "--json") == 0
    captured = capsys.readouterr()
    assert "theta 10000, half-split" in captured.err
    told = json.loads(captured.out)
    assert told["trained_on"] | {"bits": 0, "bits_plain": 0} == {
        "caches": 3, "tokens": 3 * 299, "held_out": 1, "bits": 0, "bits_plain": 0,
    }  # fmt: skip
    assert 0 < told["trained_on"]["bits"] < told["trained_on"]["bits_plain"]
    assert kvzip("inspect", out) == 0
    shown = capsys.readouterr().out
    assert told["hash"] in shown
    assert "toy" in shown
    assert "0-1" in shown
    assert kvzip("inspect", "--json", out) == 0
    assert report(capsys)["hash"] == told["hash"]
    for extra in ([], ["--profile", out]):
        target = tmp_path / f"{len(extra)}.kvz"
        assert kvzip("compress", caches[0], "-o", target, "--codec", "kvtc", *extra) == 0
    assert (tmp_path / "2.kvz").stat().st_size < 0.7 * (tmp_path / "0.kvz").stat().st_size


@needs_torch
def test_train_takes_compressed_caches_and_goes_on(caches: list[Path], tmp_path: Path) -> None:
    """A lossless ``.kvz`` teaches what its source does; ``--state`` gives the same profile again."""
    packed = []
    for path in caches:
        packed.append(path.with_suffix(".kvz"))
        assert kvzip("compress", path, "-o", packed[-1], "--codec", "lossless") == 0
    learned = []
    for number, names in enumerate((caches, packed, packed)):
        out = tmp_path / f"{number}.kvp"
        state = ["--state", tmp_path / "state"] if number else []
        assert kvzip("train", *names, "-o", out, "--rope", "theta=1e4", *state) == 0
        learned.append(library.load(out).groups[0].vectors)
    assert np.array_equal(learned[0], learned[1])
    assert np.array_equal(learned[1], learned[2])


@needs_torch
def test_train_reads_a_model_configuration(
    caches: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 4, "rope_theta": 1e4, "model_type": "llama"}))
    out = tmp_path / "model.kvp"
    assert kvzip("train", *caches, "-o", out, "--model-config", config, "--rank", 3, "--dtype", "bfloat16") == 0
    found = library.load(out)
    assert found.ropes.of(3) == profiles.ROPE
    assert [group.rank for group in found.groups] == [3]
    assert kvzip("train", *caches, "-o", out, "-f", "--model-config", config, "--rope", "none") == 2
    config.write_text("[]")
    assert kvzip("train", *caches, "-o", out, "-f", "--model-config", config) == 2
    assert "config.json" in capsys.readouterr().err


@needs_torch
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--step", "0"], 2, "--step"),
        (["--dtype", "int3"], 2, "int3"),
        (["--device", "abacus"], 2, "abacus"),
        (["--rope", "theta=no"], 2, "RoPE"),
    ],
)
def test_train_refuses_what_makes_no_sense(
    caches: list[Path], tmp_path: Path, arguments: list[str], code: int, says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "model.kvp"
    assert kvzip("train", *caches, "-o", out, *arguments) == code
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_train_without_torch_names_the_extra(
    caches: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert kvzip("train", *caches, "-o", tmp_path / "model.kvp") == 4
    assert "kvzip[torch]" in capsys.readouterr().err


def test_an_error_names_the_cache_that_it_is_about(
    caches: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvzip.profiles.train.check_device", lambda _: None)
    gone = str(tmp_path / "gone.kvz")
    assert kvzip("train", caches[0], gone, caches[1], "-o", tmp_path / "x.kvp", "--progress", "json") == 1
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["input"] == gone


def test_train_does_not_overwrite(caches: list[Path], profile: Path) -> None:
    assert kvzip("train", *caches, "-o", profile) == 5
    assert kvzip("train", *caches, "-o", caches[0], "-f") == 5


# ------------------------------------------------------------------------------------------------ caches in files


@pytest.mark.parametrize("layout", ["stacked", "batched", "kvz"])
def test_sources_are_planes_whatever_the_file(layout: str, tmp_path: Path) -> None:
    """Layers in one tensor, sequences of a batch and members of a ``.kvz`` are read as they are."""
    keys, values = (array.astype(np.float16) for array in profiles.cache(0, 40))
    path = tmp_path / "cache.safetensors"
    names = [f"{path}"]
    if layout == "stacked":
        save_file({"kv": np.stack([keys, values], axis=1)}, path)  # L, kv, T, H, D
    elif layout == "batched":
        both = {"k": np.stack([keys, keys + 1]), "v": np.stack([values, values + 1])}  # B, L, T, H, D
        save_file({f"layers.{i}.{n}": np.ascontiguousarray(both[n[0]][:, i].swapaxes(1, 2)) for i in range(4)
                   for n in ("key", "value")}, path)  # fmt: skip
        names = [f"{path}, sequence 0", f"{path}, sequence 1"]
    else:
        save_file({f"layers.{i}.{n}": np.ascontiguousarray(a[i].swapaxes(0, 1)) for i in range(4)
                   for n, a in (("key", keys), ("value", values))}, path)  # fmt: skip
        one = package.compress(path, codec="raw")
        path = tmp_path / "cache.kvz"
        path.write_bytes(one + one)
        names = [str(path)] * 2
    sources = open_caches(str(path), layout="L,kv,T,H,D" if layout == "stacked" else None)
    assert [source.name for source in sources] == names
    for number, source in enumerate(sources):
        assert (source.tokens, source.geometry.layers) == (40, 4)
        more = number if layout == "batched" else 0
        assert np.array_equal(source.plane(2, "key"), keys[2] + np.float16(more))
        assert np.array_equal(source.plane(3, "value"), values[3] + np.float16(more))


def test_lossy_sources_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.kvz"
    path.write_bytes(package.compress(tensors(0), codec="cachegen"))
    notices: list[str] = []
    open_caches(str(path), notice=notices.append)
    assert any("cachegen" in notice for notice in notices)


# ------------------------------------------------------------------------------------------------ profiles in use


def test_a_file_needs_its_profile(caches: list[Path], profile: Path, tmp_path: Path, capsys: Any) -> None:
    """Beside the file, by --profile, by the environment, or inside; else an error that names the hash."""
    alone = tmp_path / "alone"
    alone.mkdir()
    kvz, out = alone / "a.kvz", tmp_path / "restored.safetensors"
    assert kvzip("compress", caches[0], "-o", kvz, "--codec", "kvtc", "--profile", profile) == 0
    capsys.readouterr()
    for verb in (["decompress", kvz, "-o", out], ["verify", "--deep", kvz], ["decompress", "-t", kvz]):
        assert kvzip(*verb) == 4
        assert library.load(profile).hash[:16] in capsys.readouterr().err
        assert kvzip(*verb, "--profile", profile) == 0
        assert kvzip(*verb, "--profile", profile.parent, *(["-f"] if "-o" in verb else [])) == 0
    assert kvzip("decompress", kvz, "-o", out, "-f", "--layers", "1:2", "--profile", profile) == 0
    profile.rename(alone / "renamed.kvp")
    assert kvzip("decompress", kvz, "-o", out, "-f") == 0


def test_an_embedded_profile_stands_alone(caches: list[Path], profile: Path, tmp_path: Path, capsys: Any) -> None:
    """By file and by pipe, after repair, and seen by inspect; the numbers are those of the file without it."""
    lean, whole = tmp_path / "lean.kvz", tmp_path / "whole.kvz"
    options = ["--codec", "kvtc", "--profile", profile]
    assert kvzip("compress", caches[0], "-o", lean, *options) == 0
    assert kvzip("compress", caches[0], "-o", whole, *options, "--embed-profile") == 0
    expected = package.decompress(lean, profile=profile)
    digest = library.load(profile).hash
    profile.unlink()
    library._read.cache_clear()
    assert whole.stat().st_size > lean.stat().st_size
    repaired = tmp_path / "repaired.kvz"
    assert kvzip("repair", whole, "-o", repaired) == 0
    for source in (whole, repaired):
        found = package.decompress(source)
        assert all(np.array_equal(found[name], array) for name, array in expected.items())
    with whole.open("rb") as file, package.open(file) as cache:
        assert np.array_equal(cache.key(1), expected["layers.1.key"].swapaxes(0, 1))
    capsys.readouterr()
    assert kvzip("inspect", "--json", whole) == 0
    (member,) = report(capsys)["members"]
    assert member["profile"] == digest
    assert member["bytes_per_component"]["profile"] > 1000


def test_embedding_needs_a_profile(caches: list[Path], tmp_path: Path, capsys: Any) -> None:
    for codec in ("kvtc:rope=none", "cachegen"):
        assert kvzip("compress", caches[0], "-o", tmp_path / "a.kvz", "--codec", codec, "--embed-profile") == 2
        assert "no codec of the file uses a profile" in capsys.readouterr().err
    assert not (tmp_path / "a.kvz").exists()


def test_profiles_that_do_not_fit_are_refused(profile: Path, tmp_path: Path, capsys: Any) -> None:
    """Another geometry, a missing file, no profile: each is told, nothing is written."""
    path, out = tmp_path / "other.safetensors", tmp_path / "a.kvz"
    array = np.zeros((3, 8, 16), np.float16)
    save_file({f"layers.{i}.{kind}": array for i in range(2) for kind in ("key", "value")}, path)
    for given, code, says in (
        (profile, 2, "heads=3"),
        (tmp_path / "none.kvp", 2, "no such profile"),
        (path, 3, "no profile"),
        ("0" * 64, 4, "0000000000000000"),
    ):
        assert kvzip("compress", path, "-o", out, "--codec", "kvtc", "--profile", given) == code
        assert says in capsys.readouterr().err
        assert not out.exists()
