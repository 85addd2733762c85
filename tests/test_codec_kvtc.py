"""kvtc keeps its promises: the reference's numbers at its cost, exact sinks, the same bytes everywhere."""

from __future__ import annotations

import io

import numpy as np
import pytest

import kvzip
from kvzip.codecs.kvtc import KvTc
from kvzip.coding import windows
from kvzip.devices.base import Device
from kvzip.errors import UsageError
from kvzip.profiles.rope import Rope, rotate
from kvzip.profiles.scales import power
from tests import codecs
from tests.reference import kvtc as oracle

ROPE = "theta=1e4"
PLAIN = KvTc(rope="none")


def keys_and_values(tokens: int, heads: int, head_dim: int, dtype: str, count: int = 2) -> list[np.ndarray]:
    """Rotated keys and plain values, layer after layer."""
    arrays = [codecs.numbers(tokens, heads, head_dim, dtype, seed) for seed in range(count)]
    if head_dim > 1:
        for i in range(0, count, 2):
            arrays[i] = rotate(arrays[i], Rope(1e4)).astype(arrays[i].dtype)
    return arrays


@pytest.mark.parametrize("alphabet", range(3))
def test_tables_are_those_of_the_reference(alphabet: int) -> None:
    size = windows.ALPHABETS[alphabet]
    own = slice(alphabet * 1024, (alphabet + 1) * 1024)
    frequencies = np.diff(windows.families()[own].astype(int), axis=1)
    np.testing.assert_array_equal(frequencies[:, :size], oracle.frequencies(size).reshape(1024, size))
    np.testing.assert_array_equal(windows.costs()[own, :size], oracle.costs(size).reshape(1024, size))
    np.testing.assert_array_equal(windows.deviations(), oracle.deviations())


@pytest.mark.parametrize("step", [0.05, 0.4, 1.35])
def test_numbers_and_cost_are_those_of_the_reference(step: float, cpu: Device) -> None:
    """The step bounds every error, and the streams cost what the reference's tables say, within half a percent."""
    arrays = keys_and_values(500, 2, 64, "float32")
    arrays[0][:, 0, 5] += 300
    batch = codecs.batch_of(arrays)
    codec = codecs.bind(KvTc(step=step, rope=ROPE, sinks=1), batch)
    sections = codecs.encode(codec, batch, cpu)
    restored = codecs.decode(codec, batch, sections, cpu)
    for i, (array, one) in enumerate(zip(arrays, restored, strict=True)):
        plain = rotate(array, Rope(1e4), inverse=True) if i == 0 else array.astype(np.float32)
        block = oracle.encode([plain.reshape(500, -1)], [i == 0], codec.step_at)
        (expected,) = oracle.decode(block, codec.step_at, [128])
        expected = expected.reshape(array.shape)
        if i == 0:
            expected = rotate(np.nan_to_num(expected), Rope(1e4))
        scale = power(block.exponents[0])[1:, None, None]
        # Moments are summed in float32 here, in float64 there: a value on a boundary may fall to the other side.
        assert (np.abs(one[1:] - expected[1:]) > scale * step * 1e-3).mean() < 1e-3
        bits = block.bits(riders=False)
        # A lane's final state holds half a word of the stream, on average.
        assert 8 * sections[i]["STRM"].nbytes + 8 * 128 == pytest.approx(bits["stream"], rel=5e-3)
        assert 8 * sections[i]["COLS"].nbytes == pytest.approx(bits["tables"], rel=2e-2)


def test_every_number_is_within_half_a_step(cpu: Device) -> None:
    """Whatever the numbers: far outliers, wide columns, constants, channels of very different spread."""
    rng = np.random.default_rng(0)
    array = (rng.normal(size=(700, 1, 96)) * np.exp(rng.normal(0, 3, 96))).astype(np.float32)
    array[:, 0, 0] = 17.25
    array[:, 0, 1] = 0
    array[300, 0, 2] = 4e4
    array[:, 0, 3] *= 1000
    batch = codecs.batch_of([array, array])
    codec = codecs.bind(KvTc(step=0.5, rope="none", sinks=0), batch)
    sections = codecs.encode(codec, batch, cpu)
    keys, values = codecs.decode(codec, batch, sections, cpu)
    exponents = oracle.encode([array.reshape(700, -1)], [True], 0).exponents[0, 0]
    # Scales may differ from the reference's by an index: see the moments.
    assert np.abs(keys - array).max() <= 0.25 * power(exponents) * 1.02
    rms = np.sqrt(np.square(array.astype(np.float64)).mean(axis=2, keepdims=True))
    assert (np.abs(values - array) <= 0.25 * rms * 1.1).all()


@pytest.mark.parametrize("order", codecs.ORDERS)
@pytest.mark.parametrize("geometry", [(1, 1, 1), (33, 2, 80), (64, 3, 64), (130, 1, 34)], ids=str)
def test_same_bytes_on_every_device(geometry: tuple[int, int, int], order: str, device: Device, cpu: Device) -> None:
    for dtype in codecs.DTYPES:
        arrays = [codecs.ORDERS[order](array) for array in keys_and_values(*geometry, dtype)]
        rope = "none" if geometry[2] < 2 else ROPE
        codecs.check_same_bytes(KvTc(rope=rope), codecs.batch_of(arrays), device, cpu)


@pytest.mark.parametrize("rope", ["interleaved", "interleaved,rotary=32", "rotary=20", "offset=32"])
def test_partners_wherever_they_lie_make_the_same_bytes(rope: str, device: Device, cpu: Device) -> None:
    """Promise: pairs of neighbours, pairs far apart and channels that do not turn are the same to kernels that take
    several channels a lane, in runs of tokens that end anywhere.
    """
    for dtype in codecs.DTYPES:
        batch = codecs.batch_of(keys_and_values(150, 3, 64, dtype))
        codecs.check_same_bytes(KvTc(rope=f"theta=1e5,{rope}"), batch, device, cpu)


@pytest.mark.parametrize("interleaved", ["", ",interleaved"])
def test_rotations_of_every_kind_come_back(interleaved: str, cpu: Device) -> None:
    arrays = keys_and_values(64, 2, 48, "bfloat16")
    rope = f"theta=1e5,rotary=32,start=7{interleaved}"
    batch = codecs.batch_of(arrays)
    codec = codecs.bind(KvTc(step=0.02, rope=rope), batch)
    for array, restored in zip(arrays, codecs.decode(codec, batch, codecs.encode(codec, batch, cpu), cpu), strict=True):
        x, y = array.astype(np.float64), restored.astype(np.float64)
        assert np.linalg.norm(x - y) < 0.02 * np.linalg.norm(x)


def test_sinks_the_window_and_odd_tokens_are_exact(device: Device) -> None:
    for dtype in codecs.DTYPES:
        array = codecs.numbers(100, 2, 24, dtype)
        array[40, 1, 3] = np.nan
        array[41, 0, 0] = -np.inf
        array[42, 0, 0] = array.dtype.type(6e4)
        array[43] = 0
        batch = codecs.batch_of([array, array])
        codec = codecs.bind(KvTc(step=0.1, rope="none", sinks=2, window=3), batch)
        for restored in codecs.decode(codec, batch, codecs.encode(codec, batch, device), device):
            exact = [0, 1, 40, 41, 97, 98, 99]
            np.testing.assert_array_equal(codecs.bits(restored[exact]), codecs.bits(array[exact]))
            assert (restored[43] == 0).all() and np.isfinite(restored[42].astype(np.float32)).all()


def test_recorded_errors_are_true(cpu: Device) -> None:
    codecs.check_errors(KvTc(rope=ROPE), codecs.batch_of(keys_and_values(300, 2, 40, "bfloat16")), cpu)


def test_hostile_sections_are_reported(device: Device) -> None:
    arrays = keys_and_values(100, 2, 40, "bfloat16")
    arrays[0][7] = np.nan
    assert codecs.check_hostile(KvTc(rope=ROPE), codecs.batch_of(arrays), device) > 30


def test_configuration_round_trip() -> None:
    batch = codecs.batch_of([codecs.numbers(4, 1, 8)] * 4)
    for codec in (PLAIN, KvTc(level=8, rope=ROPE), KvTc(step=0.3, rope="theta=1e6,interleaved", sinks=0, window=5)):
        codecs.check_config(codec, batch)


def test_the_rotation_is_found_and_said() -> None:
    """Through the API: the keys' rotation is found in the file, told, and stored; keys get better by it."""
    base = codecs.numbers(400, 2, 64, "float32", 1)
    arrays = {}
    for layer in range(4):
        keys = rotate(base + layer * 0.1, Rope(5e5)).astype(np.float16).transpose(1, 0, 2)
        arrays |= {f"layers.{layer}.key": keys, f"layers.{layer}.value": base.astype(np.float16).transpose(1, 0, 2)}
    notices: list[str] = []
    packed = kvzip.compress(arrays, codec="kvtc", device="cpu", notice=notices.append)
    assert any("theta 500000" in notice for notice in notices)
    with kvzip.open(packed) as cache:
        assert cache.header.codecs[0]["config"]["rope"] == {"kinds": [{"theta": 500000.0}]}
    blind = kvzip.compress(arrays, codec="kvtc:rope=none", device="cpu")
    assert len(packed) < 1.02 * len(blind)
    errors = []
    for restored in (kvzip.decompress(io.BytesIO(data), device="cpu") for data in (packed, blind)):
        x, y = (files["layers.2.key"].astype(np.float64) for files in (arrays, restored))
        errors.append(np.linalg.norm(x - y) / np.linalg.norm(x))
    assert errors[0] < 0.9 * errors[1] < 0.5


@pytest.mark.parametrize("options", [{"level": 0}, {"step": 0.0}, {"sinks": -1}, {"window": -1}, {"rope": "theta=0.5"}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        KvTc(**options)  # type: ignore[arg-type]


def test_a_rotation_wider_than_the_heads_is_refused() -> None:
    with pytest.raises(UsageError, match="heads have 8"):
        codecs.bind(KvTc(rope="theta=1e4,rotary=16"), codecs.batch_of([codecs.numbers(4, 1, 8)] * 2))
