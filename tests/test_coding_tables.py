"""The table family is part of the format: true to the normal distribution, and frozen."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from kvzip.coding import normal, tables


def cdf(z: float) -> float:
    return (1 + math.erf(z / math.sqrt(2))) / 2


def test_committed_integers_are_the_normal_distribution() -> None:
    for k, entry in enumerate(normal.CDF):
        assert abs(entry - cdf(k / normal.CDF_STEPS) * 2**normal.CDF_BITS) <= 1
    ratios = np.diff(np.log(normal.DEVIATIONS))
    assert normal.DEVIATIONS[0] == round(0.15 * 65536) and normal.DEVIATIONS[-1] == 12 * 65536
    np.testing.assert_allclose(ratios, math.log(80) / 63, rtol=2e-3)


@pytest.mark.parametrize("symbols", [1, 2, 15, 31, 32])
def test_tables_are_discretized_normal_distributions(symbols: int) -> None:
    family = tables.family(symbols).astype(int)
    frequencies = np.diff(family, axis=1)
    assert (family[:, 0] == 0).all() and (family[:, symbols:] == tables.SCALE).all()
    assert (frequencies[:, :symbols] >= 1).all() and (frequencies[:, symbols:] == 0).all()
    for index in range(0, tables.TABLES, 97):
        deviation = normal.DEVIATIONS[index // tables.SIDE] / 65536
        mean = index % tables.SIDE * (symbols - 1) / (tables.SIDE - 1)
        edges = [0.0, *(cdf((s + 0.5 - mean) / deviation) for s in range(symbols - 1)), 1.0]
        expected = np.diff(edges) * (tables.SCALE - symbols) + 1
        # Rounding down loses up to 1 a symbol, which the likeliest symbol gets.
        assert np.abs(frequencies[index, :symbols] - expected).max() <= symbols + 1


@pytest.mark.parametrize("symbols", [15, 31])
def test_costs_are_those_of_the_frequencies(symbols: int) -> None:
    frequencies = np.diff(tables.family(symbols).astype(int), axis=1)[:, :symbols]
    np.testing.assert_allclose(tables.costs(symbols)[:, :symbols] / 256, 12 - np.log2(frequencies), atol=1 / 250)
    assert (tables.costs(symbols)[:, symbols:] == 0).all()


def test_families_never_change() -> None:
    """Files name tables by number. If this fails, old files no longer decode: restore the tables, not the test."""
    digest = hashlib.sha256(b"".join(tables.family(n).astype("<u2").tobytes() for n in range(1, 33))).hexdigest()
    assert digest == "929db1e6b2e61681d9fc95e89585dec9974b64c8779d22d13de524da6aa7e962"


@pytest.mark.parametrize("symbols", [0, 33])
def test_impossible_alphabets_are_refused(symbols: int) -> None:
    with pytest.raises(ValueError, match="1 to 32"):
        tables.family(symbols)
