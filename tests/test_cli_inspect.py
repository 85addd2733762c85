"""inspect tells what is in a file, completely and truly, from header and index alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.cli import DIM, HEADS, LAYERS, TOKENS, cache_file, kvzip, process

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    cache = cache_file(tmp_path / "kv.safetensors")
    assert kvzip("compress", cache, "-q", "--block-tokens", 64, "--k-bins", "0:32,1-:16", "--sinks", 0) == 0
    return Path(f"{cache}.kvz")


def inspect_json(capsys: Capture, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert kvzip("inspect", "--json", *arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_the_four_things_of_the_design_card(packed: Path, capsys: Capture) -> None:
    found = inspect_json(capsys, packed)
    assert found["schema"] == "kvzip-inspect/1"
    (member,) = found["members"]
    assert member["layer_count"] == LAYERS
    assert member["channel_specs"]["key"] == [{"layers": [0], "bins": 32}, {"layers": [1, 2], "bins": 16}]
    assert set(member["channel_specs"]) == {"key", "value"}
    assert list(member["max_tensors"]) == ["TOKN"] and member["max_tensors"]["TOKN"] > 0
    chunks = member["chunk_offsets"]
    assert len(chunks) == LAYERS * 2 * 3 + 1
    assert all(packed.read_bytes()[chunk["offset"] :][:4] == b"DATA" for chunk in chunks)
    for number, plane in enumerate(member["planes"]):
        covered = sorted((chunk["start"], chunk["stop"]) for chunk in chunks if chunk["planes"] == [number])
        edges = [0, *(stop for _, stop in covered)]
        assert [start for start, _ in covered] == edges[:-1] and edges[-1] == plane["tokens"]


def test_the_components_add_up_to_the_file_to_the_byte(packed: Path, capsys: Capture) -> None:
    (member,) = inspect_json(capsys, packed)["members"]
    parts = member["bytes_per_component"]
    sections = parts.pop("sections")
    assert sum(parts.values()) + sum(sections.values()) == packed.stat().st_size == member["bytes"]
    assert member["ratio"] == pytest.approx(packed.with_suffix("").stat().st_size / member["bytes"])
    assert member["bits_per_element"] == pytest.approx(8 * member["bytes"] / (LAYERS * 2 * TOKENS * HEADS * DIM))


def test_verbose_json_tells_where_each_section_lies(packed: Path, capsys: Capture) -> None:
    (member,) = inspect_json(capsys, "-v", packed)["members"]
    totals: dict[str, int] = {}
    for chunk in member["chunk_offsets"]:
        for tag, (offset, length) in chunk["sections"].items():
            assert chunk["offset"] < offset and offset + length <= chunk["offset"] + chunk["length"]
            totals[tag] = totals.get(tag, 0) + length
    assert totals == member["bytes_per_component"]["sections"]


def test_the_recorded_errors_are_those_that_verify_measures(packed: Path, capsys: Capture) -> None:
    (member,) = inspect_json(capsys, packed)["members"]
    recorded = {(p["layer"], p["kind"]): p["relative_error"] for p in member["planes"] if p["kind"] != "bytes"}
    assert kvzip("verify", packed, "--against", packed.with_suffix(""), "--progress", "json") == 0
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (measured,) = (event["errors"] for event in events if "errors" in event)
    found = {(e["layer"], e["kind"]): e["relative_error"] for e in measured if e["kind"] != "bytes"}
    assert found.keys() == recorded.keys()
    for key, value in found.items():
        assert recorded[key] == pytest.approx(value, rel=1e-3)


def test_the_page_for_people_names_everything(packed: Path, capsys: Capture) -> None:
    assert kvzip("inspect", packed) == 0
    page = capsys.readouterr().out
    for words in (
        "per-layer", f"3 layers (0-2), keys and values: {TOKENS} tokens x {HEADS} heads x {DIM}, float16", "cachegen",
        "layers 1-2: 16 bins", "bits per element", "coded symbols (STRM)", "max tensors", "index", "recorded error",
    ):  # fmt: skip
        assert words in page
    assert "64:128" not in page
    assert kvzip("inspect", "-v", packed) == 0
    assert capsys.readouterr().out.count("64:128") == LAYERS * 2


def test_concatenated_members_are_all_listed(packed: Path, capsys: Capture) -> None:
    one = packed.read_bytes()
    packed.write_bytes(one + one)
    found = inspect_json(capsys, packed)["members"]
    assert [member["offset"] for member in found] == [0, len(one)]
    assert {**found[0], "offset": 0} == {**found[1], "offset": 0}
    assert kvzip("inspect", packed) == 0
    assert "member 1" in capsys.readouterr().out


def test_of_a_pipe_the_header_is_shown_without_reading_on(packed: Path) -> None:
    """Given only the header and nothing of what follows it, it is enough."""
    data = packed.read_bytes()
    head = data[: data.index(b"DATA")]
    done = process("inspect", "-", input=head)
    assert done.returncode == 0 and b"3 layers" in done.stdout and b"only its header" in done.stdout
    assert json.loads(process("inspect", "--json", input=head).stdout)["members"][0]["chunk_offsets"] is None
    with packed.open("rb") as file:
        assert b"recorded error" in process("inspect", stdin=file).stdout


def test_of_a_safetensors_file_the_layout_is_told_and_no_data_is_read(tmp_path: Path, capsys: Capture) -> None:
    cache = cache_file(tmp_path / "kv.safetensors")
    size = cache.stat().st_size
    header = cache.read_bytes()[:8] + cache.read_bytes()[8 : 8 + int.from_bytes(cache.read_bytes()[:8], "little")]
    cache.write_bytes(header)
    os.truncate(cache, size)
    found = inspect_json(capsys, cache)
    assert (found["layout"], found["layer_count"]) == ("per-layer", LAYERS)
    (ids,) = (tensor for tensor in found["tensors"] if tensor["name"] == "input_ids")
    assert ids["axes"] is None
    assert kvzip("inspect", "-v", cache) == 0
    assert "layers.2.value" in capsys.readouterr().out
    assert b"per-layer" in process("inspect", "-", input=cache.read_bytes()).stdout


def test_an_ambiguous_layout_lists_what_could_be_meant(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "odd.safetensors"
    safetensors.numpy.save_file({"cache": np.zeros((2, 2, 2, 2, 2), np.float16)}, path)
    assert kvzip("inspect", path) == 2
    assert "--layout" in capsys.readouterr().err


def test_statistics_that_make_no_sense_are_left_out(packed: Path, capsys: Capture) -> None:
    """They come from a file: whatever is in them, the rest is shown."""
    from kvzip.container import Reader
    from kvzip.inspection import Inspection

    with Reader.open(packed) as reader:
        count = len(reader.header.planes)
        for statistics in (
            {}, {"relative_error": 3, "max_abs": None}, {"relative_error": [1], "max_abs": [1]},
            {"relative_error": ["x"] * count, "max_abs": [None] * count},
        ):  # fmt: skip
            reader.statistics = statistics
            assert Inspection(reader.header, reader).errors() == []
        reader.statistics = {"relative_error": [10**400] * count, "max_abs": [True] * count}
        assert all(error.relative is None for error in Inspection(reader.header, reader).errors())
