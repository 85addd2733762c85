"""Threat: ``decompress --layers a:b --tokens a:b`` gives other numbers than those asked for, or a file that is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from kvzip.errors import UsageError
from kvzip.layouts import Restriction, map_cache, restrict
from kvzip.tensorfile import TensorSource, from_arrays, open_sink, open_tensors
from tests.tensor_files import SAMPLES, planes_of

NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.suffix != ".md")


def write(source: TensorSource, part: Restriction, target: Path, block_tokens: int = 5) -> None:
    """Write a part of a cache from the whole one's planes, slab by slab."""
    whole = planes_of(source, map_cache(source))
    origins = dict(zip((plane.index for plane in part.cache_map.planes), part.origins, strict=True))
    with open_sink(target, part.files) as sink:
        for tensor_map in part.cache_map.maps:
            for slab in tensor_map.slabs(block_tokens):
                array = np.zeros(slab.shape, slab.dtype)
                places = slab.gather(array)
                for plane, place in zip(slab.planes, places, strict=True):
                    origin = origins[plane.index]
                    place[...] = whole[origin.plane.index][origin.start + slab.start : origin.start + slab.stop]
                slab.scatter(array, places)
                sink.write_runs(tensor_map.tensor.file, *slab.runs(), array)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("layers", "tokens"), [(None, range(3, 9)), (range(1, 2), None), (range(1, 9), range(15, 99))])
def test_a_part_is_a_cache_of_the_same_layout_with_the_same_numbers(
    name: str, layers: range | None, tokens: range | None, tmp_path: Path
) -> None:
    with open_tensors(SAMPLES / name) as source:
        whole_map = map_cache(source)
        whole = planes_of(source, whole_map)
        part = restrict(whole_map, source.files, layers, tokens)
        write(source, part, tmp_path / "part")
    expected = {(plane.layer, plane.kind): whole[plane.index] for plane in whole_map.planes}
    kept = {layer for layer, kind in expected if kind != "bytes" and (layers is None or layer in layers)}
    with open_tensors(tmp_path / "part") as written:
        assert (written.files, written.metadata) == (part.files, source.metadata)
        assert {tensor.name for tensor in written.tensors} <= {tensor.name for tensor in source.tensors}
        assert map_cache(written).layout == whole_map.layout
        found = planes_of(written, part.cache_map)
    assert {plane.layer for plane in part.cache_map.planes if plane.kind != "bytes"} == kept
    for plane in part.cache_map.planes:
        cut = slice(tokens.start, tokens.stop) if tokens and plane.kind != "bytes" else slice(None)
        np.testing.assert_array_equal(found[plane.index], expected[plane.layer, plane.kind][cut])


def test_tensors_of_other_layers_go_stacked_ones_are_cut_and_the_rest_stays() -> None:
    arrays = {f"layers.{n}.{kind}": np.full((2, 8, 4), n, np.float16) for n in range(4) for kind in ("key", "value")}
    source = from_arrays({**arrays, "token_ids": np.arange(8)}, {"model": "m"})
    part = restrict(map_cache(source), source.files, range(1, 3), range(2, 6))
    assert {tensor.name: tensor.shape for tensor in part.tensors} == {
        "token_ids": (8,),
        **{f"layers.{n}.{kind}": (2, 4, 4) for n in (1, 2) for kind in ("key", "value")},
    }
    assert {
        (origin.plane.layer, origin.start, origin.stop) for origin in part.origins if origin.plane.kind != "bytes"
    } == {
        (1, 2, 6),
        (2, 2, 6),
    }
    stacked = from_arrays({"kv": np.zeros((5, 2, 16, 3, 4), np.float16)})
    part = restrict(map_cache(stacked), stacked.files, range(1, 3))
    assert part.tensors[0].shape == (2, 2, 16, 3, 4)
    assert sorted({plane.layer for plane in part.cache_map.planes}) == [1, 2]


def test_a_part_s_files_are_what_the_library_reads(tmp_path: Path) -> None:
    with open_tensors(SAMPLES / "perlayer.safetensors") as source:
        write(source, restrict(map_cache(source), source.files, range(2, 3), range(4)), tmp_path / "part")
        expected = planes_of(source, map_cache(source))
        value = next(plane for plane in map_cache(source).planes if (plane.layer, plane.kind) == (2, "value"))
    found = safetensors.numpy.load_file(tmp_path / "part")
    assert set(found) == {"layers.2.key", "layers.2.value"}
    np.testing.assert_array_equal(found["layers.2.value"].transpose(1, 0, 2), expected[value.index][:4])


def test_each_layer_is_clipped_to_its_own_length() -> None:
    arrays = {f"layers.{n}.{k}": np.zeros((2, tokens, 4), np.float16) for n, tokens in ((0, 80), (1, 51)) for k in "kv"}
    source = from_arrays(arrays)
    part = restrict(map_cache(source), source.files, tokens=range(40, 100))
    assert [tensor.shape[1] for tensor in part.tensors] == [40, 40, 11, 11]
    part = restrict(map_cache(source), source.files, tokens=range(60, 70))
    assert [tensor.shape[1] for tensor in part.tensors] == [10, 10, 0, 0]


def test_folders_lose_the_files_of_other_layers_and_no_others() -> None:
    with open_tensors(SAMPLES / "vllm_triton") as source:
        part = restrict(map_cache(source), source.files, range(1, 2))
    assert [Path(file.path).name for file in part.files] == [
        "model.layers.1.self_attn.attn.safetensors",
        "ids.safetensors",
    ]
    assert [tensor.file for tensor in part.tensors] == [0, 1]


def test_blocks_are_cut_at_blocks_only() -> None:
    source = from_arrays({"kv": np.zeros((4, 2, 16, 3, 8), np.float16)})
    cache_map = map_cache(source, "N,kv,b,H,D")
    assert restrict(cache_map, source.files, tokens=range(16, 48)).tensors[0].shape == (2, 2, 16, 3, 8)
    with pytest.raises(UsageError, match="blocks of 16") as caught:
        restrict(cache_map, source.files, tokens=range(16, 40))
    assert caught.value.code == "tokens-in-blocks"


@pytest.mark.parametrize(
    ("layers", "tokens", "code"),
    [(range(7, 9), None, "layers-range"), (None, range(16, 20), "tokens-range"), (range(2, 2), None, "layers-range")],
)
def test_ranges_that_hold_nothing_are_refused(layers: range | None, tokens: range | None, code: str) -> None:
    with open_tensors(SAMPLES / "perlayer.safetensors") as source, pytest.raises(UsageError) as caught:
        restrict(map_cache(source), source.files, layers, tokens)
    assert caught.value.code == code
