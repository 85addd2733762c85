"""Promises of the kvtc oracle: no value is clipped, errors are bounded by the step, costs are near the entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvzip.profiles import scales
from tests.reference import kvtc


def planes(tokens: int = 300, channels: int = 48) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    spread = rng.lognormal(0, 1, channels)
    keys = rng.normal(size=(tokens, channels)) * spread + 40 * rng.normal(size=channels)
    values = rng.normal(size=(tokens, channels)) * rng.lognormal(-2, 1, (tokens, 1))
    return keys.astype(np.float32), values.astype(np.float32)


def test_errors_are_within_half_a_step() -> None:
    """Keys err by half the layer's step, values by half their token's: the promise of a level, for every number."""
    keys, values = planes()
    for plane, is_key in ((keys, True), (values, False)):
        block = kvtc.encode([plane], [is_key], step=0)
        error = np.abs(kvtc.decode(block, 0, [48])[0] - plane)[1:]
        half = kvtc.power(block.exponents[0])[1:, None] / 2
        assert (error <= half * 1.001).all()
        assert np.square(error).mean() == pytest.approx(np.square(half).mean() / 3, rel=0.1)


def test_full_basis_restores_what_the_identity_does() -> None:
    """Any orthonormal basis of full rank gives the same mean error."""
    keys, values = planes()
    rng = np.random.default_rng(5)
    vectors = np.linalg.qr(rng.normal(size=(96, 96)))[0].astype(np.float32)
    exponents = np.array([kvtc.key_exponent(keys[1:])])
    basis = kvtc.Basis(exponents, rng.normal(size=96).astype(np.float32), vectors, np.full(96, 9.0, np.float32))
    block = kvtc.encode([keys, values], [True, False], step=-512, basis=basis)
    for plane, out, exponent in zip((keys, values), kvtc.decode(block, -512, [48, 48], basis=basis),
                                    block.exponents, strict=True):  # fmt: skip
        error = (out - plane)[1:] / kvtc.power(exponent)[1:, None]
        assert np.square(error).mean() == pytest.approx(0.25**2 / 12, rel=0.1)


@pytest.mark.parametrize("deviation", [0.1, 0.3, 1, 3, 10, 300, 1e5])
def test_cost_is_near_the_entropy(deviation: float) -> None:
    """Real tables, raw bits and escapes cost at most 0.04 bits a symbol over normal columns' own entropy."""
    rng = np.random.default_rng(1)
    q = np.rint(rng.normal(0.3 * deviation, deviation, (1024, 64))).astype(np.int64)
    cost = kvtc.stream_bits(q, kvtc.choose(q)).mean() / 1024
    if deviation >= 3:
        entropy = np.log2(deviation * np.sqrt(2 * np.pi * np.e))
    else:
        edges = (np.arange(-60, 61) + 0.5 - 0.3 * deviation) / deviation
        mass = np.diff([0.5 * (1 + math.erf(edge / math.sqrt(2))) for edge in edges])
        mass = mass[mass > 0]
        entropy = -(mass * np.log2(mass)).sum()
    assert entropy - 0.03 < cost < entropy + 0.04


def test_constant_columns_cost_nothing() -> None:
    """Always zero, or always the same number however large: no bits in the stream."""
    q = np.zeros((100, 3), np.int64)
    q[:, 1] = -12345
    assert kvtc.stream_bits(q, kvtc.choose(q)).sum() == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 1024), st.integers(0, 2**20), st.integers(0, 2**32 - 1))
def test_no_value_is_out_of_reach(tokens: int, outlier: int, seed: int) -> None:
    """A value lies at most sqrt(n) deviations from the mean, so eight escape bits always reach it."""
    rng = np.random.default_rng(seed)
    q = rng.integers(-2, 3, (tokens, 4))
    q[rng.integers(tokens), 0] = outlier
    q[:, 1] *= outlier
    kvtc.stream_bits(q, kvtc.choose(q))  # raises if not


def test_unsound_tokens_and_sinks_are_exact() -> None:
    """NaN, Inf and the sink are kept beside the transform; more sinks than tokens is fine."""
    keys, _ = planes()
    keys[7, 3], keys[9, 0] = np.nan, np.inf
    assert np.flatnonzero(kvtc.encode([keys], [True], 0, sinks=2).exact).tolist() == [0, 1, 7, 9]
    assert kvtc.exact_tokens([keys[:3]], 10).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -219.0, 1e-15])
def test_constant_planes_are_restored(value: float) -> None:
    """Planes in which nothing varies come back to within 0.2 percent."""
    plane = np.full((20, 8), value, np.float32)
    out = kvtc.decode(kvtc.encode([plane], [True], 0), 0, [8])[0][1:]
    assert np.abs(out - plane[1:]).max() <= 0.002 * abs(value)


def test_scales_of_the_package_are_the_oracles() -> None:
    """Powers, logarithms and token exponents agree bit for bit; powers are right to the last bit of float32."""
    index = np.arange(-3000, 3000)
    assert np.array_equal(scales.power(index), kvtc.power(index))
    assert np.array_equal(scales.power(index), np.exp2(index / 256).astype(np.float32))
    x = np.random.default_rng(2).lognormal(0, 9, 1000).astype(np.float32)
    assert np.array_equal(scales.log2_index(x), kvtc.log2_index(x))
    assert np.array_equal(scales.log2_index(x), np.floor(256 * np.log2(x.astype(np.float64))))
    values = planes()[1]
    assert np.array_equal(scales.token_exponents(values), kvtc.value_exponents(values))
