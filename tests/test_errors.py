"""Every failure has a stable name, and docs/errors.md says of each what it means, with the exit code it comes with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvzip
from kvzip import errors
from kvzip.codecs import get_codec
from kvzip.devices.cuda_setup import NoGpuError
from kvzip.errors import LONGEST, CorruptError, KvzipError, UsageError

PACKAGE = Path(kvzip.__file__).parent
PAGE = PACKAGE.parent / "docs" / "errors.md"

CLASSES = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, KvzipError)}
CLASSES["NoGpuError"] = NoGpuError
NAMED_BY_CLASS = ("NoGpuError", "PartialError")
NAMED_BY_REGISTRY = "codecs/"
"""What a codec says of its options gets the name ``codec-option`` where codecs are made."""

FAILURES = {"stopped": 1, "memory": 7, "system": 1, "usage": 2, "internal": 1}
"""Names that the command line gives to exceptions that are not ours (kvzip/cli/failures.py)."""


def calls() -> Iterator[tuple[str, str, list[str]]]:
    """Where an error is made, its class and its codes."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    constants = {name: text for tree in trees.values() for name, text in _texts(tree)}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                values = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                parts = [part for value in values for part in ast.walk(value)]
                codes = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
                codes += [constants[part.id] for part in parts if isinstance(part, ast.Name) and part.id in constants]
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node.func.id, codes


def _texts(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The module's constants that are texts."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from ((name.id, node.value.value) for name in node.targets if isinstance(name, ast.Name))


def documented() -> set[tuple[str, int]]:
    """Every code of the page with the exit code of its chapter."""
    found: set[tuple[str, int]] = set()
    exit_code = 0
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if chapter := re.match(r"## (\d)", line):
            exit_code = int(chapter[1])
        elif line.startswith("| `"):
            found |= {(code, exit_code) for code in re.findall(r"`([a-z0-9-]+)`", line.split("|")[1])}
    return found


def test_every_error_is_made_with_a_name() -> None:
    nameless = [(where, name) for where, name, codes in calls() if not codes and name not in NAMED_BY_CLASS]
    assert [found for found in nameless if found[1] != "UsageError" or not found[0].startswith(NAMED_BY_REGISTRY)] == []


@pytest.mark.parametrize("spec", ["cachegen:level=77", "cachegen:k_bins=x", "fp8:scale=x", "fp8:x=1", "raw:x=1"])
def test_what_a_codec_says_of_its_options_has_a_name(spec: str) -> None:
    with pytest.raises(UsageError) as error:
        get_codec(spec)
    assert error.value.code == "codec-option"


def test_the_page_lists_every_name_and_no_other() -> None:
    made = {(code, CLASSES[name].exit_code) for _, name, codes in calls() for code in codes}
    made |= {(cls.default_code, cls.exit_code) for cls in CLASSES.values()} | set(FAILURES.items())
    assert documented() == made


def test_names_are_kebab_case() -> None:
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code) for _, _, codes in calls() for code in codes)


def test_messages_are_cut() -> None:
    """A name in a hostile file may have megabytes: both ends of the message remain."""
    text = str(CorruptError("first " + "x" * 10**6 + " last", code="x"))
    assert len(text) < LONGEST + 10
    assert text.startswith("first ") and text.endswith(" last")
