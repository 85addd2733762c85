"""Files that kvzip once wrote are read to the same bits for ever, on every device."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest

import kvzip
from kvzip.codecs import available_codecs
from kvzip.devices.base import Device

FOLDER = Path(__file__).parent / "golden" / "kvz"
DIGESTS = json.loads((FOLDER / "digests.json").read_text())


@pytest.mark.parametrize("name", DIGESTS)
def test_a_file_of_the_past_gives_the_same_bits(name: str, device: Device) -> None:
    restored = io.BytesIO()
    kvzip.decompress(FOLDER / f"{name}.kvz", restored, device=device)
    assert hashlib.sha256(restored.getvalue()).hexdigest() == DIGESTS[name]["restored_sha256"]


def test_every_file_has_a_digest() -> None:
    assert {path.stem for path in FOLDER.glob("*.kvz")} == set(DIGESTS)


def test_every_codec_has_a_file() -> None:
    """A codec that is registered and has no golden file could change without anybody noticing."""
    present = set()
    for name in DIGESTS:
        with kvzip.open(FOLDER / f"{name}.kvz") as opened:
            present |= {codec["name"] for codec in opened.header.codecs}
    # Other tests register codecs of their own in this process.
    own = {name for name in available_codecs() if not name.startswith("test-")}
    assert own - {"naive"} <= present


def test_what_loses_nothing_restores_the_input() -> None:
    expected = hashlib.sha256((FOLDER / "input.safetensors").read_bytes()).hexdigest()
    exact = {name for name, entry in DIGESTS.items() if entry["restored_sha256"] == expected}
    assert {"raw", "lossless"} <= exact < set(DIGESTS)
