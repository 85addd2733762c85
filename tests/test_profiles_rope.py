"""Promises about RoPE: it is undone exactly, read from real configurations, found in keys, and never guessed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvzip.errors import UsageError
from kvzip.profiles.detect import detect
from kvzip.profiles.rope import Rope, Scaling, cos_sin, rotate
from kvzip.profiles.ropes import Ropes, from_config
from tests.reference import kvtc

ROPES = [
    Rope(1e4),
    Rope(1e6, interleaved=True),
    Rope(1e5, rotary=32, start=1000),
    Rope(1e4, rotary=32, offset=32, interleaved=True),
    Rope(5e5, scaling=Scaling("llama3", factor=8, low=1, high=4, original=8192)),
    Rope(1e6, scaling=Scaling("yarn", factor=4, original=32768)),
    Rope(1e4, scaling=Scaling("longrope", short=(1.5,) * 32, long=(2.5,) * 32, original=4096)),
]


def keys(tokens: int = 300, heads: int = 2, head_dim: int = 64, seed: int = 0) -> np.ndarray:
    """Un-rotated keys as models have them: channels with their own mean and spread."""
    rng = np.random.default_rng(seed)
    mean, spread = rng.normal(0, 4, (heads, head_dim)), rng.lognormal(0, 0.7, (heads, head_dim))
    return (mean + spread * rng.normal(size=(tokens, heads, head_dim))).astype(np.float32)


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_rotation_is_undone(rope: Rope) -> None:
    """Turned and turned back, keys are what they were, and only the channels that turn changed in between."""
    x = keys()
    turned = rotate(x, rope)
    assert np.abs(rotate(turned, rope, inverse=True) - x).max() < 1e-5
    still = np.setdiff1d(np.arange(64), np.concatenate(rope.pairs(64)))
    assert np.array_equal(turned[..., still], x[..., still])


def test_rotation_is_that_of_the_paper() -> None:
    """An independent float64 rotation gives the same keys, both ways to pair channels."""
    x = keys(tokens=50)
    frequencies = 1e4 ** (-np.arange(0, 64, 2) / 64)
    for interleaved in (False, True):
        expected = kvtc.rotate(x, frequencies, start=7, interleaved=interleaved)
        assert np.abs(rotate(x, Rope(1e4, interleaved=interleaved, start=7)) - expected).max() < 1e-5


def test_tokens_from_the_middle_turn_by_their_own_positions() -> None:
    """A block's first token has its index in the cache: blocks agree with the whole."""
    x, rope = keys(), Rope(1e5)
    assert np.array_equal(rotate(x, rope)[200:], rotate(x[200:], rope, first=200))


def test_cosines_are_right_at_far_positions() -> None:
    """The committed series is within half a unit of float32 of the true values up to a million positions."""
    frequencies = Rope(1e6).frequencies(128)
    for start in (0, 131_072, 1_000_000):
        cos, sin = cos_sin(frequencies, start, 64)
        angle = (np.arange(64) + start)[:, None] * frequencies
        assert np.abs(cos - np.cos(angle)).max() < 4e-8
        assert np.abs(sin - np.sin(angle)).max() < 4e-8


def test_llama3_frequencies_are_those_of_its_formula() -> None:
    """Fast frequencies stay, slow ones are divided, those between are blended."""
    plain = Rope(5e5).frequencies(128)
    own = Rope(5e5, scaling=Scaling("llama3", factor=8, low=1, high=4, original=8192)).frequencies(128)
    wavelength = 2 * math.pi / plain
    share = np.clip((8192 / wavelength - 1) / (4 - 1), 0, 1)
    assert np.allclose(own, plain * share + plain / 8 * (1 - share), rtol=1e-12)
    assert own[0] == plain[0]
    assert own[-1] == pytest.approx(plain[-1] / 8)


def test_dynamic_and_longrope_look_at_the_length() -> None:
    """Within the trained length nothing is stretched; beyond it the base, or the factors, change."""
    dynamic = Rope(1e4, scaling=Scaling("dynamic", factor=2, original=1000))
    assert np.array_equal(dynamic.frequencies(64, 1000), Rope(1e4).frequencies(64))
    base = 1e4 * (2 * 3000 / 1000 - 1) ** (64 / 62)
    assert np.allclose(dynamic.frequencies(64, 3000), base ** (-np.arange(0, 64, 2) / 64))
    long = Rope(1e4, scaling=Scaling("longrope", short=(1.0,) * 32, long=(4.0,) * 32, original=1000))
    assert np.allclose(long.frequencies(64, 2000) * 4, long.frequencies(64, 900))


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_json_round_trip(rope: Rope) -> None:
    """A header gives back the description that was stored in it."""
    assert Rope.from_json(rope.to_json()) == rope
    ropes = Ropes.per_layer([rope, None, rope])
    assert Ropes.from_json(ropes.to_json()) == ropes
    assert ropes.of(1) is None
    assert ropes.of(2) == rope


CONFIGS = {
    "llama3.1": (
        {"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 5e5, "max_position_embeddings": 131072,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192}},
        [Rope(5e5, scaling=Scaling("llama3", factor=8, low=1, high=4, original=8192))] * 2,
    ),
    "qwen2 yarn": (
        {"num_hidden_layers": 1, "rope_theta": 1e6,
         "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        [Rope(1e6, scaling=Scaling("yarn", factor=4, original=32768))],
    ),
    "transformers 5": (
        {"num_hidden_layers": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, [Rope(1e5)],
    ),
    "gemma3": (
        {"text_config": {"num_hidden_layers": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
                         "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}},
        [Rope(1e4), Rope(1e6, scaling=Scaling("linear", factor=8)), Rope(1e4)],
    ),
    "per layer type": (
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
         "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}},
        [Rope(1e4), Rope(1e6)],
    ),
    "smollm3": ({"num_hidden_layers": 4, "rope_theta": 5e6, "no_rope_layers": [1, 1, 1, 0]}, [Rope(5e6)] * 3 + [None]),
    "glm4": (
        {"model_type": "glm4", "num_hidden_layers": 1, "rope_theta": 1e4, "partial_rotary_factor": 0.5,
         "head_dim": 128},
        [Rope(1e4, rotary=64, interleaved=True)],
    ),
    "gptneox": (
        {"model_type": "gpt_neox", "num_hidden_layers": 1, "rotary_emb_base": 10000, "rotary_pct": 0.25,
         "hidden_size": 512, "num_attention_heads": 8},
        [Rope(1e4, rotary=16)],
    ),
    "gpt2": ({"model_type": "gpt2", "num_hidden_layers": 1}, [None]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_of_real_models(name: str) -> None:
    """The fields that models of each family have give the rotation that the family uses."""
    config, expected = CONFIGS[name]
    ropes = from_config(config)
    assert [ropes.of(i) for i in range(len(expected))] == expected


def test_text_forms() -> None:
    """Every option of --rope, and 'none'."""
    assert Ropes.parse("none").of(3) is None
    given = Ropes.parse("theta=1e6, rotary=64, offset=2, start=5, interleaved, scaling=llama3:8:1:4:4096")
    scaling = Scaling("llama3", factor=8, low=1, high=4, original=4096)
    assert given.of(0) == Rope(1e6, rotary=64, offset=2, start=5, interleaved=True, scaling=scaling)


@pytest.mark.parametrize(
    "text",
    ["", "theta", "theta=x", "theta=0", "theta=inf", "rotary=64", "theta=1e4,rotary=3", "theta=1e4,phi=2",
     "theta=1e4,scaling=llama3", "theta=1e4,scaling=magic:2", "theta=1e4,scaling=linear:0"],
)  # fmt: skip
def test_bad_descriptions_explain_themselves(text: str) -> None:
    """What describes no rotation is a usage error, never a traceback."""
    with pytest.raises(UsageError, match="RoPE"):
        Ropes.parse(text)


def test_bad_configurations_explain_themselves() -> None:
    """No theta, no layers, a rotation wider than the head, an unknown scaling."""
    for config in (
        {},
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 1, "rope_theta": 1e4, "rope_scaling": {"type": "x"}},
    ):
        with pytest.raises(UsageError):
            from_config(config)
    with pytest.raises(UsageError, match="channels"):
        Rope(1e4, rotary=128).frequencies(64)
    with pytest.raises(UsageError, match="layer 3"):
        Ropes((None, Rope(1e4)), (0, 1)).of(3)


@pytest.mark.parametrize("rope", [Rope(1e4), Rope(1e5, interleaved=True), Rope(1e6, rotary=32), Rope(5e6, start=777)])
def test_rotation_is_found_in_keys(rope: Rope) -> None:
    """Base, pairing and width are found in 256 tokens of a few layers, even from the middle of a prompt."""
    found = detect([rotate(keys(256, seed=layer), rope) for layer in range(3)])
    assert found is not None
    assert (found.rope.theta, found.rope.interleaved) == (rope.theta, rope.interleaved)
    assert found.rope.width(64) == rope.width(64)


def test_nothing_is_found_where_nothing_turns() -> None:
    """Keys without rotation, noise, constants, few tokens and NaN: no candidate stands out."""
    noise = np.random.default_rng(1).normal(size=(256, 2, 64)).astype(np.float32)
    broken = rotate(keys(256), Rope(1e4))
    broken[100] = np.nan
    for case in (keys(256), noise, np.ones((256, 2, 64)), rotate(keys(20), Rope(1e4)), broken):
        assert detect([case.astype(np.float32)]) is None
