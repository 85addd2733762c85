"""A GPU with little memory: the pipeline goes on in smaller pieces, to the same bytes, or ends with one clear error."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import safetensors.numpy

import kvzip
from kvzip.bench import load, measure
from kvzip.codecs.base import Codec
from kvzip.codecs.cachegen import CacheGen
from kvzip.codecs.fp8 import Fp8
from kvzip.container import Reader
from kvzip.devices import get_device
from kvzip.devices.base import Device
from kvzip.devices.cuda import Cuda
from kvzip.errors import LimitError
from kvzip.layouts import map_cache
from kvzip.lmcache.convert import export_cache, import_files
from kvzip.lmcache.fp8 import Geometry
from kvzip.pipeline import StoredCache, assign, compress, decompress
from kvzip.pipeline.encoding import ignore
from kvzip.tensorfile import ArraySink, from_arrays, open_tensors
from tests.emulator import fake_cupy
from tests.emulator.devices import cuda_on_emulator

TOKENS, BLOCK = 96, 32


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float16)


CACHES = {
    "a tensor for each plane": (
        "per-layer",
        {f"layers.{n}.{kind}": _numbers(2, TOKENS, 32) for n in range(4) for kind in ("key", "value")},
    ),
    "all planes in one tensor": ("T,L,kv,H,D", {"kv": _numbers(TOKENS, 4, 2, 2, 32)}),
}
NBYTES = 8 * 2 * TOKENS * 32 * 2


def _compressed(name: str, codec: Codec, device: Device, told: list[str]) -> bytes:
    layout, arrays = CACHES[name]
    source, out = open_tensors(io.BytesIO(safetensors.numpy.save(arrays))), io.BytesIO()
    cache_map = map_cache(source, layout)
    assignment = assign(cache_map.planes, lambda plane: codec)
    compress(source, cache_map, out, assignment=assignment, device=device, block_tokens=BLOCK, notice=told.append)
    return out.getvalue()


def _restored(data: bytes, tokens: range | None, device: Device, told: list[str]) -> dict[str, np.ndarray]:
    stored = StoredCache(Reader.open(io.BytesIO(data)))
    selection = stored.select(None, tokens)
    sink = ArraySink(selection.tensors)
    decompress(stored, selection, sink, device=device, notice=told.append)
    return sink.arrays


@contextmanager
def _room(gpu: Cuda, nbytes: int) -> Iterator[None]:
    """So much memory is free besides what the device keeps for good, its tables."""
    gpu.use_less(gpu.batch_bytes)
    gpu.batch_bytes = 1 << 26
    gpu.synchronize()
    gpu._pool.free_all_blocks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_cupy.MemoryPool, "total", fake_cupy.MemoryPool.held() + nbytes)
        yield


@pytest.mark.parametrize("codec", [Fp8(), CacheGen()], ids=["fp8", "cachegen"])
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("room", [NBYTES * 5 // 4, NBYTES // 2], ids=["a cache and a quarter", "half a cache"])
def test_little_memory_costs_time_alone(name: str, codec: Codec, room: int) -> None:
    """Promise: the same bytes both ways, whole and in part, with less memory than the cache takes; told once."""
    cpu, gpu = get_device("cpu"), cuda_on_emulator()
    expected = _compressed(name, codec, gpu, [])
    assert expected == _compressed(name, codec, cpu, [])
    before = gpu.batch_bytes
    with _room(gpu, room):
        told: list[str] = []
        assert _compressed(name, codec, gpu, told) == expected
        assert told == [f"too little free memory on {gpu}: going on in smaller batches"]
        assert gpu.batch_bytes < min(before, NBYTES)
    for tokens in (None, range(10, 75)):
        gpu.batch_bytes = before
        whole = _restored(expected, tokens, gpu, told := [])
        assert not told
        with _room(gpu, room):
            for key, array in _restored(expected, tokens, gpu, told).items():
                np.testing.assert_array_equal(array, whole[key])
        assert len(told) == 1


@pytest.mark.parametrize("codec", [Fp8(), CacheGen()], ids=["fp8", "cachegen"])
def test_a_plane_comes_in_smaller_batches(codec: Codec) -> None:
    """Promise: ``Cache.key`` has the same numbers where there is less memory than the plane takes, or, decoding to a
    tensor that is there already, little besides.
    """
    gpu = cuda_on_emulator()
    keys = _numbers(2, 16 * BLOCK, 32)
    data = kvzip.compress({"layers.0.key": keys, "layers.0.value": keys}, codec=codec, device=gpu, block_tokens=BLOCK)
    with kvzip.open(data, device=gpu) as cache:
        expected = cache.key(0, (10, 500))
        out = fake_cupy.empty(expected.shape, np.float16)
        for target in (None, out):
            with _room(gpu, expected.nbytes // 2):
                found = cache.key(0, (10, 500), out=target)
            assert gpu.batch_bytes < expected.nbytes
            np.testing.assert_array_equal(found if target is None else gpu.to_host(found), expected)
        with _room(gpu, 2000), pytest.raises(LimitError, match="out of memory on cuda:0"):
            cache.key(0, (10, 500))


@pytest.mark.parametrize("file_format", ["cachegen", "fp8-e4m3fn", "turboquant"])
def test_lmcaches_files_are_made_and_read_in_smaller_batches(file_format: str) -> None:
    """Promise: import and export make the same bytes with less memory than the cache takes, and say so."""
    cpu, gpu = get_device("cpu"), cuda_on_emulator()
    kv = _numbers(8, 2, 256, 2, 32).astype("bfloat16")
    stored = kvzip.compress({"kv_chunk": kv}, codec="lossless", layout="lmcache-blob", device=cpu)
    geometry = None if file_format == "cachegen" else Geometry(8, 256, 2, 32)

    def exported(device: Device, notice: Callable[[str], None] = ignore) -> bytes:
        with kvzip.open(stored, device=cpu) as cache:
            return export_cache(cache, file_format=file_format, device=device, notice=notice)

    def imported(device: Device, notice: Callable[[str], None] = ignore) -> bytes:
        files = [("file", exported(cpu))]
        made = import_files(files, None, file_format=file_format, geometry=geometry, device=device, notice=notice)
        assert isinstance(made, bytes)
        return made

    for convert in (exported, imported):
        expected = convert(cpu)
        assert convert(gpu) == expected
        with _room(gpu, kv.nbytes // 3):
            told: list[str] = []
            assert convert(gpu, told.append) == expected
            assert set(told) == {f"too little free memory on {gpu}: going on in smaller batches"}


def test_nothing_is_kept_for_a_plane_that_is_gone() -> None:
    gpu = cuda_on_emulator()
    data = _compressed("a tensor for each plane", Fp8(), gpu, [])
    with kvzip.open(data, device=gpu) as cache:
        cache.key(0)
        assert not gpu._up._under_way and not gpu._down._under_way


def test_bench_goes_on_in_smaller_batches() -> None:
    """Promise: bench measures the same sizes and errors with too little memory for its batches, and says so once."""
    gpu = cuda_on_emulator()
    source = from_arrays(CACHES["a tensor for each plane"][1])
    sample = load(source, map_cache(source, "per-layer"))
    expected = measure(sample, CacheGen(), gpu, seconds=0)
    told: list[str] = []
    with _room(gpu, 17 * NBYTES // 5):
        row = measure(sample, CacheGen(), gpu, seconds=0, notice=told.append)
    assert told == [f"too little free memory on {gpu}: going on in smaller batches"]
    assert gpu.batch_bytes < NBYTES
    assert (row.totals.sections, row.errors) == (expected.totals.sections, expected.errors)


@pytest.mark.parametrize("name", CACHES)
def test_too_little_for_a_block_is_an_error(name: str) -> None:
    """Promise: where halving does not help, the message of the device comes through, with exit code 7."""
    gpu = cuda_on_emulator()
    data = _compressed(name, Fp8(), gpu, [])
    with _room(gpu, 2000):
        with pytest.raises(LimitError, match="out of memory on cuda:0") as error:
            _compressed(name, Fp8(), gpu, [])
        assert (error.value.code, error.value.exit_code) == ("out-of-gpu-memory", 7)
        with pytest.raises(LimitError, match="out of memory on cuda:0"):
            _restored(data, None, gpu, [])
