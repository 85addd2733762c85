"""Threat: a layout is guessed. Detection takes what only one layout explains, and else says what the user can pass."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from kvzip.cache import Plane
from kvzip.errors import KvzipError, UsageError
from kvzip.layouts import LAYOUTS, CacheMap, find_layout, map_cache
from kvzip.tensorfile import from_arrays, open_raw, open_tensors, tensors_of
from tests.tensor_files import SAMPLES, copy_through

BF16 = np.dtype(ml_dtypes.bfloat16)


def zeros(*shape: int, dtype: object = BF16) -> np.ndarray:
    return np.zeros(shape, dtype)  # type: ignore[call-overload]


def mapped(
    arrays: Mapping[str, np.ndarray], layout: str | None = None, metadata: Mapping[str, str] | None = None, **heads: int
) -> CacheMap:
    return map_cache(from_arrays(arrays, metadata), layout, **heads)


def kv(cache_map: CacheMap) -> list[Plane]:
    return [plane for plane in cache_map.planes if plane.kind != "bytes"]


def folder(path: Path, *shape: int, layers: int = 12) -> Path:
    path.mkdir()
    for layer in range(layers):
        safetensors.numpy.save_file(
            {"kv_cache": zeros(*shape)}, path / f"model.layers.{layer}.self_attn.attn.safetensors"
        )
    return path


NAMES = [
    ("layers.{}.key", "layers.{}.value"),
    ("layers.{}.keys", "layers.{}.values"),
    ("model.layers.{}.self_attn.k", "model.layers.{}.self_attn.v"),
    ("key_cache.{}", "value_cache.{}"),
    ("key_cache_{}", "value_cache_{}"),
    ("past_key_values.{}.key", "past_key_values.{}.value"),
    ("past_key_values.{}.0", "past_key_values.{}.1"),
    ("present.{}.key", "present.{}.value"),
    ("{}.k", "{}.v"),
    ("k_{}", "v_{}"),
    ("layer_{}_key", "layer_{}_value"),
    ("cache_k_l{}", "cache_v_l{}"),
    ("layers.{}.key_states", "layers.{}.value_states"),
]


@pytest.mark.parametrize(("key", "value"), NAMES)
@pytest.mark.parametrize("shape", [(3, 16, 8), (1, 3, 16, 8)])
def test_every_usual_name_of_transformers_caches(key: str, value: str, shape: tuple[int, ...]) -> None:
    expected = {
        name.format(layer): (layer, kind, 16, 3, 8)
        for layer in range(12)
        for name, kind in ((key, "key"), (value, "value"))
    }
    cache_map = mapped({**{name: zeros(*shape) for name in expected}, "token_ids": zeros(16, dtype=np.int64)})
    assert cache_map.layout == "per-layer"
    assert not cache_map.notices
    planes = {tensor_map.tensor.name: tensor_map.planes[0] for tensor_map in cache_map.maps if tensor_map.role}
    assert {name: (p.layer, p.kind, p.tokens, p.heads, p.head_dim) for name, p in planes.items()} == expected


def test_batches_become_sequences() -> None:
    cache_map = mapped({"layers.0.key": zeros(4, 3, 16, 8), "layers.0.value": zeros(4, 3, 16, 8)})
    assert [plane.sequence for plane in cache_map.planes] == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_a_cache_of_no_or_one_token_is_a_cache(tokens: int) -> None:
    cache_map = mapped({"layers.0.key": zeros(8, tokens, 4), "layers.0.value": zeros(8, tokens, 4)})
    assert {(plane.tokens, plane.heads) for plane in cache_map.planes} == {(tokens, 8)}
    assert sum(1 for tensor_map in cache_map.maps for _ in tensor_map.slabs()) == (2 if tokens else 0)


def test_tokens_before_heads_are_not_taken_for_heads() -> None:
    arrays = {"layers.0.key": zeros(500, 3, 8), "layers.0.value": zeros(500, 3, 8)}
    with pytest.raises(UsageError) as caught:
        mapped(arrays)
    assert caught.value.code == "layout-ambiguous"
    assert "--layout per-layer-tokens-first" in str(caught.value)
    assert mapped(arrays, "per-layer-tokens-first").planes[0].tokens == 500
    assert mapped(arrays, heads=3).layout == "per-layer-tokens-first"


def test_layers_of_different_length_lie_in_one_file() -> None:
    """Sliding windows: a global layer of 800 tokens, a local one of 511."""
    cache_map = mapped({f"layers.{n}.{k}": zeros(1, 2, 800 - 289 * n, 4) for n in (0, 1) for k in ("key", "value")})
    assert [plane.tokens for plane in cache_map.planes] == [800, 800, 511, 511]


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8])
def test_quantized_caches_keep_their_dtype(dtype: type) -> None:
    cache_map = mapped({f"layers.0.{kind}": zeros(2, 5, 4, dtype=dtype) for kind in ("key", "value")})
    assert [plane.dtype for plane in cache_map.planes] == [np.dtype(dtype).name] * 2


def test_keys_and_values_may_differ_in_width_and_dtype() -> None:
    cache_map = mapped({"layers.0.key": zeros(2, 5, 24), "layers.0.value": zeros(2, 5, 16, dtype=np.float16)})
    assert [(plane.head_dim, plane.dtype) for plane in cache_map.planes] == [(24, "bfloat16"), (16, "float16")]


BROKEN = {
    "layer-missing": {f"layers.{n}.{k}": zeros(2, 5, 4) for n in (0, 1, 4) for k in ("key", "value")},
    "layer-mismatch": {"layers.0.key": zeros(2, 5, 4), "layers.0.value": zeros(2, 6, 4)},
    "layer-mismatch ": {"layers.0.key": zeros(2, 5, 4)},
}


@pytest.mark.parametrize("code", BROKEN)
def test_incomplete_caches_are_loud_unless_the_layout_is_named(code: str) -> None:
    with pytest.raises(UsageError, match="pass --layout per-layer if") as caught:
        mapped(BROKEN[code])
    assert caught.value.code == code.strip()
    assert len(mapped(BROKEN[code], "per-layer").planes) == len(BROKEN[code])


def test_the_missing_layers_are_named() -> None:
    with pytest.raises(UsageError, match="layers 2-3 of 0-4 are missing"):
        mapped(BROKEN["layer-missing"])
    with pytest.raises(UsageError, match="layer 1 of 0-2 is missing"):
        mapped({f"layers.{n}.{k}": zeros(2, 5, 4) for n in (0, 2) for k in ("key", "value")})


def test_two_tensors_for_one_plane_are_refused() -> None:
    arrays = {"layers.0.key": zeros(2, 5, 4), "layers.00.key": zeros(2, 5, 4), "layers.0.value": zeros(2, 5, 4)}
    with pytest.raises(UsageError, match=r"layers\.0\.key and layers\.00\.key both hold key of layer 0"):
        mapped(arrays)


@pytest.mark.parametrize(
    "names", [("K", "V"), ("keys", "values"), ("k_cache", "v_cache"), ("key_cache", "value_cache")]
)
@pytest.mark.parametrize(
    ("shape", "layout"),
    [((4, 3, 16, 8), "stacked"), ((4, 1, 3, 16, 8), "stacked"), ((4, 16, 3, 8), "stacked-tokens-first")],
)
def test_stacked_tensors_are_told_apart_by_their_long_axis(
    names: tuple[str, str], shape: tuple[int, ...], layout: str
) -> None:
    cache_map = mapped({name: zeros(*shape) for name in names})
    assert cache_map.layout == layout
    assert {(plane.layer, plane.tokens, plane.heads) for plane in kv(cache_map)} == {(n, 16, 3) for n in range(4)}


@pytest.mark.parametrize("shape", [(4, 8, 8, 16), (4, 8, 6, 16), (4, 1, 8, 16), (4, 8, 1, 16)])
def test_stacked_tensors_whose_heads_could_be_tokens_are_refused(shape: tuple[int, ...]) -> None:
    arrays = {name: zeros(*shape) for name in ("K", "V")}
    with pytest.raises(UsageError) as caught:
        mapped(arrays)
    assert "--layout stacked " in str(caught.value)
    assert "--layout stacked-tokens-first" in str(caught.value)
    assert mapped(arrays, "stacked").planes[0].heads == shape[1]
    assert mapped(arrays, "stacked-tokens-first").planes[0].heads == shape[2]


def mlx_metadata(classes: list[str], **states: str) -> dict[str, str]:
    return {f"2.{layer}": name for layer, name in enumerate(classes)} | {"1.model": "m"} | states


def test_mlx_padding_beyond_the_true_offset_is_told() -> None:
    arrays = {f"{layer}.{part}": zeros(1, 2, 256, 8) for layer in (0, 1) for part in (0, 1)}
    cache_map = mapped(arrays, metadata=mlx_metadata(["KVCache"] * 2) | {"0.0": "200", "0.1": "200"})
    assert (cache_map.layout, cache_map.planes[0].tokens) == ("mlx", 256)
    assert "0-1 are padded: 200 of 256 tokens" in cache_map.notices[0]


def test_mlx_quantized_and_recurrent_layers_pass_through_with_a_notice() -> None:
    arrays = {
        f"0.{part}.{piece}": zeros(1, 2, 64, 8, dtype=np.uint32 if piece == 0 else BF16)
        for part in (0, 1)
        for piece in range(3)
    }
    arrays |= {
        "1.0": zeros(1, 2, 16, 8),
        "1.1": zeros(1, 2, 16, 8),
        "2.0": zeros(1, 2, 16, 8),
        "2.1": zeros(1, 3, 4, 4),
    }
    cache_map = mapped(arrays, metadata=mlx_metadata(["QuantizedKVCache", "KVCache", "MambaCache"]))
    assert [(plane.layer, plane.kind) for plane in kv(cache_map)] == [(1, "key"), (1, "value")]
    assert "layers 0, 2 hold quantized or recurrent state" in cache_map.notices[0]


def test_a_classic_blob_has_any_name() -> None:
    assert mapped({"whatever": zeros(5, 2, 16, 3, 8)}).layout == "lmcache-blob"


@pytest.mark.parametrize(("shape", "other"), [((2, 2, 16, 3, 8), "kv-first"), ((4, 2, 3, 64, 8), "blob-heads-first")])
def test_blobs_that_may_be_something_else_are_refused(shape: tuple[int, ...], other: str) -> None:
    with pytest.raises(UsageError, match=f"--layout {other}"):
        mapped({"kv": zeros(*shape)})
    assert mapped({"kv_chunk": zeros(*shape)}).layout == "lmcache-blob"
    assert mapped({"kv": zeros(*shape)}, "lmcache-blob").planes[0].tokens == shape[2]


def test_paged_blocks_of_several_layers_are_not_taken_for_blobs() -> None:
    arrays = {f"layers.{layer}.kv": zeros(5, 2, 16, 3, 8) for layer in range(3)}
    with pytest.raises(UsageError, match="--layout paged-blocks-first"):
        mapped(arrays)
    cache_map = mapped(arrays, "paged-blocks-first")
    assert {(plane.layer, plane.kind, plane.tokens) for plane in cache_map.planes} == {
        (layer, kind, 80) for layer in range(3) for kind in ("key", "value")
    }


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((2, 4, 16, 24), "lmcache-2ltd"), ((2, 16, 24), "lmcache-2td"), ((16, 2, 24), "lmcache-t2d")],
)
def test_lmcache_v1_tensors_are_known_by_their_name(shape: tuple[int, ...], layout: str) -> None:
    cache_map = mapped({"kvcache": zeros(*shape)}, heads=3)
    assert cache_map.layout == layout
    assert {(plane.tokens, plane.heads, plane.head_dim) for plane in cache_map.planes} == {(16, 3, 8)}


def test_lmcache_fused_and_mla_look_the_same_and_are_refused() -> None:
    arrays = {"kvcache": zeros(1, 4, 16, 48)}
    with pytest.raises(UsageError, match=r"lmcache-fused(.|\n)*lmcache-mla"):
        mapped(arrays)
    assert [plane.kind for plane in mapped(arrays, "lmcache-mla").planes] == ["latent"] * 4
    assert [plane.channels for plane in mapped(arrays, "lmcache-fused").planes] == [24] * 8


def test_two_of_everything_is_refused() -> None:
    with pytest.raises(UsageError, match=r"lmcache-2td(.|\n)*lmcache-t2d"):
        mapped({"kvcache": zeros(2, 2, 24)})


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((2, 32, 24), "vllm-flat"),
        ((32, 2, 3, 8), "vllm-triton"),
        ((32, 3, 16), "vllm-fused"),
        ((32, 576), "vllm-mla"),
    ],
)
def test_vllm_folders_in_every_form(shape: tuple[int, ...], layout: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "in", *shape)
    (path / "notes.txt").write_text("other files pass through")
    with open_tensors(path) as source:
        cache_map = copy_through(source, tmp_path / "out", 16)
        assert cache_map.layout == layout
        assert [plane.layer for plane in kv(cache_map)][:: len(kv(cache_map)) // 12] == list(range(12))
        assert {plane.tokens for plane in kv(cache_map)} == {32}
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()
    }


def test_vllm_folders_of_two_heads_are_refused(tmp_path: Path) -> None:
    """``num_kv_heads == 2``: ``[T, 2, 2D]`` or ``[T, kv, C]``?"""
    with open_tensors(folder(tmp_path / "in", 32, 2, 128)) as source:
        with pytest.raises(UsageError, match=r"vllm-fused(.|\n)*vllm-token-flat"):
            map_cache(source)
        assert map_cache(source, "vllm-fused").planes[0].heads == 2


def test_two_prompts_in_one_folder_are_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("x").mkdir()
    folder(tmp_path / "x" / "one", 2, 32, 24)
    folder(tmp_path / "x" / "two", 2, 32, 24)
    with open_tensors(tmp_path / "x") as source, pytest.raises(UsageError) as caught:
        map_cache(source)
    assert caught.value.code == "layout-twice"


def test_lmcache_chunks_in_one_folder_are_sequences(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt", "c.pt"):
        safetensors.numpy.save_file({"kv_chunk": zeros(3, 2, 16, 2, 4)}, tmp_path / name)
    with open_tensors(tmp_path) as source:
        cache_map = map_cache(source)
    assert [plane.sequence for plane in cache_map.planes] == [0] * 6 + [1] * 6 + [2] * 6


@pytest.mark.parametrize("name", ["layers.{}.latent", "layers.{}.compressed_kv", "layer_{}_kv_latent"])
@pytest.mark.parametrize("shape", [(16, 576), (1, 16, 576)])
def test_mla_latents_are_one_plane_per_layer(name: str, shape: tuple[int, ...]) -> None:
    cache_map = mapped({name.format(layer): zeros(*shape) for layer in range(3)})
    assert cache_map.layout == "mla"
    assert {(plane.kind, plane.tokens, plane.heads, plane.head_dim) for plane in cache_map.planes} == {
        ("latent", 16, 1, 576)
    }


@pytest.mark.parametrize(
    ("layout", "shape", "tokens"),
    [
        ("paged", (2, 5, 16, 3, 8), 80),
        ("paged-blocks-first", (5, 2, 16, 3, 8), 80),
        ("paged-heads-first", (5, 3, 16, 16), 80),
        ("sglang-layer-first", (2, 4, 64, 3, 8), 64),
        ("sglang-page-first", (2, 64, 4, 3, 8), 64),
    ],
)
def test_page_files_need_their_layout(layout: str, shape: tuple[int, ...], tokens: int, tmp_path: Path) -> None:
    path = tmp_path / "page.bin"
    content = np.random.default_rng(1).bytes(2 * int(np.prod(shape)))
    path.write_bytes(content)
    with open_raw(path, shape, "bfloat16") as source:
        assert {plane.tokens for plane in copy_through(source, tmp_path / "out", layout=layout).planes} == {tokens}
        stored = map_cache(source, layout).to_json()
        flat, _ = tensors_of(source.files)  # as a decoder knows it: bytes without a shape
        assert CacheMap.from_json(stored, flat).planes == map_cache(source, layout).planes
    assert (tmp_path / "out").read_bytes() == content


def test_declared_patterns_take_the_user_s_words() -> None:
    arrays = {f"block{n}/{w}": zeros(16, 3, 8) for n in range(2) for w in ("att_k", "att_v")}
    with pytest.raises(UsageError) as caught:
        mapped(arrays)
    assert caught.value.code == "layout-undetected"
    cache_map = mapped(arrays, "block{L}/{att_k|att_v}=T,H,D")
    assert {(plane.layer, plane.kind, plane.tokens) for plane in cache_map.planes} == {
        (layer, kind, 16) for layer in range(2) for kind in ("key", "value")
    }
    assert mapped(arrays, "*att_k=T,H,D;*att_v=T,H,D").planes == cache_map.planes


def test_axes_alone_take_layer_and_kind_from_the_names() -> None:
    arrays = {f"layers.{n}.{k}": zeros(16, 3, 8) for n in (0, 11) for k in ("key", "value")}
    cache_map = mapped({**arrays, "token_ids": zeros(16, dtype=np.int64)}, "T,H,D")
    assert {(plane.layer, plane.kind) for plane in kv(cache_map)} == {
        (layer, kind) for layer in (0, 11) for kind in ("key", "value")
    }
    with pytest.raises(UsageError, match=r"\{kv\}"):
        mapped({"layers.0.tensor": zeros(16, 3, 8)}, "T,H,D")


@pytest.mark.parametrize(
    ("layout", "code"),
    [
        ("kvv", "layout-unknown"),
        ("L,kv,T", "layout-axes"),
        ("{kv}{kv}=T,H,D", "layout-pattern"),
        ("L,kv,T,H,D", "layout-shape"),
        ("layers.{L}.{kv}=B,H,T,D", "layout-shape"),
        ("vllm-flat", "layout-shape"),
    ],
)
def test_layouts_that_do_not_fit_say_why(layout: str, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        mapped({"layers.0.key": zeros(3, 16, 8), "layers.0.value": zeros(3, 16, 8)}, layout)
    assert caught.value.code == code


def test_heads_that_do_not_fit_say_why() -> None:
    with pytest.raises(UsageError, match="24 channels"):
        mapped({"kvcache": zeros(2, 4, 16, 24)}, heads=5)
    with pytest.raises(UsageError, match="24 channels"):
        mapped({"kvcache": zeros(2, 4, 16, 24)}, heads=3, head_dim=9)
    with pytest.raises(UsageError, match="has 3 heads"):
        mapped({"layers.0.key": zeros(3, 16, 8), "layers.0.value": zeros(3, 16, 8)}, "per-layer", heads=4)


def test_files_without_keys_and_values_pass_through_and_say_so() -> None:
    cache_map = mapped({"ids": zeros(100, dtype=np.int64), "empty": zeros(0, 4)})
    assert cache_map.layout == "none"
    assert {plane.kind for plane in cache_map.planes} == {"bytes"}
    assert "losslessly" in cache_map.notices[0]


def test_model_weights_are_not_taken_for_a_cache() -> None:
    arrays = {f"model.layers.{n}.self_attn.{k}_proj.weight": zeros(24, 24) for n in range(2) for k in "kv"}
    with pytest.raises(UsageError, match="--layout none"):
        mapped(arrays)
    assert mapped(arrays, "none").planes[0].kind == "bytes"


def test_tensors_beside_the_cache_pass_through_and_are_named_if_they_look_like_one() -> None:
    arrays = {"layers.0.key": zeros(3, 16, 8), "layers.0.value": zeros(3, 16, 8), "extra": zeros(3, 16, 8)}
    cache_map = mapped(arrays)
    assert len(kv(cache_map)) == 2
    assert "extra" in cache_map.notices[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_named_layout_is_its_own_declaration(name: str) -> None:
    layout = LAYOUTS[name]
    if layout.clauses:
        assert find_layout(str(layout)).clauses == layout.clauses
        assert layout.summary


def test_llama_cpp_sessions_are_refused() -> None:
    with pytest.raises(KvzipError):
        open_tensors(io.BytesIO(b"nsgg\x09\0\0\0" + bytes(100)))


def test_the_samples_fit_no_second_layout() -> None:
    """What detection accepts, it accepts without ``--heads`` or any other help."""
    for path in SAMPLES.iterdir():
        if path.suffix != ".md":
            with open_tensors(path) as source:
                assert map_cache(source).layout != "none"
