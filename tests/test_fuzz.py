"""A short run of every fuzz target, and proof that the loop would notice what it is there for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.edits import edit, edit_json, steps
from fuzz.targets import all_targets

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not hasattr(sys, "getdlopenflags"), reason="needs fork and mprotect")

BAD = """\
import ctypes, os, sys
from pathlib import Path
from fuzz import engine
from fuzz.guard import Region

class Bad:
    name = "bad"
    def seeds(self): return ()
    def run(self, inputs):
        for data in inputs:
            if data[:1] == b"\\x07":
                self.misbehave()
    def misbehave(self):
        array = Region(100).place(100, readable=8, at_end={at_end})
        address = array.__array_interface__["data"][0]
        {deed}

engine.FINDINGS, engine.HANG_SECONDS = Path(sys.argv[1]), 1
outcome = engine.fuzz(Bad(), seed=3, batches=1000)
assert outcome.count < 64000
print(outcome.finding)
"""


def test_every_target_for_a_moment() -> None:
    """No input of a bounded run crashes, hangs, takes much memory, or raises what has no name."""
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", "--seconds", "0.4", "--seed", "1"],
        capture_output=True, text=True, cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    # Other tests register codecs of their own in this process.
    assert [line.partition(":")[0] for line in lines] == [name for name in all_targets() if "test-" not in name]
    assert all(int(line.split()[1]) > 0 for line in lines)


@pytest.mark.parametrize(
    ("deed", "at_end", "expected"),
    [
        ("ctypes.memset(address + 112, 0, 1)", True, "SIGSEGV"),
        ("ctypes.string_at(address + 112, 1)", True, "SIGSEGV"),
        ("ctypes.string_at(address - 1, 1)", False, "SIGSEGV"),
        ("bytearray(3 << 30)", True, "an unexpected error"),
        ("1 // 0", True, "an unexpected error"),
        ("os.abort()", True, "SIGABRT"),
        ("while True: pass", True, "no end within 1 s"),
    ],
)
def test_misbehaviour_is_found_and_the_input_kept(deed: str, at_end: bool, expected: str, tmp_path: Path) -> None:
    """One byte behind what is promised, one before, too much memory, an error, an abort, an endless loop."""
    script = BAD.format(deed=deed, at_end=at_end)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected)
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes()[:1] == b"\x07"


def test_edits_take_any_bytes_and_keep_to_their_kinds() -> None:
    """Every kind of change works on empty and tiny parts; twelve of sixteen keep the length."""
    for step in steps(bytes(range(256)) * 8):
        for size in (0, 1, 3, 50):
            data = bytearray(size)
            edit(data, step)
            assert len(data) == size or step.what % 16 >= 12
            text = bytearray(b'{"a":1,"b":[]}')
            edit_json(text, step)
