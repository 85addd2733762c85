"""``python -m fuzz.coverage TARGET [CORPUS] [-libfuzzer_option=value...]``: a target under atheris.

atheris (pip install atheris) is guided by the coverage of kvzip's Python code; see https://github.com/google/atheris.
Without a corpus folder it starts from the target's seeds.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvzip"]):
    from fuzz.targets import all_targets


def main() -> None:
    """Ends when libFuzzer does; what it finds is written where it is run."""
    known = all_targets()
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        sys.exit(f"usage: python -m fuzz.coverage TARGET [CORPUS] [-option=value...]; targets: {', '.join(known)}")
    target = known[sys.argv[1]]
    arguments = sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        if not any(not argument.startswith("-") for argument in arguments):
            for number, seed in enumerate(target.seeds() or (bytes(10), b"\0\xff" + bytes(40))):
                (Path(folder) / f"{number}").write_bytes(seed)
            arguments = [folder, *arguments]
        atheris.Setup([sys.argv[0], *arguments], lambda data: target.run([data]))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
