"""Promises about profiles: learned right, the same again, going on where stopped, checked when read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvzip.errors import CorruptError, UnsupportedError, UsageError
from kvzip.profiles import profile as profiles
from kvzip.profiles.profile import Geometry, Profile
from kvzip.profiles.rope import Rope, rotate
from kvzip.profiles.ropes import Ropes
from kvzip.profiles.scales import KEY_UNIT, power, step_index
from kvzip.profiles.sources import Arrays
from kvzip.profiles.train import Options, train
from tests.reference import kvtc

torch = pytest.importorskip("torch", reason="training needs the extra torch")

ROPE = Rope(1e4)
ROPES = Ropes((ROPE,))
GEOMETRY = Geometry(layers=4, heads=2, key_dim=16, value_dim=16)
HIDDEN = 24


def cache(seed: int, tokens: int = 400) -> Arrays:
    """A cache whose 256 numbers a token follow 24 hidden ones and a little noise."""
    mix = np.random.default_rng(99).normal(size=(HIDDEN, GEOMETRY.layers * GEOMETRY.width))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, HIDDEN)) @ mix + 0.05 * rng.normal(size=(tokens, mix.shape[1])) + 3 * mix[0]
    x = x.reshape(tokens, GEOMETRY.layers, 2, GEOMETRY.heads, 16).astype(np.float32)
    keys = np.stack([rotate(x[:, i, 0], ROPE) for i in range(GEOMETRY.layers)])
    return Arrays(f"cache {seed}", keys, np.moveaxis(x[:, :, 1], 0, 1))


@pytest.fixture(scope="module")
def trained() -> Profile:
    return train([cache(i) for i in range(4)], ROPES, Options(group=2), model="toy")


def test_basis_is_small_and_gains(trained: Profile) -> None:
    """Layers that follow few hidden numbers need few coefficients, and the estimate on unseen data says so."""
    assert [group.layers for group in trained.groups] == [(0, 1), (2, 3)]
    # Values are scaled by their token's rms, which is no linear thing: a few more than the hidden ones.
    assert all(HIDDEN // 2 <= group.rank <= 3 * HIDDEN for group in trained.groups)
    assert trained.seen.held_out == 1
    assert 0 < trained.seen.bits < 0.6 * trained.seen.bits_plain
    assert trained.seen.tokens == 4 * 399


def test_directions_are_orthonormal_and_deviations_true(trained: Profile) -> None:
    """What is stored in 8 bits is still a basis, and its coefficients spread as it says."""
    group = trained.groups[0]
    matrix = group.matrix(group.rank)
    assert np.abs(matrix @ matrix.T - np.eye(group.rank)).max() < 0.03
    source = cache(0)
    parts = []
    for layer in group.layers:
        k = kvtc.rotate(source.plane(layer, "key"), 1e4 ** (-np.arange(0, 16, 2) / 16), inverse=True).reshape(400, -1)
        v = source.plane(layer, "value").reshape(400, -1)
        parts += [k * power(-(trained.key_exponents[layer] + KEY_UNIT)), v * power(-kvtc.value_exponents(v))[:, None]]
    coefficients = (np.concatenate(parts, axis=1)[1:] - group.mean) @ matrix.T
    assert np.allclose(coefficients.std(axis=0)[:HIDDEN], group.deviations[:HIDDEN], rtol=0.2)


def test_key_scales_are_geometric_means(trained: Profile) -> None:
    """A layer's scale is the geometric mean of its channels' deviations over all caches."""
    x = np.concatenate([rotate(cache(i).plane(1, "key"), ROPE, inverse=True)[1:] for i in range(4)])
    expected = np.exp(np.log(x.reshape(len(x), -1).std(axis=0)).mean())
    assert power(trained.key_exponents[1]) == pytest.approx(expected, rel=0.01)


def test_training_is_reproducible(trained: Profile) -> None:
    """The same caches give the same file, byte for byte."""
    again = train([cache(i) for i in range(4)], ROPES, Options(group=2), model="toy")
    assert again.to_bytes() == trained.to_bytes()


def test_stopped_training_goes_on(trained: Profile, tmp_path: Path) -> None:
    """A finished group is not learned again, other inputs do not take it, and the result is the same."""
    sources = [cache(i) for i in range(4)]
    train(sources, ROPES, Options(group=2), model="toy", state=tmp_path)
    (tmp_path / "group-1.safetensors").write_bytes(b"torn")
    steps: list[int] = []
    resumed = train(
        sources, ROPES, Options(group=2), model="toy", state=tmp_path, progress=lambda done, *_: steps.append(done)
    )
    assert resumed.hash == trained.hash
    assert min(steps) == 4  # the second group's first cache
    fewer = train(sources[:3], ROPES, Options(group=2), model="toy", state=tmp_path)
    assert fewer.hash != trained.hash


def test_file_round_trip(trained: Profile, tmp_path: Path) -> None:
    """What is read is what was written, under the same hash, for both types of basis."""
    for dtype in ("int8", "bfloat16"):
        made = train([cache(i) for i in range(2)], ROPES, Options(group=3, dtype=dtype), model="toy")
        path = tmp_path / f"{dtype}.kvp"
        made.write(path)
        back = profiles.read(path)
        assert back.hash == made.hash
        assert back.ropes == ROPES
        assert back.groups[0].vectors.dtype == made.groups[0].vectors.dtype
        assert np.array_equal(back.groups[1].matrix(5), made.groups[1].matrix(5))


def test_rank_follows_the_step(trained: Profile) -> None:
    """A coarser step needs fewer coefficients, and a rank can be capped."""
    group = trained.groups[0]
    ranks = [group.rank_at(step_index(step)) for step in (1.0, 2.0, 8.0)]
    assert ranks[0] > ranks[1] > ranks[2] > 0
    capped = train([cache(0)], ROPES, Options(group=4, rank=3))
    assert capped.groups[0].rank == 3
    assert capped.seen.held_out == 0


def test_unsound_tokens_are_left_out() -> None:
    """NaN and Inf in a cache do not reach the basis."""
    broken = cache(1)
    broken.keys[2, 50], broken.values[0, 60] = np.nan, np.inf
    profile = train([cache(0), broken], ROPES, Options(group=2))
    assert all(np.isfinite(group.mean).all() and np.isfinite(group.deviations).all() for group in profile.groups)


def test_little_data_works_or_explains_itself() -> None:
    """Two tokens give a basis of one direction; one token, no caches and mixed geometries are told."""
    assert train([cache(0, tokens=3)], ROPES, Options(group=4)).groups[0].rank == 1
    with pytest.raises(UsageError, match="two tokens"):
        train([cache(0, tokens=2)], ROPES, Options())
    with pytest.raises(UsageError, match="at least one cache"):
        train([], ROPES, Options())
    other = cache(1)
    with pytest.raises(UsageError, match="cache 1"):
        train([cache(0), Arrays("cache 1", other.keys[:3], other.values[:3])], ROPES, Options())


def test_profile_for_another_model_is_refused(trained: Profile) -> None:
    """A cache of other geometry gets an error that names both."""
    trained.check(GEOMETRY)
    with pytest.raises(UsageError, match=r"toy.*heads=2.*heads=8"):
        trained.check(Geometry(4, 8, 16, 16))
    with pytest.raises(UsageError, match="layer 4"):
        trained.group_of(4)


@pytest.fixture
def stored(trained: Profile, tmp_path: Path) -> Path:
    path = tmp_path / "toy.kvp"
    trained.write(path)
    return path


def rewrite(path: Path, *, metadata: dict[str, object] | None = None, **tensors: np.ndarray) -> None:
    """Change some of a profile's tensors or metadata and leave the rest, its hash too."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        data = json.loads(file.metadata()["kvzip"])
    data.update(metadata or {})
    save_file(load_file(path) | tensors, path, metadata={"kvzip": json.dumps(data)})


DAMAGE: dict[str, dict[str, object]] = {
    "a changed number": {"0.mean": np.zeros(128, np.float32)},
    "a wrong shape": {"0.mean": np.zeros(127, np.float32)},
    "a wrong type": {"1.scales": np.zeros(3, np.float64)},
    "rising deviations": {"0.deviations": np.arange(500, dtype=np.float32)},
    "a group too many": {"metadata": {"groups": [[0, 1], [2, 3], [4]]}},
    "layers out of order": {"metadata": {"groups": [[2, 3], [0, 1]]}},
    "an absurd geometry": {"metadata": {"geometry": {"layers": 4, "heads": 1 << 40, "key_dim": 16, "value_dim": 16}}},
    "a missing field": {"metadata": {"geometry": {"layers": 4}}},
    "another hash": {"metadata": {"hash": "0" * 64}},
    "another format": {"metadata": {"format": "tuples"}},
    "a wild exponent": {"metadata": {"key_exponents": [0, 0, 0, 1 << 40]}},
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(stored: Path, name: str) -> None:
    """Any change to a stored profile is an error that names the file."""
    rewrite(stored, **DAMAGE[name])  # type: ignore[arg-type]
    with pytest.raises(CorruptError, match=r"toy\.kvp"):
        profiles.read(stored)


def test_nan_is_found_even_under_a_right_hash(trained: Profile, tmp_path: Path) -> None:
    """A profile whose content is no basis is refused, whoever hashed it."""
    mean = trained.groups[0].mean.copy()
    mean[5] = np.nan
    first = profiles.Group(*(getattr(trained.groups[0], f) for f in ("layers",)), mean, *_rest(trained.groups[0]))
    bad = Profile(trained.model, GEOMETRY, ROPES, trained.key_exponents, [first, trained.groups[1]], trained.step)
    bad.write(tmp_path / "bad.kvp")
    with pytest.raises(CorruptError, match="NaN"):
        profiles.read(tmp_path / "bad.kvp")


def _rest(group: profiles.Group) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return group.vectors, group.scales, group.deviations


def test_files_that_are_no_profiles(tmp_path: Path, stored: Path) -> None:
    """Missing, empty, text, another safetensors file, a later version: each has its error."""
    with pytest.raises(UsageError, match="cannot read"):
        profiles.read(tmp_path / "none.kvp")
    for name, content in (("empty.kvp", b""), ("text.kvp", b"hello" * 10), ("cut.kvp", stored.read_bytes()[:-1])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CorruptError, match=name):
            profiles.read(tmp_path / name)
    save_file({"x": np.zeros(3)}, tmp_path / "other.kvp")
    with pytest.raises(CorruptError, match="no profile"):
        profiles.read(tmp_path / "other.kvp")
    rewrite(stored, metadata={"version": 2})
    with pytest.raises(UnsupportedError, match="version 2"):
        profiles.read(stored)
