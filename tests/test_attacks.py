"""Every file of attacks/ ends as its README says: a named error, its exit code, no output, little memory, at once."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

import kvzip
from attacks.make import FOLDER, Attack, all_attacks, readme
from kvzip.errors import LONGEST, KvzipError
from tests.cli import kvzip as command
from tests.tensor_files import Pipe

ATTACKS = all_attacks()
EVERY = pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
SECONDS = 1.0
MEGABYTES = 64

Capture = pytest.CaptureFixture[str]


def test_the_folder_holds_what_its_page_says() -> None:
    """The reasons are those of the files that are there; ``python -m attacks.make`` makes both."""
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == readme(ATTACKS)
    found = {path for path in FOLDER.glob("*/*") if path.suffix in (".safetensors", ".kvz")}
    assert found == {attack.path for attack in ATTACKS}
    assert sum(path.stat().st_size for path in found) < 1 << 20


@EVERY
def test_the_python_api_names_the_error(attack: Attack) -> None:
    """From a file and from a pipe; of a pipe some errors show elsewhere, and are named all the same."""
    assert _outcome(attack, attack.path) == (attack.code, attack.exit_code)
    code, exit_code = _outcome(attack, Pipe(attack.data))
    assert bool(code) == bool(attack.code)
    assert exit_code in (attack.exit_code, 2, 3, 4)


def _outcome(attack: Attack, source: Path | Pipe) -> tuple[str, int]:
    try:
        if attack.path.suffix == ".kvz":
            kvzip.decompress(source)  # type: ignore[call-overload]
        else:
            kvzip.compress(source)  # type: ignore[call-overload]
    except KvzipError as error:
        assert error.code != type(error).default_code
        assert len(str(error)) < LONGEST + 200  # the file's name comes on top
        return error.code, error.exit_code
    return "", 0


@EVERY
def test_the_command_line_ends_with_it(attack: Attack, tmp_path: Path, capsys: Capture) -> None:
    """The code in a job's JSON lines, the exit code, no output beside it, and nothing written elsewhere."""
    source = tmp_path / attack.path.name
    source.write_bytes(attack.path.read_bytes())
    kvz = source.suffix == ".kvz"
    target = tmp_path / "out"
    tracemalloc.start()
    begin = time.process_time()
    try:
        assert command("decompress" if kvz else "compress", source, "-o", target, "--progress=json") == attack.exit_code
        took, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [event["code"] for event in events if event["event"] == "error"] == [attack.code] * bool(attack.code)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source.name, *["out"] * (not attack.code)])
    assert took < SECONDS
    assert peak < MEGABYTES << 20


@EVERY
def test_looking_at_it_is_harmless(attack: Attack, capsys: Capture) -> None:
    """``inspect`` and ``verify`` meet the same error or none, and print no control characters."""
    expected = (attack.exit_code, 0)
    assert command("inspect", "-v", attack.path) in expected
    if attack.path.suffix == ".kvz":
        assert command("verify", attack.path) == (0 if attack.hidden else attack.exit_code)
    shown = "".join(capsys.readouterr())
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_the_fresh_attacks_are_as_good_as_the_stored_ones() -> None:
    """What make.py makes now, by the code as it is, meets the same errors: the files are no relics."""
    for attack in ATTACKS:
        if attack.path.suffix == ".kvz":
            assert _outcome(attack, io.BytesIO(attack.data)) == (attack.code, attack.exit_code)  # type: ignore[arg-type]
        else:
            assert attack.path.read_bytes() == attack.data


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are the system's")
def test_all_of_them_in_a_process_with_little_memory(tmp_path: Path) -> None:
    """The real command on every file at once, under a limit of its address space: no traceback, no running out."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))"
    script = f"{limit}; from kvzip.cli import main; main()"
    files = [attack for attack in ATTACKS if attack.path.suffix == ".kvz"]
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", "--deep", "-T", "1", *(str(attack.path) for attack in files)],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 6
    assert "Traceback" not in done.stderr
    assert "out of memory" not in done.stderr
    bad = [attack for attack in files if attack.code]
    assert sum(line.startswith("kvzip: ") for line in done.stderr.splitlines()) == len(bad) + 1
