"""bench: what is measured and how long it takes, when it pays, and the compressors that stand beside the codecs."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvzip.bench import Row, Sample, candidates, installed_peers, links, measure_peer
from kvzip.bench.breakeven import Link, pays_below
from kvzip.bench.ladder import split
from kvzip.bench.timing import Timing, timed
from kvzip.codecs import available_codecs, get_codec
from kvzip.devices import Device, get_device
from kvzip.errors import KvzipError, UsageError
from tests.test_bench import sample_of, tensors


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return sample_of(tmp_path / "kv.safetensors", tensors())


@pytest.fixture(scope="module")
def cpu() -> Device:
    return get_device("cpu", 1)


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


# -------------------------------------------------------------------------------------------------------------- timing


def test_times_are_those_of_some_runs_after_one_that_does_not_count() -> None:
    calls: list[int] = []
    result, timing = timed(lambda: calls.append(1) or len(calls), seconds=0)
    assert result == 4 and len(timing.times) == 3
    timing = Timing((1.0, 2.0, 3.0, 4.0, 5.0))
    assert (timing.median, timing.quartiles, timing.spread) == (3, (2, 4), pytest.approx(1 / 3))
    assert Timing((2.0,)).spread == 0 and Timing((2.0,)).speed(4_000_000_000) == 2
