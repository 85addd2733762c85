"""Threat: a file that a real producer wrote is mapped wrongly, or does not come back byte for byte."""

from __future__ import annotations

import io
import json

import ml_dtypes
import numpy as np
import pytest

from kvzip.cache import Kind
from kvzip.layouts import CacheMap, map_cache
from kvzip.tensorfile import open_tensors, tensors_of
from tests.tensor_files import SAMPLES, Pipe, copy_through, planes_of

GDS = "lmcache_gds/b353e44c989cd5f2.kvcache.safetensors"
LAYOUTS = {
    "perlayer.safetensors": "per-layer",
    "hf_dynamiccache.safetensors": "per-layer",
    "past_key_values.safetensors": "per-layer",
    "mlx_prompt_cache.safetensors": "mlx",
    "lmcache_blob.safetensors": "lmcache-blob",
    "lmcache_v0_disk": "lmcache-blob",
    "lmcache_2ltd.safetensors": "lmcache-2ltd",
    "lmcache_gds": "lmcache-2ltd",
    GDS: "lmcache-2ltd",
    "vllm_flat": "vllm-flat",
    "vllm_triton": "vllm-triton",
    "vllm_bhnc": "vllm-fused",
}
FILES = [name for name in LAYOUTS if (SAMPLES / name).is_file()]


@pytest.fixture(scope="module")
def reference() -> dict[tuple[int, Kind], np.ndarray]:
    """Layer and kind to ``[tokens, heads, head_dim]``, read without any of the code under test."""
    content = (SAMPLES / "perlayer.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    found: dict[tuple[int, Kind], np.ndarray] = {}
    for name, entry in json.loads(content[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            data = np.frombuffer(content[8 + size :][begin:end], ml_dtypes.bfloat16)
            _, layer, kind = name.split(".")
            found[int(layer), kind] = data.reshape(entry["shape"]).transpose(1, 0, 2)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("block_tokens", [5, 1024])
def test_every_producer_s_planes_are_those_of_the_per_layer_file(
    name: str, block_tokens: int, reference: dict[tuple[int, Kind], np.ndarray]
) -> None:
    with open_tensors(SAMPLES / name) as source:
        cache_map = map_cache(source, heads=3)
        assert cache_map.layout == LAYOUTS[name]
        arrays = planes_of(source, cache_map, block_tokens)
    planes = [plane for plane in cache_map.planes if plane.kind != "bytes"]
    assert [plane.index for plane in cache_map.planes] == list(range(len(cache_map.planes)))
    assert {(plane.layer, plane.kind) for plane in planes} == set(reference)
    for plane in planes:
        assert (plane.tokens, plane.heads, plane.head_dim, plane.dtype) == (16, 3, 64, "bfloat16")
        np.testing.assert_array_equal(arrays[plane.index], reference[plane.layer, plane.kind])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("block_tokens", [5, 1024])
def test_slabs_give_the_identical_file(name: str, block_tokens: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("copy") / "copy"
    with open_tensors(SAMPLES / name) as source:
        copy_through(source, target, block_tokens)
    assert target.read_bytes() == (SAMPLES / name).read_bytes()


@pytest.mark.parametrize("name", FILES)
def test_whole_outer_indices_flow_through_pipes(name: str) -> None:
    content = (SAMPLES / name).read_bytes()
    target = io.BytesIO()
    with open_tensors(Pipe(content)) as source:  # type: ignore[arg-type]
        copy_through(source, target, 1 << 40)
    assert target.getvalue() == content


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_stored_map_needs_no_detection(name: str) -> None:
    with open_tensors(SAMPLES / name) as source:
        cache_map = map_cache(source)
        tensors, _ = tensors_of(source.files)
        assert CacheMap.from_json(cache_map.to_json(), tensors) == CacheMap(cache_map.layout, cache_map.maps)


def test_heads_that_no_axis_tells_are_one_and_a_notice_says_so() -> None:
    with open_tensors(SAMPLES / "lmcache_2ltd.safetensors") as source:
        cache_map = map_cache(source)
        assert (cache_map.planes[0].heads, cache_map.planes[0].head_dim) == (1, 192)
        assert "--heads" in cache_map.notices[0]
        assert map_cache(source, head_dim=64).planes[0].heads == 3
        assert not map_cache(source, head_dim=64).notices


def test_head_major_tensors_are_read_in_large_runs() -> None:
    with open_tensors(SAMPLES / "perlayer.safetensors") as source:
        tensor_map = map_cache(source).maps[0]
        (whole,) = tensor_map.slabs(1024)
        assert whole.runs() == ([tensor_map.tensor.offset], tensor_map.tensor.nbytes)
        first = next(tensor_map.slabs(8))
        offsets, nbytes = first.runs()
        assert (len(offsets), nbytes) == (3, 8 * 64 * 2)


def test_views_need_no_copy() -> None:
    with open_tensors(SAMPLES / "vllm_bhnc") as source:
        slab = next(map_cache(source).maps[0].slabs())
        array = np.zeros(slab.shape, slab.dtype)
        key, value = slab.views(array)
        assert not slab.staged
        assert np.shares_memory(key, array)
        value[...] = 1
        assert (array[..., 64:] == 1).all()
        assert (array[..., :64] == 0).all()
