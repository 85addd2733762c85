"""kvtc on caches that no model makes: every one comes back, what has no scale is exact, nothing is a surprise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvzip
from kvzip.errors import CorruptError, UsageError
from kvzip.profiles.library import Embedded, offering
from kvzip.profiles.profile import Profile
from tests import profiles

STEP = 0.25


def nan_tokens(x: np.ndarray) -> None:
    x[:, 3], x[:, 5, 0, 1], x[:, -1, 0, 0] = np.nan, np.inf, -np.inf


def all_nan(x: np.ndarray) -> None:
    x[...] = np.nan


def zeros(x: np.ndarray) -> None:
    x[...] = 0


def constant(x: np.ndarray) -> None:
    x[...] = -3.25


def steps(x: np.ndarray) -> None:
    x[:, :, 0] = np.arange(x.shape[1])[None, :, None]


def outliers(x: np.ndarray) -> None:
    x[:, 4, 0, 2], x[:, 6, 0, 2] = 6e4, -6e4


def tiny(x: np.ndarray) -> None:
    x *= 1e-4


def one_wild_channel(x: np.ndarray) -> None:
    x[..., 1] *= 5000


ODD: dict[str, Callable[[np.ndarray], None]] = {
    f.__name__: f for f in (nan_tokens, all_nan, zeros, constant, steps, outliers, tiny, one_wild_channel)
}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


@pytest.fixture(scope="module")
def toy() -> Profile:
    return profiles.profile()


@pytest.fixture(scope="module")
def odd_toy() -> Profile:
    """Of heads with an odd number of channels: the last one does not turn."""
    return profiles.profile(dim=33)


@pytest.fixture(autouse=True)
def within_reach(toy: Profile, odd_toy: Profile) -> Iterator[None]:
    with offering(Embedded("toy", one.hash, one.to_bytes) for one in (toy, odd_toy)):
        yield


def cache(tokens: int, dim: int, dtype: Any, change: Callable[[np.ndarray], None] | None = None) -> dict[str, Any]:
    keys, values = profiles.cache(2, tokens, dim=dim)
    if change is not None:
        change(keys)
        change(values)
    with np.errstate(over="ignore"):
        return {
            f"layers.{i}.{kind}": np.ascontiguousarray(planes[i].swapaxes(0, 1)).astype(dtype)
            for kind, planes in (("key", keys), ("value", values))
            for i in range(len(keys))
        }


def check(tensors: dict[str, Any], *, near: float | None = None, **options: Any) -> int:
    """Round trip: the sink and tokens with NaN or Inf are exact, the rest is finite, and ``near`` if that is given."""
    packed = kvzip.compress(tensors, codec="kvtc", device="cpu", notice=lambda _: None, **options)
    restored = kvzip.decompress(packed, device="cpu")
    for name, array in tensors.items():
        x, y = array.astype(np.float64), restored[name].astype(np.float64)
        odd = ~np.isfinite(x).all(axis=(0, 2))
        odd[: options.get("sinks", 1)] = True
        np.testing.assert_array_equal(x[:, odd], y[:, odd])
        assert np.isfinite(y[:, ~odd]).all()
        if near is not None and (~odd).any():
            assert np.linalg.norm(x[:, ~odd] - y[:, ~odd]) <= near * np.linalg.norm(x[:, ~odd]) + 1e-12
    return len(packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ODD)
def test_odd_numbers_without_a_profile(name: str, dtype: str) -> None:
    """The step bounds the error whatever the numbers are; a plane of one number costs next to nothing."""
    size = check(cache(70, 32, DTYPES[dtype], ODD[name]), step=STEP, near=0.2, rope="theta=1e4")
    if name == "zeros":
        assert size < 16000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ODD)
def test_odd_numbers_with_a_profile(name: str, dtype: str, toy: Profile) -> None:
    """A basis may not fit such numbers, and tells so by its errors; it never breaks on them."""
    check(cache(70, 32, DTYPES[dtype], ODD[name]), step=STEP, profile=toy.hash)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 31, 32, 33])
def test_few_tokens(tokens: int, learned: bool, toy: Profile) -> None:
    """One token, fewer tokens than sinks, and a window that meets the sinks."""
    how: dict[str, Any] = {"profile": toy.hash} if learned else {"rope": "auto"}
    for sinks, window in ((0, 0), (1, 0), (4, 0), (1, 40)):
        tensors = cache(tokens, 32, np.float16)
        packed = kvzip.compress(
            tensors, codec="kvtc", device="cpu", sinks=sinks, window=window, step=STEP, notice=lambda _: None, **how
        )
        restored = kvzip.decompress(packed, device="cpu")
        for name, array in tensors.items():
            kept = [i for i in range(tokens) if i < sinks or i >= tokens - window]
            np.testing.assert_array_equal(restored[name][:, kept], array[:, kept])


def test_no_tokens() -> None:
    """A cache without tokens is a cache."""
    tensors = {f"layers.{i}.{kind}": np.zeros((2, 0, 32), np.float16) for i in range(2) for kind in ("key", "value")}
    restored = kvzip.decompress(kvzip.compress(tensors, codec="kvtc", device="cpu", notice=lambda _: None))
    assert {name: array.shape for name, array in restored.items()} == dict.fromkeys(tensors, (2, 0, 32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_head_dim(dtype: str, odd_toy: Profile) -> None:
    """With and without a profile: the channel without a partner is left alone."""
    tensors = cache(60, 33, DTYPES[dtype])
    check(tensors, step=STEP, rope="theta=1e4", near=0.2)
    check(tensors, step=STEP, profile=odd_toy.hash, near=0.2)


@pytest.mark.parametrize("dims", [(1, 1), (1, 32), (32, 1), (2, 3)])
def test_heads_too_narrow_for_a_rotation_are_left_alone(dims: tuple[int, int]) -> None:
    """Layers may have heads of their own width: what is found out is never what does not fit."""
    whole = cache(60, 32, np.float16)
    tensors = {name: np.ascontiguousarray(array[..., : dims[".0." not in name]]) for name, array in whole.items()}
    check(tensors, step=STEP, rope="auto", near=0.2)


def test_a_rotation_that_contradicts_the_cache_is_refused_or_harmless() -> None:
    """More layers than are told and wider rotations are refused; a wrong theta only costs accuracy."""
    tensors = cache(60, 32, np.float16)
    for rope in ("theta=1e4,rotary=64", {"kinds": [{"theta": 1e4}, None], "layers": [0, 1]}):
        with pytest.raises(UsageError, match=r"heads have 32|2 layers"):
            kvzip.compress(tensors, codec="kvtc", device="cpu", rope=rope)
    check(tensors, step=STEP, rope="theta=1e7,interleaved,start=12345", near=0.2)


def test_a_header_with_an_impossible_rotation_is_corrupt() -> None:
    """Found before anything is decoded: wider than the heads, or without a layer that the file has."""
    packed = kvzip.compress(cache(20, 32, np.float16), codec="kvtc:rope=theta=1e4", device="cpu")
    for kinds in ({"kinds": [{"theta": 1e4, "rotary": 64}]}, {"kinds": [{"theta": 1e4}], "layers": [0]}):
        with kvzip.open(packed, device="cpu") as opened:
            opened.header.codecs[0]["config"]["rope"] = kinds
            with pytest.raises(CorruptError, match="does not fit"):
                opened.key(1)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 80), heads=st.integers(1, 3), dim=st.integers(1, 40), seed=st.integers(0, 999),
    spread=st.floats(0, 4), step=st.sampled_from([0.01, 0.3, 2.0, 40.0]), dtype=st.sampled_from(list(DTYPES)),
    sinks=st.integers(0, 3),
)  # fmt: skip
def test_any_cache_comes_back_within_its_step(
    tokens: int, heads: int, dim: int, seed: int, spread: float, step: float, dtype: str, sinks: int
) -> None:
    """A value is within half a step of its token's scale, rounding aside."""
    rng = np.random.default_rng(seed)
    wide = np.exp(rng.normal(0, spread, (heads, 1, dim)))
    arrays = [np.clip(rng.normal(size=(heads, tokens, dim)) * wide, -3e4, 3e4).astype(DTYPES[dtype]) for _ in range(2)]
    tensors = {"layers.0.key": arrays[0], "layers.0.value": arrays[1]}
    packed = kvzip.compress(tensors, codec="kvtc", device="cpu", step=step, rope="none", sinks=sinks)
    restored = kvzip.decompress(packed, device="cpu")
    x, y = (t["layers.0.value"].astype(np.float64) for t in (tensors, restored))
    np.testing.assert_array_equal(x[:, :sinks], y[:, :sinks])
    rms = np.sqrt(np.square(x).mean(axis=(0, 2), keepdims=True))
    rounding = np.abs(x) * 2.0**-7
    # Scales are whole quarter octaves: at most an eighth, and what float32 rounds, above.
    assert (np.abs(x - y) <= 0.5 * step * rms * 2**0.14 + rounding + 1e-9).all()
