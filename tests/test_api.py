"""The Python API: tensors and files in and out, parts of a cache, and torch only where the caller uses it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
import numpy as np
import pytest
import safetensors.numpy

import kvzip
from kvzip.errors import CorruptError, KvzipError, RefusedError, UsageError
from kvzip.tensorfile import open_tensors
from tests.tensor_files import Pipe

LAYERS, HEADS, TOKENS, DIM = 3, 2, 150, 16


def tensors(dtype: str = "bfloat16", tokens: int = TOKENS) -> dict[str, np.ndarray]:
    """Keys and values per layer, and two tensors that are no KV."""
    rng = np.random.default_rng(7)
    found = {
        f"layers.{layer}.{kind}": rng.standard_normal((HEADS, tokens, DIM)).astype(dtype)
        for layer in range(LAYERS)
        for kind in ("key", "value")
    }
    return {**found, "input_ids": np.arange(tokens), "scale": np.float32([0.5])}


def write(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    safetensors.numpy.save_file(arrays, path, metadata={"model": "test"})
    return path


def same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert (array.dtype, array.shape) == (right[name].dtype, right[name].shape)
        assert array.tobytes() == np.ascontiguousarray(right[name]).tobytes(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_tensors_come_back_bit_for_bit_from_bytes(dtype: str) -> None:
    arrays = tensors(dtype)
    same(kvzip.decompress(kvzip.compress(arrays, codec="raw", layout="per-layer")), arrays)


def test_a_file_comes_back_byte_for_byte_with_its_mode_and_time(tmp_path: Path) -> None:
    source = write(tmp_path / "kv.safetensors", tensors("float16"))
    source.chmod(0o640)
    os.utime(source, ns=(10**18, 10**18))
    report = kvzip.compress(source, tmp_path / "kv.kvz", codec="raw")
    assert report.stored_bytes == (tmp_path / "kv.kvz").stat().st_size
    assert report.original_bytes == source.stat().st_size
    kvzip.decompress(tmp_path / "kv.kvz", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    for name in ("kv.kvz", "back"):
        found = (tmp_path / name).stat()
        assert (found.st_mode & 0o777, found.st_mtime_ns) == (0o640, 10**18)


def test_the_same_input_gives_the_same_bytes_from_memory_file_and_stream(tmp_path: Path) -> None:
    source = write(tmp_path / "kv.safetensors", tensors("float16"))
    packed = io.BytesIO()
    kvzip.compress(source, packed)
    assert kvzip.compress(io.BytesIO(source.read_bytes())) == packed.getvalue()
    assert kvzip.compress(source, threads=1) == packed.getvalue()


def test_a_part_of_a_cache_keeps_names_and_gets_smaller_shapes(tmp_path: Path) -> None:
    arrays = tensors()
    packed = kvzip.compress(arrays, codec="raw", block_tokens=32)
    part = kvzip.decompress(packed, layers=(1, 3), tokens=slice(40, 101))
    assert part.keys() == arrays.keys() - {"layers.0.key", "layers.0.value"}
    for name, array in part.items():
        assert array.tobytes() == (arrays[name][:, 40:101] if name.startswith("layers") else arrays[name]).tobytes()
    kvzip.decompress(packed, tmp_path / "part", layers=1, tokens=range(3))
    assert safetensors.numpy.load_file(tmp_path / "part").keys() == {
        "layers.1.key",
        "layers.1.value",
        "input_ids",
        "scale",
    }


@pytest.mark.parametrize("bad", [(-1, 3), (5, 2), slice(0, 4, 2), (400, 500)])
def test_a_range_that_names_nothing_is_refused(bad: Any) -> None:
    with pytest.raises(UsageError):
        kvzip.decompress(kvzip.compress(tensors(), codec="raw"), tokens=bad)


def test_random_access_reads_single_planes_and_token_ranges(tmp_path: Path) -> None:
    arrays = tensors()
    kvzip.compress(arrays, tmp_path / "kv.kvz", codec="raw", block_tokens=32)
    with kvzip.open(tmp_path / "kv.kvz") as cache:
        assert cache.layers == [0, 1, 2]
        for layer in cache.layers:
            expected = arrays[f"layers.{layer}.value"].transpose(1, 0, 2)
            assert cache.value(layer).tobytes() == np.ascontiguousarray(expected).tobytes()
            for cut in (slice(31, 33), (0, 1), 149, range(64, 96), slice(100, None), slice(7, 7)):
                found = cache.key(layer, cut)
                low = cut if isinstance(cut, int) else cut[0] if isinstance(cut, tuple) else cut.start
                wanted = arrays[f"layers.{layer}.key"].transpose(1, 0, 2)[low : low + len(found)]
                assert found.tobytes() == np.ascontiguousarray(wanted).tobytes()
        assert cache.key(0, slice(100, None)).shape == (50, HEADS, DIM)
        assert cache.key(0, slice(7, 7)).shape == (0, HEADS, DIM)
        same(cache.tensors(), arrays)
        with pytest.raises(UsageError, match="layers are"):
            cache.key(3)


def test_only_the_blocks_needed_are_read(tmp_path: Path) -> None:
    """A damaged block does not hinder the reading of the others."""
    arrays = tensors()
    packed = bytearray(kvzip.compress(arrays, codec="raw", block_tokens=32))
    with kvzip.open(bytes(packed)) as cache:
        plane = next(plane for plane in cache.planes if (plane.layer, plane.kind) == (1, "key"))
        (entry, *_) = cache._reader.index.covering([plane], 64, 96)
    packed[entry.offset + 100] ^= 1
    with kvzip.open(bytes(packed)) as cache:
        assert cache.key(1, (0, 64)).shape[0] == 64
        assert cache.value(1, (64, 96)).shape[0] == 32
        with pytest.raises(CorruptError, match=r"layer 1 key, tokens 64:96"):
            cache.key(1, (64, 65))


def test_a_closed_cache_reads_nothing(tmp_path: Path) -> None:
    """Not even where the number of its descriptor is another file's by now."""
    arrays = tensors("float16")
    kvzip.compress(arrays, tmp_path / "one.kvz", codec="raw", block_tokens=32)
    kvzip.compress(tensors("float16", 20), tmp_path / "other.kvz", codec="raw")
    with (tmp_path / "one.kvz").open("rb") as file:
        caches = [kvzip.open(each) for each in (tmp_path / "one.kvz", (tmp_path / "one.kvz").read_bytes(), file)]
        assert all(cache.key(0).shape == (TOKENS, HEADS, DIM) for cache in caches)
        for cache in caches[:2]:
            cache.close()
    # The third cache's file was closed by whom it belongs to.
    others = [(tmp_path / "other.kvz").open("rb") for _ in range(4)]
    for cache in caches:
        for use in (partial(cache.key, 0), cache.tensors, cache.__enter__):
            with pytest.raises(UsageError, match="the cache is closed") as error:
                use()
            assert error.value.code == "closed"
        cache.close()
    for other in others:
        other.close()
    source = open_tensors(write(tmp_path / "kv.safetensors", arrays))
    source.close()
    for call, closed in ((kvzip.open, others[0]), (kvzip.decompress, others[0]), (kvzip.compress, source)):
        with pytest.raises(UsageError, match="the source is closed"):
            call(closed)


@pytest.fixture(scope="module")
def packed() -> bytes:
    """20 tokens of float16."""
    return kvzip.compress(tensors("float16", 20), codec="raw", block_tokens=8)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        *(({"tokens": cut}, "bad-range") for cut in ("0:4", 1.5, (3,), (1, 2, 1), [0, 4], slice(0, 2.5), {})),
        *(({"like": like}, "bad-argument") for like in ("foo", "cupy", None, np.zeros(3))),
        *(({"device": device}, "unknown-device") for device in (None, 0, "gpu")),
        ({"threads": "2"}, "bad-argument"),
        ({"member": "0"}, "bad-argument"),
        ({"level": 0.0}, "bad-argument"),
        ({"target": b"path"}, "bad-argument"),
        ({"target": io.StringIO()}, "bad-argument"),
        *(({"source": source}, "bad-argument") for source in (None, 3, {"x": 1}, io.StringIO())),
    ],
)
def test_arguments_of_another_kind_are_named(packed: bytes, arguments: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as error:
        kvzip.decompress(**{"source": packed, **arguments})
    assert error.value.code == code
    assert any(name in str(error.value) for name in arguments)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"source": None}, "source"),
        ({"source": {0: np.zeros(3)}}, "0"),
        ({"source": {"x": [[1, 2], [3]]}}, "'x'"),
        *(({"source": {"x": value}}, "'x'") for value in (None, "text", b"bytes")),
        ({"identity": 3}, "identity"),
        ({"target": 3}, "target"),
        ({"codec": None}, "codec"),
        ({"k_codec": 3}, "codec"),
        ({"layout": 3}, "layout"),
        ({"layer_codec": 3}, "layer_codec"),
        ({"heads": "2"}, "heads"),
        ({"block_tokens": 1.5}, "block_tokens"),
        ({"device": None}, "device"),
    ],
)
def test_compress_names_arguments_of_another_kind(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        kvzip.compress(**{"source": tensors("float16", 20), **arguments})


def test_a_negative_member_is_refused_whatever_the_file_holds(packed: bytes) -> None:
    for data in (packed, packed[:-9]):
        for source in (data, Pipe(data)):
            with pytest.raises(UsageError, match="no member -1: they are counted from 0") as error:
                kvzip.decompress(source, member=-1)
            assert error.value.code == "no-member"


def test_numpys_numbers_and_the_bytes_of_a_file_are_as_good_as_pythons_and_a_stream(packed: bytes) -> None:
    arrays = tensors("float16", 20)
    part = kvzip.decompress(packed, tokens=np.int64(3))
    assert part["layers.0.key"].tobytes() == arrays["layers.0.key"][:, 3:4].tobytes()
    raw = safetensors.numpy.save(arrays)
    expected = kvzip.compress(io.BytesIO(raw))
    for data in (raw, bytearray(raw), memoryview(raw)):
        assert kvzip.compress(data) == expected


def test_numbers_of_another_byte_order_are_the_same_numbers() -> None:
    arrays = tensors("float16", 20)
    swapped = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in arrays.items()}
    assert kvzip.compress(swapped, codec="raw") == kvzip.compress(arrays, codec="raw")


def test_a_lossy_file_records_the_errors_that_it_caused() -> None:
    arrays = tensors("float16", tokens=300)
    packed = io.BytesIO()
    report = kvzip.compress(arrays, packed, codec="cachegen")
    back = kvzip.decompress(packed.getvalue())
    with kvzip.open(packed.getvalue()) as cache:
        columns = cache.statistics
        assert columns is not None
        for found in report.errors:
            name = f"layers.{found.plane.layer}.{found.plane.kind}"
            x, y = arrays[name].astype(np.float64), back[name].astype(np.float64)
            assert found.relative == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-4)
            assert found.max_abs == pytest.approx(np.abs(x - y).max(), rel=1e-4)
            assert columns["relative_error"][found.plane.index] == pytest.approx(found.relative, rel=1e-5)
        assert [columns["max_abs"][plane.index] is None for plane in cache.planes].count(True) == 2


def test_an_existing_target_is_refused_and_a_failed_run_leaves_none(tmp_path: Path) -> None:
    source = write(tmp_path / "kv.safetensors", tensors())
    kvzip.compress(source, tmp_path / "kv.kvz")
    with pytest.raises(RefusedError):
        kvzip.compress(source, tmp_path / "kv.kvz")
    kvzip.compress(source, tmp_path / "kv.kvz", force=True, codec="raw")
    with pytest.raises(RefusedError, match="source itself"):
        kvzip.compress(source, source, force=True)
    packed = bytearray((tmp_path / "kv.kvz").read_bytes())
    packed[len(packed) // 2] ^= 255
    (tmp_path / "bad.kvz").write_bytes(packed)
    with pytest.raises(CorruptError):
        kvzip.decompress(tmp_path / "bad.kvz", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.kvz", "kv.kvz", "kv.safetensors"]


@pytest.mark.parametrize("size", [0, 5, 100])
def test_what_is_no_cache_is_told_apart(size: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello, kvzip! " * size)
    for call in (kvzip.compress, kvzip.decompress):
        with pytest.raises(KvzipError):
            call(tmp_path / "x", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_concatenated_caches_need_a_number() -> None:
    first, second = tensors(), tensors(tokens=20)
    both = kvzip.compress(first, codec="raw") + kvzip.compress(second, codec="raw")
    with pytest.raises(UsageError, match="member"):
        kvzip.decompress(both)
    same(kvzip.decompress(both, member=0), first)
    same(kvzip.decompress(both, member=1), second)
    with pytest.raises(UsageError, match="no member 2"):
        kvzip.open(both, member=2)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("at", [2, 20, 300, -20])
def test_a_whole_member_is_read_whatever_is_broken_of_the_others(number: int, at: int) -> None:
    """A byte turned over in prologue, header, a frame or the trailer of another, or that one's end cut off."""
    parts = [tensors("float16", 20 + 10 * each) for each in range(3)]
    members = [kvzip.compress(each, codec="raw") for each in parts]
    for other in {0, 1, 2} - {number}:
        broken = bytearray(members[other])
        broken[at] ^= 1
        for bad in (broken, broken[:-1], broken[:-200]):
            data = b"".join([*members[:other], bad, *members[other + 1 :]])
            # One is found by way of those behind it, or of those before it.
            if other > number or (len(bad) == len(broken) and at != -20):
                same(kvzip.decompress(data, member=number), parts[number])
                with kvzip.open(data, member=number) as cache:
                    same(cache.tensors(), parts[number])
            with pytest.raises(KvzipError):
                kvzip.decompress(data, member=other)


def test_a_fifo_is_read_as_a_stream(tmp_path: Path) -> None:
    arrays = tensors()
    packed = kvzip.compress(arrays, codec="raw")
    for data, number in ((packed, 0), (packed + packed, 1)):
        fifo = tmp_path / f"fifo{number}"
        os.mkfifo(fifo)
        threading.Thread(target=fifo.write_bytes, args=(data,), daemon=True).start()
        same(kvzip.decompress(fifo, member=number), arrays)


def test_options_reach_the_codec_and_unknown_ones_are_refused() -> None:
    with kvzip.open(kvzip.compress(tensors("float16"), level=9)) as cache:
        fine = cache.header.specs
    with kvzip.open(kvzip.compress(tensors("float16"))) as cache:
        assert cache.header.specs != fine
    with pytest.raises(UsageError, match="did you mean 'level'"):
        kvzip.compress(tensors(), levl=3)
    with pytest.raises(UsageError, match="block_tokens"):
        kvzip.compress(tensors(), block_tokens=0)


def test_planes_that_a_codec_does_not_take_stay_as_they_are_and_say_so() -> None:
    arrays = tensors("float8_e4m3fn")
    told: list[str] = []
    packed = kvzip.compress(arrays, layout="per-layer", codec="cachegen", notice=told.append)
    same(kvzip.decompress(packed), arrays)
    assert len(told) == 1 and "float8_e4m3fn" in told[0] and "cachegen" in told[0]


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_cache_of_no_or_one_token_goes_through(tokens: int) -> None:
    arrays = tensors("float16", tokens)
    same(kvzip.decompress(kvzip.compress(arrays, codec="raw", layout="per-layer")), arrays)


def test_importing_kvzip_and_compressing_numpy_arrays_leaves_torch_alone() -> None:
    code = (
        "import sys, kvzip; light = 'numpy' not in sys.modules; import numpy;"
        "a = {f'layers.0.{k}': numpy.ones((2, 9, 4), 'f2') for k in ('key', 'value')};"
        "kvzip.decompress(kvzip.compress(a)); print(light, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False"]


def test_torch_tensors_come_back_as_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        given = {f"layers.0.{kind}": torch.randn(2, 33, 8).to(dtype) for kind in ("key", "value")}
        back = kvzip.decompress(kvzip.compress(given, codec="raw"), like="torch")
        assert all(back[name].dtype == dtype and torch.equal(back[name], given[name]) for name in given)
