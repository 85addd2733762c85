"""kvtc's searches: a rate is hit within 1 %, an error is never exceeded, what cannot be had is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvzip
from kvzip.codecs import get_codec
from kvzip.codecs.kvtc import KvTc, search
from kvzip.errors import UsageError
from kvzip.profiles.library import Embedded, offering
from kvzip.profiles.profile import Profile
from tests import profiles
from tests.test_codec_kvtc_profile import tensors

TOKENS = 700


@pytest.fixture(scope="module")
def toy() -> Profile:
    return profiles.profile()


@pytest.fixture(autouse=True)
def within_reach(toy: Profile) -> Iterator[None]:
    with offering([Embedded("toy", toy.hash, toy.to_bytes)]):
        yield


@pytest.fixture(scope="module")
def cache() -> dict[str, np.ndarray]:
    return tensors(*profiles.cache(4, TOKENS))


def bits(packed: bytes, cache: dict[str, np.ndarray]) -> float:
    return 8 * len(packed) / sum(array.size for array in cache.values())


def recorded(packed: bytes) -> list[float]:
    with kvzip.open(packed) as opened:
        assert opened.statistics is not None
        return [float(error) for error in opened.statistics["relative_error"]]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("target", "block_tokens"), [(1.0, 1024), (3.0, 1024), (5.5, 1024), (3.0, 128)])
def test_bits_are_hit_within_one_percent(
    cache: dict[str, np.ndarray], toy: Profile, target: float, block_tokens: int, learned: bool
) -> None:
    """The whole file counts: header, index, tables, whatever the blocks are. The step that was found is stored."""
    how: dict[str, Any] = {"profile": toy.hash} if learned else {"rope": "theta=1e4"}
    notices: list[str] = []
    packed = kvzip.compress(
        cache, codec="kvtc", device="cpu", bits=target, block_tokens=block_tokens, notice=notices.append, **how
    )
    assert bits(packed, cache) == pytest.approx(target, rel=0.01)
    with kvzip.open(packed) as opened:
        assert "bits" not in opened.header.codecs[0]["config"]
    assert any("bits a number" in notice for notice in notices)


def test_bits_of_a_sample(cache: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large cache blocks of all layers and from all of its length are tried: near enough."""
    monkeypatch.setattr(search, "SAMPLE_BYTES", 100_000)
    packed = kvzip.compress(cache, codec="kvtc:rope=theta=1e4", device="cpu", bits=3, block_tokens=100, notice=print)
    assert bits(packed, cache) == pytest.approx(3, rel=0.03)


@pytest.mark.parametrize("target", [0.3, 0.05, 0.005])
def test_max_error_is_kept_and_used(cache: dict[str, np.ndarray], target: float) -> None:
    """No plane exceeds it, in what is recorded and in what is decoded, and the worst comes near it."""
    packed = kvzip.compress(cache, codec="kvtc:rope=theta=1e4", device="cpu", max_error=target, notice=lambda _: None)
    assert 0.95 * target < max(recorded(packed)) <= target
    restored = kvzip.decompress(packed, device="cpu")
    for name, array in cache.items():
        x, y = array.astype(np.float64), restored[name].astype(np.float64)
        assert np.linalg.norm(x - y) <= target * 1.0001 * np.linalg.norm(x)


def test_max_error_with_a_profile(cache: dict[str, np.ndarray], toy: Profile) -> None:
    packed = kvzip.compress(
        cache, codec="kvtc", device="cpu", profile=toy.hash, max_error=0.2, notice=lambda _: None
    )  # fmt: skip
    assert 0.15 < max(recorded(packed)) <= 0.2


def test_what_cannot_be_reached_is_told(cache: dict[str, np.ndarray], toy: Profile) -> None:
    """Fewer bits than an empty file takes, more than the finest step, less error than a truncated basis leaves."""
    for options, says in (
        ({"bits": 0.001}, "nearest"),
        ({"max_error": 1e-7, "profile": toy.hash}, "effort"),
    ):
        with pytest.raises(UsageError, match=says) as caught:
            kvzip.compress(cache, codec="kvtc", device="cpu", notice=lambda _: None, **options)
        assert caught.value.code == "codec-target"


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 0}, {"bits": 33}, {"max_error": 0}, {"max_error": 1.0}, {"bits": 2, "max_error": 0.1},
        {"step": 1.0, "bits": 2}, {"level": 7, "bits": 2}, {"level": 4, "step": 1.0}, {"effort": 0}, {"effort": 10},
        {"profile": "0" * 64, "rope": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        get_codec("kvtc", **options)
    assert caught.value.code == "codec-option"


def test_an_unsound_cache_does_not_stop_the_search() -> None:
    """Planes of NaN and of zeros have errors of 0; the search goes by the others."""
    keys, values = profiles.cache(1, 100)
    keys[1], values[2] = np.nan, 0
    packed = kvzip.compress(
        tensors(keys, values), codec="kvtc:rope=none", device="cpu", max_error=0.1, notice=lambda _: None
    )
    assert max(recorded(packed)) <= 0.1


def test_a_finer_step_than_the_profile_serves_is_told(cache: dict[str, np.ndarray], toy: Profile) -> None:
    notices: list[str] = []
    kvzip.compress(cache, codec=KvTc(profile=toy.hash, step=0.3), device="cpu", notice=notices.append)
    assert any("train --step" in notice for notice in notices)
