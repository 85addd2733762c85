"""The TurboQuant oracle agrees with LMCache byte for byte, and its parts with their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import golden, turboquant


@pytest.mark.parametrize("name", golden.names("turboquant"))
def test_oracle_has_lmcaches_object(name: str) -> None:
    case = golden.load_case(name)
    preset, head_dim = turboquant.PRESETS[case.options["preset"]], case.options["head_dim"]
    assert turboquant.slot_bytes(preset, head_dim) == case.options["slot_bytes"]
    assert turboquant.encode(case.input, preset, head_dim) == case.encoded
    decoded = turboquant.decode(case.encoded, case.input.shape, case.input.dtype, preset, head_dim)
    assert golden.same_bits(decoded, case.decoded)


@pytest.mark.parametrize("seed", [0, 42, 42 + 1337 * 31, 2**32 - 1])
def test_mersenne_twister_is_the_published_one(seed: int) -> None:
    """numpy's frozen RandomState runs the same generator and gives its outputs as they are."""
    expected = np.random.RandomState(seed).randint(0, 1 << 32, 700, dtype=np.uint32)
    assert np.array_equal(turboquant.mersenne_twister(seed, 700), expected)


def test_signs_are_torchs() -> None:
    """As printed by torch 2.13: ``2 * torch.randint(0, 2, (16,), generator=g) - 1`` with seeds 42 and 42 + 1337 * 2."""
    assert turboquant.signs(0, 16).tolist() == [-1, 1, -1, -1, -1, 1, -1, -1, -1, 1, -1, -1, -1, -1, 1, -1]
    assert turboquant.signs(2, 16).tolist() == [1, -1, 1, -1, -1, -1, -1, -1, 1, -1, -1, -1, 1, 1, -1, 1]


@pytest.mark.parametrize(
    ("bits", "positive"),
    [
        (3, [0.244984, 0.755646, 1.343180, 2.150350]),
        (4, [0.128428, 0.388138, 0.656880, 0.942448, 1.256258, 1.617882, 2.068447, 2.730922]),
    ],
)
def test_codebook_is_lmcaches_coarse_one(bits: int, positive: list[float]) -> None:
    levels = turboquant.codebook(bits, 128) * np.sqrt(128)
    assert np.allclose(levels[len(positive) :], positive, atol=1e-6)
    assert np.allclose(levels, -levels[::-1], atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 64, 128])
def test_hadamard_is_its_own_inverse(size: int) -> None:
    matrix = turboquant.hadamard(size).astype(np.float64)
    assert np.array_equal(matrix, matrix.T)
    assert np.allclose(matrix @ matrix, np.eye(size), atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([3, 4]), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_packing_is_one_bit_stream_and_comes_back(bits: int, count: int, seed: int) -> None:
    indices = np.random.default_rng(seed).integers(0, 1 << bits, (3, count)).astype(np.uint8)
    packed = turboquant.pack(indices, bits)
    assert np.array_equal(turboquant.unpack(packed, bits, count), indices)
    for row, expected in zip(packed, indices, strict=True):
        stream = sum(int(index) << (bits * i) for i, index in enumerate(expected))
        assert int.from_bytes(row.tobytes(), "little") == stream
