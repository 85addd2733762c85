"""bench: its measures are what their definitions say, its figures repeat, its peers restore what they are given."""

from __future__ import annotations

import json
import math
import sys
import types
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
    candidates,
    copying,
    draw_queries,
    installed_peers,
    links,
    load,
    measure,
    measure_peer,
    read_queries,
)
from kvzip.bench import attention as attention_module
from kvzip.bench.breakeven import Link, pays_below
from kvzip.bench.ladder import split
from kvzip.bench.model import Continuation
from kvzip.bench.records import row_record, to_csv
from kvzip.bench.sample import token_ids
from kvzip.bench.timing import Timing, timed
from kvzip.codecs import available_codecs, get_codec
from kvzip.devices import Device, get_device
from kvzip.errors import KvzipError, UsageError
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


@pytest.mark.skipif(sys.platform != "linux", reason="the emulator builds shared objects as on Linux")
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


# ------------------------------------------------------------------------------------------------------ what to measure


def test_every_rung_of_every_ladder_can_be_built_from_its_name() -> None:
    found = candidates()
    assert {name.partition(":")[0] for name, _ in found} <= set(available_codecs())
    assert {"raw", "fp8", "cachegen"} <= {name for name, _ in found}
    for name, codec in found:
        assert get_codec(name).config() == codec.config()
    assert len({name for name, _ in found}) == len(found)
    assert len(candidates(quick=True)) < len(found)


def test_a_list_of_codecs_may_have_options_with_commas() -> None:
    assert split("raw,fp8:scale=head,dtype=float8_e5m2,cachegen:k_bins=0-0:32,1-:16,sinks=0") == [
        "raw",
        "fp8:scale=head,dtype=float8_e5m2",
        "cachegen:k_bins=0-0:32,1-:16,sinks=0",
    ]
    assert [name for name, _ in candidates(["raw,fp8", "raw"])] == ["raw", "fp8", "raw"]
    with pytest.raises(UsageError, match="did you mean 'cachegen'"):
        candidates(["raw,cachgen"])
    with pytest.raises(UsageError, match="did you mean 'scale'"):
        candidates(["fp8:scal=head"])


# --------------------------------------------------------------------------------------------------------------- links


def test_links_by_name_and_by_speed() -> None:
    assert [(link.name, link.speed) for link in links(["25gbit,nvme", "3.5GB/s"])] == [
        ("25gbit", 3.125e9),
        ("nvme", 7e9),
        ("3.5GB/s", 3.5e9),
    ]
    assert len(links()) > 4
    for bad in ("25gb", "fast", "0gbit", "-1gbit", "25", ""):
        with pytest.raises(UsageError, match="expected a speed"):
            links([bad])


def test_compression_pays_exactly_below_the_break_even_speed(sample: Sample) -> None:
    def row(stored: int) -> Row:
        return Row("x", sample, stored, Timing((1.0,)), Timing((0.001,)))

    some = row(sample.nbytes // 4)
    limit = pays_below(some)
    speed, ratio = sample.nbytes / 0.001, some.ratio
    assert speed == pytest.approx(limit * ratio / (ratio - 1))  # D > B r / (r - 1)
    for link, pays in ((Link("slower", limit * 0.99), True), (Link("faster", limit * 1.01), False)):
        assert (link.load_seconds(some) < link.raw_seconds(sample.nbytes)) == pays
    assert pays_below(row(sample.nbytes)) == pays_below(row(sample.nbytes + 1)) == 0


# --------------------------------------------------------------------------------------------------------------- peers


def test_installed_peers_restore_the_sample(sample: Sample, cpu: Device) -> None:
    peers, missing = installed_peers(sample, cpu)
    assert {"zstd", "lz4"} & ({peer.name.split()[0] for peer in peers} | set(missing)) == {"zstd", "lz4"}
    for peer in peers:
        row = measure_peer(sample, peer, seconds=0)
        assert 0.9 < row.ratio < 4 and not row.lossy and row.version


def test_programs_stand_in_for_packages(sample: Sample, cpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zstandard", "lz4.frame", "zipnn"):
        monkeypatch.setitem(sys.modules, name, None)
    peers, missing = installed_peers(sample, cpu, quick=True)
    assert all("(command)" in peer.name for peer in peers) and "ZipNN" in missing
    for peer in peers:
        assert measure_peer(sample, peer, seconds=0).ratio > 0.9


def test_a_peer_that_breaks_the_bytes_is_no_row(sample: Sample, cpu: Device) -> None:
    (peer, *_), _ = installed_peers(sample, cpu, quick=True)
    with pytest.raises(KvzipError, match="did not restore"):
        measure_peer(sample, peer._replace(decompress=lambda packed, size: bytes(size)), seconds=0)


def test_zipnn_and_nvcomp_are_asked_as_their_manuals_say(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is installed where tests run: modules of their shape stand in."""
    monkeypatch.setitem(sys.modules, "zipnn", _zipnn_stand_in())
    monkeypatch.setattr("kvzip.bench.peers.version", lambda name: "0")
    monkeypatch.setitem(sys.modules, "nvidia", types.ModuleType("nvidia"))
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", _nvcomp_stand_in())
    gpu: Any = types.SimpleNamespace(xp=types.SimpleNamespace(**vars(np), asnumpy=np.asarray, cuda=_runtime()))
    peers, missing = installed_peers(sample, gpu, quick=True)
    names = {peer.name for peer in peers}
    assert {"ZipNN", "nvCOMP ANS"} <= names and not missing
    for peer in peers:
        if peer.name.startswith(("ZipNN", "nvCOMP")):
            assert measure_peer(sample, peer, seconds=0).ratio > 1


def _runtime() -> Any:
    return types.SimpleNamespace(runtime=types.SimpleNamespace(deviceSynchronize=lambda: None))


def _zipnn_stand_in() -> types.ModuleType:
    import zlib

    class ZipNN:
        def __init__(self, bytearray_dtype: str, threads: int) -> None:
            assert bytearray_dtype == "bfloat16"

        def compress(self, data: bytearray) -> bytes:
            packed = zlib.compress(data)
            data[:] = bytes(len(data))  # the real one changes its input, too
            return packed

        def decompress(self, packed: bytes) -> bytes:
            return zlib.decompress(packed)

    module = types.ModuleType("zipnn")
    module.ZipNN = ZipNN  # type: ignore[attr-defined]
    return module


def _nvcomp_stand_in() -> types.ModuleType:
    import zlib

    class Codec:
        def __init__(self, algorithm: str) -> None:
            assert algorithm in ("ANS", "Zstd", "LZ4")

        def encode(self, array: np.ndarray) -> Any:
            return types.SimpleNamespace(data=zlib.compress(array), buffer_size=len(zlib.compress(array)))

        def decode(self, packed: Any) -> np.ndarray:
            return np.frombuffer(zlib.decompress(packed.data), np.uint8)

    module = types.ModuleType("nvidia.nvcomp")
    module.Codec, module.as_array, module.__version__ = Codec, np.asarray, "0"  # type: ignore[attr-defined]
    return module


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
    assert raw.quality and fp8.quality and fp8.quality.positions == 30
    assert raw.quality.kl.value == 0 < fp8.quality.kl.value < 0.1
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


# -------------------------------------------------------------------------------------------------------------- timing


def test_times_are_those_of_some_runs_after_one_that_does_not_count() -> None:
    calls: list[int] = []
    result, timing = timed(lambda: calls.append(1) or len(calls), seconds=0)
    assert result == 4 and len(timing.times) == 3
    timing = Timing((1.0, 2.0, 3.0, 4.0, 5.0))
    assert (timing.median, timing.quartiles, timing.spread) == (3, (2, 4), pytest.approx(1 / 3))
    assert Timing((2.0,)).spread == 0 and Timing((2.0,)).speed(4_000_000_000) == 2


def test_queries_are_for_the_layers_of_the_sample(sample: Sample) -> None:
    assert isinstance(draw_queries(sample), Queries) and set(draw_queries(sample).arrays) == {(0, 0), (1, 0)}
