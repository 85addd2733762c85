"""The rANS oracle: what it codes comes back at close to the entropy, and a damaged stream is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import rans


def _case(seed: int, tokens: int, lanes: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tables, some symbols of which never occur, and symbols drawn from them."""
    rng = np.random.default_rng(seed)
    frequencies = np.stack([rng.multinomial(4096, rng.dirichlet(np.full(size, 0.3))) for _ in range(lanes)])
    symbols = np.stack([rng.choice(size, tokens, p=row / 4096) for row in frequencies], axis=1)
    return symbols.astype(np.uint8), frequencies


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 60), st.integers(1, 32), st.integers(1, 32))
def test_symbols_come_back(seed: int, tokens: int, lanes: int, size: int) -> None:
    symbols, frequencies = _case(seed, tokens, lanes, size)
    states, words = rans.encode(symbols, frequencies)
    assert np.array_equal(rans.decode(states, words, frequencies, tokens), symbols)
    assert (states[lanes:] == rans.START).all()


def test_size_is_the_cross_entropy() -> None:
    symbols, frequencies = _case(1, 400, 32, 16)
    _, words = rans.encode(symbols, frequencies)
    ideal = -np.log2(frequencies[np.arange(32), symbols] / 4096).sum()
    assert abs(len(words) * 16 - ideal) <= 32 * 16 + 0.001 * ideal


@pytest.mark.parametrize("damage", ["a word less", "a word more", "another word", "another state"])
def test_damage_is_noticed(damage: str) -> None:
    symbols, frequencies = _case(2, 100, 20, 8)
    states, words = rans.encode(symbols, frequencies)
    match damage:
        case "a word less":
            words = words[:-1]
        case "a word more":
            words = np.append(words, np.uint16(0))
        case "another word":
            words[len(words) // 2] ^= 1
        case "another state":
            states[3] ^= 1 << 20
    with pytest.raises(ValueError, match="the stream"):
        rans.decode(states, words, frequencies, 100)
