"""Targets appear complete or not at all, and nothing is overwritten or spilt by accident."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from kvzip.errors import KvzipError, RefusedError
from kvzip.output import create_file, create_folder


def test_a_finished_file_is_there_with_its_sources_mode_and_time(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    source.chmod(0o640)
    os.utime(source, ns=(10**18, 10**18))
    with create_file(tmp_path / "out", like=source.stat(), sync=True) as output:
        output.write(b"done")
        assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob(".out*")] == [0o600]
        assert not (tmp_path / "out").exists()
    found = (tmp_path / "out").stat()
    assert (tmp_path / "out").read_bytes() == b"done"
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o640, 10**18)


def test_without_a_source_file_the_umask_decides(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    with create_file(tmp_path / "out") as output:
        output.write(b"x")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_no_trace_and_an_old_file_untouched(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(error), create_file(tmp_path / "out", force=True) as output:
        output.write(b"half")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_bytes() == b"old"


def test_an_existing_target_is_refused_and_force_replaces_it(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(RefusedError, match="exists already") as caught, create_file(tmp_path / "out"):
        pass
    assert caught.value.code == "exists"
    with create_file(tmp_path / "out", force=True) as output:
        output.write(b"new")
    assert (tmp_path / "out").read_bytes() == b"new"


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(RefusedError), create_file(tmp_path / "out") as output:
        output.write(b"mine")
        (tmp_path / "out").write_bytes(b"theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_bytes() == b"theirs"


def test_the_source_is_never_its_own_target_even_by_link_and_force(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"precious")
    (tmp_path / "hard").hardlink_to(source)
    (tmp_path / "soft").symlink_to(source)
    for name in ("source", "hard", "soft"):
        with pytest.raises(RefusedError) as caught, create_file(tmp_path / name, force=True, sources=[source]):
            pass
        assert caught.value.code == "same-file"
    assert source.read_bytes() == b"precious"


def test_a_links_target_is_replaced_and_the_link_kept(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with create_file(tmp_path / "link", force=True) as output:
        output.write(b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"


def test_a_fifo_is_written_directly(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    with create_file(fifo) as output:
        output.write(b"through")
    reader.join(5)
    assert got == [b"through"] and stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_device_is_written_directly_and_its_errors_are_seen() -> None:
    with pytest.raises(KvzipError, match="/dev/full: cannot be written: No space"), create_file("/dev/full") as output:
        output.write(b"x")


def test_an_empty_name_is_not_the_current_folder() -> None:
    for create in (create_file, create_folder):
        with pytest.raises(KvzipError, match="'': cannot be written: No such file"), create("", force=True):
            pass


def test_a_missing_folder_is_an_error_that_names_the_target(tmp_path: Path) -> None:
    with pytest.raises(KvzipError, match="nowhere"), create_file(tmp_path / "nowhere" / "out"):
        pass


def test_a_folder_appears_whole_and_replaces_an_old_one_only_at_the_end(tmp_path: Path) -> None:
    with create_folder(tmp_path / "out") as folder:
        (folder / "a").write_bytes(b"1")
        assert not (tmp_path / "out").exists()
    with pytest.raises(RefusedError), create_folder(tmp_path / "out"):
        pass
    with pytest.raises(ValueError, match="half"), create_folder(tmp_path / "out", force=True) as folder:
        raise ValueError("half")
    assert (tmp_path / "out" / "a").exists()
    with create_folder(tmp_path / "out", force=True, sync=True) as folder:
        (folder / "b").write_bytes(b"2")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b"]
