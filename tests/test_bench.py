"""bench: its measures are what their definitions say, its figures repeat, its peers restore what they are given."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
import safetensors.numpy

from kvzip.bench import (
    Judge,
    Queries,
    Row,
    Sample,
    attention_errors,
    copying,
    draw_queries,
    links,
    load,
    measure,
    read_queries,
)
from kvzip.bench import attention as attention_module
from kvzip.bench.model import Continuation
from kvzip.bench.records import row_record, to_csv
from kvzip.bench.sample import token_ids
from kvzip.codecs import get_codec
from kvzip.devices import Device, get_device
from kvzip.errors import UsageError
from kvzip.evaluation import compare
from kvzip.layouts import map_cache
from kvzip.quality import differences
from kvzip.tensorfile import open_tensors
from tests.reference import quality as oracle

LAYERS, HEADS, TOKENS, DIM = 2, 2, 60, 16


def tensors(seed: int = 3, dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    """Keys with offsets, as real ones have, and values."""
    rng = np.random.default_rng(seed)
    found = {}
    for layer in range(LAYERS):
        offset = rng.normal(0, 4, (HEADS, 1, DIM))
        found[f"layers.{layer}.key"] = (rng.normal(size=(HEADS, TOKENS, DIM)) + offset).astype(dtype)
        found[f"layers.{layer}.value"] = rng.normal(size=(HEADS, TOKENS, DIM)).astype(dtype)
    return found


def sample_of(path: Path, arrays: dict[str, np.ndarray]) -> Sample:
    safetensors.numpy.save_file(arrays, path)
    with open_tensors(path) as source:
        return load(source, map_cache(source))


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return sample_of(tmp_path / "kv.safetensors", tensors())


@pytest.fixture(scope="module")
def cpu() -> Device:
    return get_device("cpu", 1)


def noisy(sample: Sample, seed: int = 5) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(a.astype(np.float32) + rng.normal(0, 0.1, a.shape)).astype(a.dtype) for a in sample.arrays]


# ------------------------------------------------------------------------------------------------------------ measures


def test_attention_errors_are_those_of_the_definition(sample: Sample) -> None:
    queries, restored = draw_queries(sample, count=3), noisy(sample)
    for number, error in enumerate(attention_errors(sample, restored, queries)):
        pairs = [(sample.arrays[i], restored[i]) for i in (2 * number, 2 * number + 1)]
        assert [plane.kind for plane in sample.planes[2 * number : 2 * number + 2]] == ["key", "value"]
        expected = oracle.attention_errors(queries.arrays[error.layer, 0], *pairs)
        assert (error.logits, error.output) == pytest.approx(expected, rel=1e-6)
        assert 0.001 < error.logits < 0.5 and 0.001 < error.output < 0.5


def test_relative_errors_are_those_of_the_definition(sample: Sample) -> None:
    for original, restored in zip(sample.arrays, noisy(sample), strict=True):
        found = differences(original, restored)
        expected = oracle.relative_error(original, restored)
        assert math.sqrt(found.squared_error / found.energy) == pytest.approx(expected, rel=1e-6)


def test_divergence_is_that_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.normal(0, 2, (2, 20, 50))
    logs = [x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q)]
    assert compare(*logs, np.zeros(20, int)).kl.value == pytest.approx(oracle.kl_divergence(p, q), rel=1e-6)


def test_an_error_that_all_keys_share_does_nothing_to_attention(sample: Sample) -> None:
    shift = {"key": 1.0, "value": 0.0}
    planes = zip(sample.planes, sample.arrays, strict=True)
    moved = [array.astype(np.float64) + shift[plane.kind] for plane, array in planes]
    for error in attention_errors(sample, moved, draw_queries(sample)):
        assert error.logits < 1e-12 and error.output < 1e-12


def test_what_is_not_finite_counts_as_infinite(sample: Sample) -> None:
    broken = noisy(sample)
    broken[0][3, 1, 2] = np.nan
    errors = attention_errors(sample, broken, draw_queries(sample))
    assert errors[0].logits == errors[0].output == math.inf and errors[1].logits < 1


def test_drawn_queries_have_the_covariance_of_the_keys_and_repeat(sample: Sample) -> None:
    queries = draw_queries(sample, count=4000)
    assert "drawn" in queries.source
    keys = sample.arrays[0][:, 1].astype(np.float64)
    found = queries.arrays[0, 0][1]
    directions = [x / np.linalg.norm(x) for x in (np.cov(found.T), np.cov(keys.T))]
    assert np.abs(directions[0] - directions[1]).max() < 0.05
    centred = found @ (keys - keys.mean(axis=0)).T / math.sqrt(DIM)
    assert centred.std(axis=1) == pytest.approx(attention_module.LOGIT_SPREAD)
    assert (draw_queries(sample, count=5).arrays[1, 0] == draw_queries(sample, count=5).arrays[1, 0]).all()


def test_queries_are_for_the_layers_of_the_sample(sample: Sample) -> None:
    assert isinstance(draw_queries(sample), Queries) and set(draw_queries(sample).arrays) == {(0, 0), (1, 0)}


def test_real_queries_are_shared_by_the_heads_of_their_group(sample: Sample, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    given = {f"layers.{i}.query": rng.normal(size=(2 * HEADS, 7, DIM)).astype(np.float32) for i in range(LAYERS)}
    safetensors.numpy.save_file(given, tmp_path / "q.safetensors")
    queries = read_queries(tmp_path / "q.safetensors", sample)
    assert "q.safetensors" in queries.source
    first = given["layers.1.query"]
    assert (queries.arrays[1, 0][1] == np.concatenate([first[2], first[3]])).all()
    given["layers.1.query"] = first[:3]
    safetensors.numpy.save_file(given, tmp_path / "odd.safetensors")
    with pytest.raises(UsageError, match=r"layers\.1\.query is \[3, 7, 16\]"):
        read_queries(tmp_path / "odd.safetensors", sample)
    del given["layers.1.query"]
    safetensors.numpy.save_file(given, tmp_path / "few.safetensors")
    with pytest.raises(UsageError, match=r"no layers\.1\.query"):
        read_queries(tmp_path / "few.safetensors", sample)


# ---------------------------------------------------------------------------------------------------------------- rows


def row_of(sample: Sample, device: Device, spec: str) -> Row:
    return measure(sample, get_codec(spec), device, name=spec, judge=Judge(draw_queries(sample)), seconds=0)


def test_two_runs_agree_on_sizes_and_errors(sample: Sample, cpu: Device) -> None:
    first, second = (row_of(sample, cpu, "cachegen") for _ in range(2))
    assert first.stored_bytes == second.stored_bytes
    assert first.errors == second.errors and first.attention == second.attention


def test_threads_change_nothing_but_time(sample: Sample, cpu: Device) -> None:
    first, second = row_of(sample, cpu, "cachegen"), row_of(sample, get_device("cpu", 3), "cachegen")
    assert (first.stored_bytes, first.errors, first.attention) == (
        second.stored_bytes,
        second.errors,
        second.attention,
    )


def test_lossless_rows_have_no_error_and_lossy_ones_have(sample: Sample, cpu: Device) -> None:
    raw, fp8 = row_of(sample, cpu, "raw"), row_of(sample, cpu, "fp8")
    assert not raw.lossy and raw.logits_error == raw.output_error == raw.mean_error("key") == 0
    assert fp8.lossy and fp8.logits_error > 0 and fp8.output_error > 0


def test_on_a_gpu_copies_are_counted_apart(sample: Sample, cpu: Device) -> None:
    from tests.emulator import devices

    row, same = row_of(sample, devices.cuda_on_emulator(), "fp8"), row_of(sample, cpu, "fp8")
    assert row.copies is not None and same.copies is None
    assert row.decode_seconds > row.decode.median and row.encode_seconds > row.encode.median
    assert (row.stored_bytes, row.errors) == (same.stored_bytes, same.errors)
    assert row_record(row, links(["nvme"]))["copies"]["raw_in"]["median"] > 0
    copying(sample, devices.cuda_on_emulator(), seconds=0)


def test_a_codec_that_does_not_take_the_dtype_is_told(tmp_path: Path, cpu: Device) -> None:
    sample = sample_of(tmp_path / "kv.safetensors", tensors(dtype="uint8"))
    told: list[str] = []
    row = measure(sample, get_codec("fp8"), cpu, seconds=0, notice=told.append)
    assert row.errors[0].relative == 0 and "does not take uint8" in told[0]


def test_records_are_json_and_the_table_has_a_line_each(sample: Sample, cpu: Device) -> None:
    rows = [row_of(sample, cpu, "fp8"), copying(sample, cpu, seconds=0)]
    ways = links(["25gbit", "nvme"])
    record = json.loads(json.dumps(row_record(rows[0], ways), allow_nan=False))
    assert record["attention_output_error"] == rows[0].output_error
    assert record["load_seconds"]["25gbit"] == pytest.approx(rows[0].stored_bytes / 3.125e9 + rows[0].decode.median)
    header, *lines = to_csv(rows, ways).splitlines()
    assert len(lines) == 2 and header.startswith("codec,") and header.count(",") == lines[0].count(",")


# --------------------------------------------------------------------------------------------------------------- model


class StandIn:
    """In a model's place, for tests without torch: its predictions are the first keys that it is given."""

    name = "stand-in"

    def log_probabilities(self, cache: dict[str, Any], ids: np.ndarray) -> np.ndarray:
        logits = cache["layers.0.key"][0, : len(ids)].astype(np.float64)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def queries(self, cache: dict[str, Any], ids: np.ndarray) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        return {f"layers.{i}.query": rng.normal(size=(HEADS, len(ids), DIM)) for i in range(LAYERS)}


def test_the_model_is_asked_about_what_was_decoded(sample: Sample, cpu: Device) -> None:
    ids = np.arange(TOKENS + 31) % DIM
    continuation = Continuation(StandIn(), sample, ids)  # type: ignore[arg-type]
    judge = Judge(continuation.queries(sample), continuation)
    raw, fp8 = (measure(sample, get_codec(name), cpu, judge=judge, seconds=0) for name in ("raw", "fp8"))
    assert fp8.quality and fp8.quality.positions == 30 and 0 < fp8.quality.kl.value < 0.1
    assert raw.quality is None  # nothing was lost: nothing to ask
    assert "stand-in" in judge.queries.source if judge.queries else False
    record = row_record(fp8, [])["model"]
    assert record["kl"] == {"value": fp8.quality.kl.value, "stderr": fp8.quality.kl.stderr}
    assert "kl_stderr" in to_csv([raw, fp8], []).splitlines()[0]


def test_too_few_tokens_after_the_cache_are_told(sample: Sample) -> None:
    with pytest.raises(UsageError, match="3 tokens are known after the 60 of the cache"):
        Continuation(StandIn(), sample, np.arange(TOKENS + 3))  # type: ignore[arg-type]


def test_token_ids_are_found_beside_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "kv.safetensors"
    safetensors.numpy.save_file(tensors() | {"token_ids": np.arange(99, dtype=np.int32)}, path)
    with open_tensors(path) as source:
        found = token_ids(source)
    assert found is not None and found.dtype == np.int64 and (found == np.arange(99)).all()
