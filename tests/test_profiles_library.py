"""Promises about where profiles are found: by path, by hash, in the places that are named; never the wrong one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvzip.errors import CorruptError, UnsupportedError, UsageError
from kvzip.profiles import library
from kvzip.profiles.library import Embedded
from kvzip.profiles.profile import Profile, from_bytes
from tests import profiles


@pytest.fixture(scope="module")
def toy() -> Profile:
    return profiles.profile()


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of the test's own, and nothing in the environment."""
    monkeypatch.setattr(library, "data_folder", lambda: tmp_path / "data")
    monkeypatch.delenv(library.ENVIRONMENT, raising=False)
    (tmp_path / "data").mkdir()
    return tmp_path


def put(profile: Profile, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.write(path)
    return path


def test_found_by_path_once(toy: Profile, places: Path) -> None:
    """A file is read when it is first asked for, and again only after it has changed."""
    path = put(toy, places / "toy.kvp")
    found = library.find(str(path))
    assert found.hash == toy.hash
    assert library.find(path) is found
    put(replace(toy, model="another"), path)
    os.utime(path, ns=(1, 1))
    assert library.find(path).model == "another"


@pytest.mark.parametrize("digits", [8, 20, 64])
def test_found_by_hash_in_every_place(toy: Profile, places: Path, digits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data folder, files and folders of the environment, and what is offered, by whole hashes and their starts."""
    digest = toy.hash[:digits]
    with pytest.raises(UnsupportedError, match=r"not here.*data"):
        library.find(digest)
    stored = put(toy, places / "data" / "any name.kvp")
    assert library.find(digest.upper()).hash == toy.hash
    moved = stored.rename(places / "elsewhere.kvp")
    for place in (moved, places):
        monkeypatch.setenv(library.ENVIRONMENT, os.pathsep.join(["/no/such/place", str(place)]))
        assert library.find(digest).hash == toy.hash
    monkeypatch.delenv(library.ENVIRONMENT)
    with library.offering([moved]):
        assert library.find(digest).hash == toy.hash
    with library.offering([Embedded("a file", toy.hash, toy.to_bytes)]):
        assert library.find(digest).model == toy.model
    with pytest.raises(UnsupportedError):
        library.find(digest)


def test_missing_hash_says_where_it_looked(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the hash and every place, and the error its code."""
    monkeypatch.setenv(library.ENVIRONMENT, "/one" + os.pathsep + "/two")
    with pytest.raises(UnsupportedError, match=r"0123456789abcdef .*/one, /two, .*data") as caught:
        library.find("0123456789abcdef" * 4)
    assert caught.value.code == "profile-missing"


def test_several_matches_are_refused(toy: Profile, places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight digits that two profiles share do not choose one of them; copies of one profile are no conflict."""
    put(toy, places / "data" / "a.kvp")
    put(toy, places / "data" / "b.kvp")
    assert library.find(toy.hash[:8]).hash == toy.hash
    monkeypatch.setattr(library, "_claimed", lambda path: toy.hash[:8] + path.stem * 56)
    with pytest.raises(UsageError, match="several"):
        library.find(toy.hash[:8])


def test_other_files_are_passed_over(toy: Profile, places: Path) -> None:
    """Text, other tensors and cut files in a folder do not keep a profile from being found."""
    data = places / "data"
    (data / "0.kvp").write_text("hello")
    save_file({"x": np.zeros(3)}, data / "1.kvp")
    (data / "2.kvp").write_bytes(toy.to_bytes()[:-1])
    (data / "3.kvp").mkdir()
    put(toy, data / "z.kvp")
    assert library.find(toy.hash).hash == toy.hash


def test_a_changed_profile_is_never_taken(toy: Profile, places: Path) -> None:
    """A file that claims a hash but holds other numbers is damaged, in a folder as in a ``.kvz``."""
    path = put(toy, places / "data" / "toy.kvp")
    changed = path.read_bytes()
    numbers = load_file(path)["0.vectors"].tobytes()
    at = changed.index(numbers)
    changed = changed[:at] + bytes([changed[at] ^ 1]) + changed[at + 1 :]
    path.write_bytes(changed)
    with pytest.raises(CorruptError, match=r"toy\.kvp"):
        library.find(toy.hash)
    for data in (changed, toy.to_bytes()[:-1], b"", b"\x02\0\0\0\0\0\0\0{}", profiles.profile(seed=1).to_bytes()):
        with library.offering([Embedded("in x.kvz", toy.hash, lambda data=data: data)]), pytest.raises(
            CorruptError, match=r"in x\.kvz"
        ):  # fmt: skip
            library.find(toy.hash)


@pytest.mark.parametrize("name", ["none.kvp", "folder", "\0"])
def test_no_such_file(places: Path, name: str) -> None:
    (places / "folder").mkdir()
    with pytest.raises(UsageError, match="profile"):
        library.find(f"{places}/{name}")


def test_what_is_no_hash_is_refused() -> None:
    for text in ("0123456", "g" * 64, "0" * 65, ""):
        with pytest.raises(UsageError, match="hash"):
            library.by_hash(text)


def test_bytes_round_trip(toy: Profile) -> None:
    """A profile read from memory is the one that was written."""
    back = from_bytes(toy.to_bytes(), "memory")
    assert back.hash == toy.hash
    assert back.to_bytes() == toy.to_bytes()


def test_data_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(library.sys, "platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", "/x")
    assert library.data_folder() == Path("/x/kvzip/profiles")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert library.data_folder().parts[-4:] == (".local", "share", "kvzip", "profiles")[-4:]
