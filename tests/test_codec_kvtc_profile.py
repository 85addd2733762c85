"""kvtc with a profile: the reference's coefficients at its cost, near equal numbers everywhere, no other bases."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvzip
from kvzip.cache import Block, Plane
from kvzip.codecs import load_codec
from kvzip.codecs.base import Batch
from kvzip.codecs.kvtc import KvTc
from kvzip.devices.base import Device
from kvzip.errors import CorruptError, UsageError
from kvzip.profiles.library import Embedded, offering
from kvzip.profiles.profile import Profile
from kvzip.profiles.rope import rotate
from kvzip.profiles.scales import power
from tests import codecs, profiles
from tests.reference import kvtc as oracle

TOKENS = 200


@pytest.fixture(scope="module")
def toy() -> Profile:
    return profiles.profile()


@pytest.fixture(autouse=True)
def within_reach(toy: Profile) -> Iterator[None]:
    """Whatever names the profile by its hash finds it."""
    with offering([Embedded("toy", toy.hash, toy.to_bytes)]):
        yield


def kvtc(toy: Profile, **options: Any) -> KvTc:
    return KvTc(profile=toy.hash, **options)


def batch_of(
    tokens: int = TOKENS, dtype: str = "float32", seed: int = 1, layers: tuple[int, ...] = (0, 1), start: int = 0
) -> Batch:
    """One block of the planes of some layers."""
    keys, values = profiles.cache(seed, tokens)
    planes, arrays = [], []
    for layer in layers:
        for kind, source in (("key", keys), ("value", values)):
            planes.append(
                Plane(2 * layer + (kind == "value"), layer, kind, start + tokens, profiles.HEADS, profiles.DIM, dtype)  # type: ignore[arg-type]
            )
            arrays.append(source[layer].astype(codecs.DTYPES[dtype]))
    return Batch([Block(tuple(planes), start, start + tokens)], arrays)


def plain(batch: Batch) -> list[np.ndarray]:
    """The planes as the reference takes them: ``[tokens, channels]``, keys un-rotated."""
    return [
        (rotate(array, profiles.ROPE, inverse=True) if plane.kind == "key" else array.astype(np.float32)).reshape(
            len(array), -1
        )
        for plane, array in zip(batch.blocks[0].planes, batch.arrays, strict=True)
    ]


def basis_of(toy: Profile, group: int = 0) -> oracle.Basis:
    found = toy.groups[group]
    exponents = np.array([toy.key_exponents[layer] for layer in found.layers])
    return oracle.Basis(exponents, found.mean, found.matrix(found.rank), found.deviations)


@pytest.mark.parametrize("step", [0.3, 1.3, 3.0])
def test_coefficients_and_cost_are_those_of_the_reference(toy: Profile, step: float, cpu: Device) -> None:
    """The same coefficients are kept, decode to the same numbers, and cost the same within half a percent."""
    batch = batch_of(800)
    codec = kvtc(toy, step=step)
    sections = codecs.encode(codec, batch, cpu)
    restored = codecs.decode(codec, batch, sections, cpu)
    keys = [plane.kind == "key" for plane in batch.blocks[0].planes]
    block = oracle.encode(plain(batch), keys, codec.step_at, basis=basis_of(toy))
    expected = oracle.decode(block, codec.step_at, [profiles.HEADS * profiles.DIM] * 4, basis=basis_of(toy))
    assert sections[0]["STAT"].nbytes == -(-block.q.shape[1] // 32) * 33 * 4
    for i, (one, other) in enumerate(zip(restored, expected, strict=True)):
        other = np.nan_to_num(other.reshape(one.shape))
        other = rotate(other, profiles.ROPE) if keys[i] else other
        scale = power(block.exponents[i])[1:, None, None]
        # A coefficient on a boundary may fall to the other side: sums of products have no fixed order.
        assert (np.abs(one[1:] - other[1:]) > scale * step * 0.01).mean() < 0.01
    bits = block.bits(riders=False)
    assert 8 * sections[0]["STRM"].nbytes == pytest.approx(bits["stream"], rel=5e-3, abs=2000)
    assert 8 * sections[0]["COLS"].nbytes == pytest.approx(bits["tables"], rel=2e-2)


@pytest.mark.parametrize("dtype", codecs.DTYPES)
def test_decoded_numbers_agree_on_every_device(toy: Profile, dtype: str, device: Device, cpu: Device) -> None:
    """Wherever it was encoded and is decoded: within 1 ulp or 2^-14 of the token's rms; exact tokens bit for bit."""
    batch = batch_of(64, dtype)
    batch.arrays[1][7, 0, 3] = np.nan
    codec = kvtc(toy)
    for maker in (cpu, device):
        sections = codecs.encode(codec, batch, maker)
        one, other = (codecs.decode(codec, batch, sections, where) for where in (cpu, device))
        for mine, theirs in zip(one, other, strict=True):
            np.testing.assert_array_equal(codecs.bits(mine[[0, 7]]), codecs.bits(theirs[[0, 7]]))
            rest = np.delete(np.arange(len(mine)), [0, 7])
            x, y = mine[rest].astype(np.float32), theirs[rest].astype(np.float32)
            rms = np.sqrt(np.square(x).mean(axis=(1, 2), keepdims=True))
            ulp = np.spacing(np.abs(mine[rest])).astype(np.float32)
            assert (np.abs(x - y) <= np.maximum(ulp, rms * 2.0**-14)).all()


def test_recorded_errors_are_true(toy: Profile, cpu: Device) -> None:
    batch = batch_of(150, "bfloat16")
    codec = kvtc(toy)
    (encoded,) = codec.encode(batch, cpu)
    planes = codecs.decode(codec, batch, [codecs.on_host(cpu, encoded)], cpu)
    for errors, original, restored in zip(encoded.errors, batch.arrays, planes, strict=True):
        difference = restored.astype(np.float64) - original.astype(np.float64)
        assert errors.squared_error == pytest.approx((difference**2).sum(), rel=1e-4)
        assert errors.energy == pytest.approx((original.astype(np.float64) ** 2).sum(), rel=1e-4)
        assert errors.max_abs == pytest.approx(np.abs(difference).max(), rel=1e-6)


def test_hostile_sections_are_reported(toy: Profile, device: Device) -> None:
    """Damaged sections of a group of planes give an error, or some numbers, and nothing is written beyond them."""
    one, other = batch_of(40, "bfloat16"), batch_of(40, "bfloat16", layers=(2, 3))
    batch = Batch(one.blocks + other.blocks, one.arrays + other.arrays)
    assert codecs.check_hostile(kvtc(toy), batch, device) > 25


def test_effort_buys_accuracy(toy: Profile, cpu: Device) -> None:
    """More effort codes more coefficients at the same step, and leaves less error."""
    batch = batch_of(150)
    found = []
    for effort in (1, 5, 9):
        codec = kvtc(toy, step=2.0, effort=effort)
        assert KvTc.from_config(codec.config()).config() == codec.config()
        (encoded,) = codec.encode(batch, cpu)
        found.append((encoded.sections["STAT"].nbytes, -sum(error.squared_error for error in encoded.errors)))
    assert found == sorted(found)
    assert found[0][0] < found[2][0]
    assert found[0][1] < found[2][1]


# ------------------------------------------------------------------------------------------------ files


def tensors(keys: np.ndarray, values: np.ndarray, dtype: Any = np.float16) -> dict[str, np.ndarray]:
    return {
        f"layers.{i}.{kind}": np.ascontiguousarray(planes[i].swapaxes(0, 1)).astype(dtype)
        for kind, planes in (("key", keys), ("value", values))
        for i in range(len(keys))
    }


def error(original: np.ndarray, restored: np.ndarray) -> float:
    x, y = original.astype(np.float64), restored.astype(np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(x))


def test_parts_are_those_of_the_whole(toy: Profile) -> None:
    """Layers inside a group and tokens across blocks come back as in the whole file, from files, not from pipes."""
    cache = tensors(*profiles.cache(3, 150))
    packed = kvzip.compress(cache, codec=kvtc(toy), device="cpu", block_tokens=64)
    whole = kvzip.decompress(packed, device="cpu")
    part = kvzip.decompress(packed, device="cpu", layers=(1, 3), tokens=(50, 140))
    assert set(part) == {f"layers.{i}.{kind}" for i in (1, 2) for kind in ("key", "value")}
    for name, array in part.items():
        np.testing.assert_array_equal(array, whole[name][:, 50:140])
    with kvzip.open(packed, device="cpu") as opened:
        np.testing.assert_array_equal(opened.value(3, (60, 70)), whole["layers.3.value"][:, 60:70].swapaxes(0, 1))
    for name, array in cache.items():
        assert error(array, whole[name]) < 0.5


def test_a_pipe_is_spooled_and_said(toy: Profile) -> None:
    """A group of layers from a pipe is more than one plane: it goes through a temporary file, with the same bytes."""
    from kvzip.tensorfile import from_arrays

    cache = tensors(*profiles.cache(3, 50))
    source = from_arrays(cache)
    data = bytearray(source.files[0].size)
    source.read_into(0, 0, data)

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    notices: list[str] = []
    packed = kvzip.compress(Pipe(bytes(data)), codec=kvtc(toy), device="cpu", notice=notices.append)
    assert any("temporary file" in notice for notice in notices)
    assert len(packed) == len(kvzip.compress(cache, codec=kvtc(toy), device="cpu"))


def test_batched_sequences_have_groups_of_their_own(toy: Profile) -> None:
    caches = [tensors(*profiles.cache(seed, 40)) for seed in (1, 2)]
    both = {name: np.stack([cache[name] for cache in caches]) for name in caches[0]}
    restored = kvzip.decompress(kvzip.compress(both, codec=kvtc(toy), device="cpu"), device="cpu")
    for number, cache in enumerate(caches):
        alone = kvzip.decompress(kvzip.compress(cache, codec=kvtc(toy), device="cpu"), device="cpu")
        for name, array in alone.items():
            np.testing.assert_allclose(
                restored[name][number].astype(np.float32), array.astype(np.float32), rtol=2e-2, atol=2e-2
            )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 3}, "layers=4"),
        ({"heads": 1}, "heads=1"),
        ({"dim": 16}, "key_dim=16"),
    ],
    ids=str,
)
def test_another_geometry_is_refused(toy: Profile, change: dict[str, int], says: str) -> None:
    """A cache of other layers, heads or dims gets an error that names both."""
    cache = tensors(*profiles.cache(0, 8, **change))
    with pytest.raises(UsageError, match=says) as caught:
        kvzip.compress(cache, codec=kvtc(toy), device="cpu")
    assert caught.value.code == "profile-geometry"


def test_planes_of_two_shapes_are_refused(toy: Profile) -> None:
    """Bases span planes of one shape and type."""
    cache = tensors(*profiles.cache(0, 8))
    cache["layers.1.value"] = cache["layers.1.value"].astype(np.float32)
    with pytest.raises(UsageError, match="one shape and dtype"):
        kvzip.compress(cache, codec=kvtc(toy), device="cpu")


def test_a_header_cannot_name_files(toy: Profile, tmp_path: Path) -> None:
    """A profile in a file's header is a hash: a path, even of a sound profile, is not opened."""
    path = tmp_path / "toy.kvp"
    toy.write(path)
    config = kvtc(toy).config()
    load_codec("kvtc", config)
    for name in (str(path), toy.hash[:16], "", 3):
        with pytest.raises(CorruptError, match="hash"):
            load_codec("kvtc", {**config, "profile": name})


@pytest.mark.parametrize("what", ["a plane less", "another order", "another layer", "another dtype", "another width"])
def test_blocks_that_do_not_fit_the_bases_are_refused(toy: Profile, what: str) -> None:
    """A header whose groups are not the profile's is found before anything is decoded."""
    (block,) = batch_of(8).blocks
    planes = list(block.planes)
    match what:
        case "a plane less":
            planes = planes[:3]
        case "another order":
            planes = [planes[1], planes[0], *planes[2:]]
        case "another layer":
            planes = [Plane(**{**fields(plane), "layer": plane.layer + 8}) for plane in planes]
        case "another dtype":
            planes[2] = Plane(**{**fields(planes[2]), "dtype": "float16"})
        case "another width":
            planes = [Plane(**{**fields(plane), "heads": 3}) for plane in planes]
    from kvzip.pipeline.stored import StoredCodecs

    class Named(StoredCodecs):
        def __init__(self) -> None:
            self._loaded = {0: kvtc(toy)}

    Named().bound(0, block)
    with pytest.raises(CorruptError, match="does not fit"):
        Named().bound(0, Block(tuple(planes), 0, 8))


def fields(plane: Plane) -> dict[str, Any]:
    return {name: getattr(plane, name) for name in Plane.__slots__}
