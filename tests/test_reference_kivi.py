"""The KIVI oracle keeps what its paper promises: an error of half a step, and words as the paper's code packs them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import kivi


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("tokens", [1, 32, 45, 128])
def test_error_is_half_a_step(bits: int, tokens: int) -> None:
    x = np.random.default_rng(tokens).normal(3, 2, (tokens, 96)).astype(np.float16)
    groups = {"keys": np.arange(tokens)[:, None] // 32, "values": np.arange(96)[None, :] // 32}
    for quantize, dequantize, name in (
        (kivi.quantize_keys, kivi.dequantize_keys, "keys"),
        (kivi.quantize_values, kivi.dequantize_values, "values"),
    ):
        codes, scales, minima = quantize(x, bits)
        assert codes.max() < 1 << bits
        step = np.take_along_axis(scales, np.broadcast_to(groups[name], x.shape), axis=name == "values")
        # The scale is rounded to float16, so a group's greatest may be cut by a few parts in a thousand of the range.
        slack = step.astype(np.float32) * (0.5 + (1 << bits) * 2.0**-11)
        assert (np.abs(dequantize(codes, scales, minima) - x.astype(np.float32)) <= slack + 1e-6).all()


def test_constant_groups_are_exact() -> None:
    x = np.full((40, 64), 1.25, np.float16)
    for quantize, dequantize in (
        (kivi.quantize_keys, kivi.dequantize_keys),
        (kivi.quantize_values, kivi.dequantize_values),
    ):
        assert (dequantize(*quantize(x, 2)) == 1.25).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_words_hold_tokens_of_a_channel_or_channels_of_a_token(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (40, 33)).astype(np.uint8)
    per_word = 32 // bits
    keys, values = kivi.pack_keys(codes, bits).view(np.uint32), kivi.pack_values(codes, bits).view(np.uint32)
    assert keys.shape == (-(-40 // per_word), 33)
    assert values.shape == (40, -(-33 // per_word))
    for t, c in [(0, 0), (1, 0), (17, 5), (39, 32)]:
        mask = (1 << bits) - 1
        assert keys[t // per_word, c] >> np.uint32(bits * (t % per_word)) & mask == codes[t, c]
        assert values[t, c // per_word] >> np.uint32(bits * (c % per_word)) & mask == codes[t, c]
