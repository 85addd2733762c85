"""Threat: an axis is confused with another, for any declaration that the grammar allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvzip.errors import CorruptError, UsageError
from kvzip.layouts import CacheMap, Role, map_cache
from kvzip.layouts.axes import Grid, parse_axes
from kvzip.tensorfile import ArraySink, TensorSource, from_arrays
from tests.tensor_files import planes_of

SIZES = {"L": 3, "kv": 2, "B": 2, "T": 7, "N": 3, "b": 4, "H": 5, "D": 6, "C": 30, "2D": 12, "2C": 60, "A": 9, "1": 1}


@st.composite
def declarations(draw: st.DrawFn) -> tuple[str, ...]:
    """Any sound list of axes, in any order."""
    channel = draw(st.sampled_from(["D", "C", "2D", "2C", "A"]))
    axes = [channel, *draw(st.sampled_from([["T"], ["N", "b"]]))]
    axes += draw(st.lists(st.sampled_from(["L", "B", "1"]), unique=True))
    axes += ["H"] if channel in ("D", "2D") and draw(st.booleans()) else []
    axes += ["kv"] if channel in ("D", "C") and draw(st.booleans()) else []
    order = draw(st.permutations(axes))
    return tuple(sorted(order, key=lambda axis: axis == "b" and order.index("N") > order.index("b")))


def expected_planes(array: np.ndarray, axes: tuple[str, ...]) -> dict[tuple[int, int, int], np.ndarray]:
    """Layer, key or value, sequence to ``[tokens, channels]``, by fancy indexing element by element."""
    where = {axis: number for number, axis in enumerate(axes)}
    sizes = {axis: array.shape[number] for axis, number in where.items()}
    tokens = sizes.get("T", 1) * sizes.get("N", 1) * sizes.get("b", 1)
    channel = next(axis for axis in axes if axis in ("D", "C", "2D", "2C", "A"))
    fused = channel.startswith("2")
    width = sizes[channel] // 2 if fused else sizes[channel]
    found = {}
    for layer in range(sizes.get("L", 1)):
        for kind in range(2 if fused else sizes.get("kv", 1)):
            for sequence in range(sizes.get("B", 1)):
                plane = np.zeros((tokens, sizes.get("H", 1) * width), array.dtype)
                for token in range(tokens):
                    for head in range(sizes.get("H", 1)):
                        at = {"L": layer, "kv": kind, "B": sequence, "T": token, "H": head, "1": 0}
                        at |= {"N": token // sizes.get("b", 1), "b": token % sizes.get("b", 1)}
                        at[channel] = slice(kind * width, (kind + 1) * width) if fused else slice(None)
                        plane[token, head * width : (head + 1) * width] = array[tuple(at[axis] for axis in axes)]
                found[layer, kind, sequence] = plane
    return found


def source_of(axes: tuple[str, ...]) -> tuple[TensorSource, np.ndarray, CacheMap]:
    shape = [SIZES[axis] for axis in axes]
    array = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    source = from_arrays({"kv": array})
    grid = Grid(axes, tuple(shape))
    kind = "latent" if grid.channel_axis == "A" else None if grid.kinds == 2 else "key"
    return source, array, CacheMap.build("test", source.tensors, [Role(axes, layer=4, kind=kind)])


@given(declarations(), st.sampled_from([1, 3, 4, 1024]))
def test_planes_hold_the_elements_that_the_axes_say(axes: tuple[str, ...], block_tokens: int) -> None:
    source, array, cache_map = source_of(axes)
    arrays = planes_of(source, cache_map, block_tokens)
    expected = expected_planes(array, axes)
    assert len(cache_map.planes) == len(expected)
    for plane in cache_map.planes:
        kind = 1 if plane.kind == "value" else 0
        np.testing.assert_array_equal(
            arrays[plane.index].reshape(plane.tokens, plane.channels), expected[plane.layer - 4, kind, plane.sequence]
        )


@given(declarations(), st.sampled_from([1, 3, 4, 1024]))
def test_what_is_filled_into_planes_comes_out_in_the_tensor(axes: tuple[str, ...], block_tokens: int) -> None:
    source, array, cache_map = source_of(axes)
    arrays = planes_of(source, cache_map)
    sink = ArraySink(source.tensors)
    for slab in cache_map.maps[0].slabs(block_tokens):
        memory = np.full(slab.shape, -1.0)
        targets = slab.gather(memory)
        for plane, target in zip(slab.planes, targets, strict=True):
            target[...] = arrays[plane.index][slab.start : slab.stop]
        slab.scatter(memory, targets)
        sink.write_runs(0, *slab.runs(), memory)
    np.testing.assert_array_equal(sink.arrays["kv"], array)


@given(declarations())
def test_unstaged_slabs_are_affine_views(axes: tuple[str, ...]) -> None:
    _, _, cache_map = source_of(axes)
    for slab in cache_map.maps[0].slabs():
        memory = np.zeros(slab.shape)
        if not slab.staged:
            assert all(np.shares_memory(view, memory) and view.strides[2] == 8 for view in slab.views(memory))


@pytest.mark.parametrize(
    "text", ["", "T", "T,X", "H,D", "T,T,D", "T,N,b,D", "N,D", "T,D,C", "T,H,C", "kv,T,2D", "kv,T,A", "T;D", "L kv T D"]
)
def test_declarations_that_describe_no_cache_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_axes(text)


def test_a_few_bytes_cannot_declare_millions_of_planes() -> None:
    source = from_arrays({"kv": np.zeros((1 << 30, 2, 0, 1, 1), np.float16)})
    with pytest.raises(UsageError, match="at most") as caught:
        map_cache(source, "L,kv,T,H,D")
    assert caught.value.code == "layout-planes"


SOUND = {"layout": "x", "axes": ["L,kv,T,H,D"], "tensors": [[0, 0, None, 1, 0]]}


@pytest.mark.parametrize(
    "change",
    [
        {"axes": ["L,kv,H,D"]},
        {"axes": []},
        {"axes": None},
        {"axes": ["kv,T,H,D"]},
        {"tensors": []},
        {"tensors": [None, None]},
        {"tensors": [[0, 0, None, 1]]},
        {"tensors": [[0, 0, "key", 1, 0]]},
        {"tensors": [[0, 0, "bytes", 1, 0]]},
        {"tensors": [[0, -1, None, 1, 0]]},
        {"tensors": [[0, 0, None, 0.5, 0]]},
        {"tensors": [[7, 0, None, 1, 0]]},
        {"tensors": 5},
        {"raw": {"0": {"dtype": "float16", "shape": [1]}}},
        {"raw": 5},
    ],
)
def test_a_hostile_map_is_corrupt(change: dict[str, object]) -> None:
    source = from_arrays({"kv": np.zeros((3, 2, 4, 5, 6), np.float16)})
    assert len(CacheMap.from_json(SOUND, source.tensors).planes) == 6
    with pytest.raises(CorruptError):
        CacheMap.from_json({**SOUND, **change}, source.tensors)


@pytest.mark.parametrize("obj", [None, 5, [], {}, "x"])
def test_a_map_that_is_no_map_is_corrupt(obj: object) -> None:
    with pytest.raises(CorruptError):
        CacheMap.from_json(obj, [])
