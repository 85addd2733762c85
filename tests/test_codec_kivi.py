"""kivi keeps its promises: the paper's groups and words, an exact residual, constant groups exact, true bits told."""

from __future__ import annotations

import numpy as np
import pytest

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch
from kvzip.codecs.kivi import Kivi
from kvzip.devices.base import Device
from kvzip.errors import UsageError
from tests import codecs
from tests.reference import kivi as oracle

FORMS = [Kivi(bits=bits, residual=residual, tuned=tuned) for bits, residual, tuned in
         [(2, 128, False), (4, 0, False), (2, 0, True), (4, 17, True)]]  # fmt: skip


def restored_by_oracle(array: np.ndarray, kind: str, bits: int) -> np.ndarray:
    flat = array.reshape(len(array), -1)
    if kind == "key":
        numbers = oracle.dequantize_keys(*oracle.quantize_keys(flat, bits))
    else:
        numbers = oracle.dequantize_values(*oracle.quantize_values(flat, bits))
    return numbers.reshape(array.shape).astype(array.dtype)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dtype", codecs.DTYPES)
def test_words_scales_and_numbers_are_those_of_the_paper(dtype: str, bits: int, device: Device) -> None:
    for geometry in [(64, 3, 64), (45, 1, 40), (7, 1, 3)]:
        arrays = [codecs.numbers(*geometry, dtype, seed) for seed in range(2)]
        batch = codecs.batch_of(arrays)
        codec = Kivi(bits=bits, residual=0)
        sections = codecs.encode(codec, batch, device)
        restored = codecs.decode(codec, batch, sections, device)
        pairs = [(oracle.quantize_keys, oracle.pack_keys), (oracle.quantize_values, oracle.pack_values)]
        for i, (quantize, pack) in enumerate(pairs):
            codes, scales, minima = quantize(arrays[i].reshape(geometry[0], -1), bits)
            np.testing.assert_array_equal(sections[i]["WORD"].view(np.int32), pack(codes, bits).reshape(-1))
            np.testing.assert_array_equal(sections[i]["SCAL"].view(np.float16), scales.reshape(-1))
            np.testing.assert_array_equal(sections[i]["MINS"].view(np.float16), minima.reshape(-1))
            expected = restored_by_oracle(arrays[i], ("key", "value")[i], bits)
            np.testing.assert_array_equal(restored[i].astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("codec", FORMS, ids=lambda codec: str(codec.config()))
def test_entropy_coding_changes_no_number(codec: Kivi, device: Device) -> None:
    """The tuned form decodes to what the plain one does, in fewer bytes where there is room for tables."""
    batch = codecs.batch_of([codecs.numbers(200, 2, 40, seed=seed) for seed in range(2)])
    plain = Kivi(bits=codec.bits, residual=codec.residual)
    one = codecs.decode(codec, batch, codecs.encode(codec, batch, device), device)
    other = codecs.decode(plain, batch, codecs.encode(plain, batch, device), device)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(codecs.bits(a), codecs.bits(b))


def test_entropy_coding_pays(cpu: Device) -> None:
    batch = codecs.batch_of([codecs.numbers(1024, 2, 64, seed=seed) for seed in range(2)])
    sizes = {}
    for bits in (2, 4):
        for tuned in (False, True):
            sections = codecs.encode(Kivi(bits=bits, residual=0, tuned=tuned), batch, cpu)
            sizes[bits, tuned] = sum(section.nbytes for one in sections for section in one.values())
    assert sizes[2, True] < 0.97 * sizes[2, False] and sizes[4, True] < 0.97 * sizes[4, False]


@pytest.mark.parametrize("order", codecs.ORDERS)
@pytest.mark.parametrize("geometry", codecs.GEOMETRIES, ids=str)
def test_same_bytes_on_every_device(geometry: tuple[int, int, int], order: str, device: Device, cpu: Device) -> None:
    first = codecs.GEOMETRIES.index(geometry) + list(codecs.ORDERS).index(order)
    for i in (first, first + 2):
        arrays = [
            codecs.ORDERS[order](codecs.numbers(*geometry, list(codecs.DTYPES)[i % 3], seed)) for seed in range(2)
        ]
        codecs.check_same_bytes(FORMS[i % 4], codecs.batch_of(arrays), device, cpu)


def test_the_newest_tokens_of_the_plane_stay_as_they_are(device: Device) -> None:
    """Of the plane, not of the block: an early block has no residual, the last one has what is left of it."""
    array = codecs.numbers(100, 1, 40)
    codec = Kivi(residual=30)
    for plane_tokens, exact in ((100, 30), (120, 10), (500, 0)):
        plane = Plane(0, 0, "key", plane_tokens, 1, 40, "bfloat16")
        batch = Batch([Block((plane,), 0, 100)], [array])
        (restored,) = codecs.decode(codec, batch, codecs.encode(codec, batch, device), device)
        same = (codecs.bits(restored) == codecs.bits(array)).all(axis=(1, 2))
        assert same[100 - exact :].all() and not same[: 100 - exact].any()


@pytest.mark.parametrize("codec", FORMS, ids=lambda codec: str(codec.config()))
@pytest.mark.parametrize("dtype", codecs.DTYPES)
def test_special_tokens_stay_as_they_are_and_others_do_not_suffer(dtype: str, codec: Kivi, device: Device) -> None:
    arrays = [codecs.numbers(70, 2, 24, dtype, seed) for seed in range(2)]
    special = [3, 40, 41]
    clean = [array.copy() for array in arrays]
    for array in arrays:
        array[3] = np.nan
        array[40, 1, 3] = -np.inf
        array[41, 0, 0] = 70000 if dtype != "float16" else np.nan
    batch = codecs.batch_of(arrays)
    decoded = codecs.decode(codec, batch, codecs.encode(codec, batch, device), device)
    for array, restored in zip(arrays, decoded, strict=True):
        np.testing.assert_array_equal(codecs.bits(restored[special]), codecs.bits(array[special]))
        rest = np.delete(np.arange(70), special)
        error = np.abs(restored[rest].astype(np.float32) - array[rest].astype(np.float32))
        assert error.max() < (4 if codec.bits == 2 else 1) * np.abs(clean[0]).astype(np.float32).max()


@pytest.mark.parametrize("codec", FORMS, ids=lambda codec: str(codec.config()))
def test_equal_numbers_are_exact(codec: Kivi, device: Device) -> None:
    """Zeros, and other constants that float16 holds, where the original divides 0 by 0."""
    arrays = [np.full((200, 2, 40), value, np.float16) for value in (0, 1.25)]
    batch = codecs.batch_of(arrays)
    decoded = codecs.decode(codec, batch, codecs.encode(codec, batch, device), device)
    for array, restored in zip(arrays, decoded, strict=True):
        np.testing.assert_array_equal(restored, array)


@pytest.mark.parametrize("codec", FORMS, ids=lambda codec: str(codec.config()))
def test_recorded_errors_are_true(codec: Kivi, cpu: Device) -> None:
    codecs.check_errors(codec, codecs.batch_of([codecs.numbers(300, 2, 40, seed=seed) for seed in range(2)]), cpu)


def test_true_bits_are_told(cpu: Device) -> None:
    """2 bits at groups of 32 are 3, and the residual is counted."""
    batch = codecs.batch_of([codecs.numbers(1024, 2, 64, seed=seed) for seed in range(2)])
    for bits, residual, expected in ((2, 0, 3.0), (4, 0, 5.0), (2, 128, 3.0 + 13 / 8)):
        codec = Kivi(bits=bits, residual=residual)
        for block, sections in zip(batch.blocks, codecs.encode(codec, batch, cpu), strict=True):
            told = codec.describe(block.plane)
            assert told["bits"] == bits and told["stored_bits"] == pytest.approx(expected, abs=1e-3)
            assert sum(s.nbytes for s in sections.values()) * 8 == pytest.approx(
                told["stored_bits"] * 1024 * 128, rel=1e-3
            )


@pytest.mark.parametrize("codec", FORMS, ids=lambda codec: str(codec.config()))
def test_hostile_sections_are_reported(codec: Kivi, device: Device) -> None:
    arrays = [codecs.numbers(170, 2, 24, seed=seed) for seed in range(2)]
    arrays[0][3] = np.nan
    assert codecs.check_hostile(codec, codecs.batch_of(arrays), device) > 15


@pytest.mark.parametrize("tag", ["SCAL", "MINS"])
def test_scales_and_minima_are_finite(tag: str, device: Device) -> None:
    """NaN would come of others, whose bits differ between processors."""
    batch = codecs.batch_of([codecs.numbers(70, 2, 24, seed=seed) for seed in range(2)])
    for wrong in (0x7C00, 0xFC00, 0x7E00):
        codec = Kivi(bits=4, residual=0)
        codecs.check_number_refused(codec, batch, device, tag, np.uint16(0xFBFF), np.uint16(wrong))


def test_configuration_round_trip() -> None:
    for codec in FORMS:
        codecs.check_config(codec, codecs.batch_of([codecs.numbers(4, 1, 8)]))


@pytest.mark.parametrize("options", [{"bits": 3}, {"residual": -1}])
def test_bad_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="kivi"):
        Kivi(**options)
