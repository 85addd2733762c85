"""Makes the files of this folder, and its README with the reason for each: ``python -m attacks.make``.

A new attack is one more line in attacks/safetensors.py or attacks/kvz.py. Run this when the ``.kvz`` format changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent

START = """\
# Files that mean harm

Every file here attacks kvzip in one way, and must end with the named error (`docs/errors.md`) and the exit code in its
row, no output, little memory, and in less than a second. "none" is a file that looks dangerous and is read like any
other. `tests/test_attacks.py` holds kvzip to it. The files and this page are made by `python -m attacks.make`.
"""


class Attack(NamedTuple):
    """One file. ``code`` is that of the expected error, empty if the file is harmless; ``exit_code`` goes with it.

    ``hidden``: only decoding notices it, since the checksums are right and structure alone is sound.
    """

    name: str
    code: str
    exit_code: int
    reason: str
    data: bytes
    hidden: bool = False

    @property
    def path(self) -> Path:
        return FOLDER / self.name


def all_attacks() -> list[Attack]:
    """Every attack, made afresh."""
    from attacks.kvz import attacks as kvz
    from attacks.safetensors import attacks as safetensors

    return [*safetensors(), *kvz()]


def readme(attacks: Sequence[Attack]) -> str:
    """The page about the files."""
    rows = [
        f"| `{attack.name}` | {f'`{attack.code}`' if attack.code else 'none'} | {attack.exit_code} | {attack.reason} |"
        for attack in attacks
    ]
    return "\n".join([START, "| file | error | exit code | what it tries |", "|---|---|---|---|", *rows, ""])


def main() -> None:
    attacks = all_attacks()
    for attack in attacks:
        attack.path.parent.mkdir(exist_ok=True)
        attack.path.write_bytes(attack.data)
    names = {attack.path for attack in attacks}
    for path in [*FOLDER.glob("*/*.safetensors"), *FOLDER.glob("*/*.kvz")]:
        if path not in names:
            path.unlink()
    (FOLDER / "README.md").write_text(readme(attacks), encoding="utf-8")


if __name__ == "__main__":
    main()
