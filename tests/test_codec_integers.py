"""int8 and int4 keep their promises: the reference's codes, no overflow, special tokens exact, better than fp8."""

from __future__ import annotations

import numpy as np
import pytest

from kvzip.codecs.base import Codec
from kvzip.codecs.fp8 import Fp8
from kvzip.codecs.integers import Int4, Int8, Integers
from kvzip.devices.base import Device
from tests import codecs
from tests.reference import integers as oracle

CODECS = [
    cls(symmetric=symmetric, tuned=tuned)
    for cls in (Int8, Int4)
    for symmetric in (True, False)
    for tuned in (False, True)
]

# Also heads longer than a warp's 128 channels, the last of which are no whole strip.
GEOMETRIES = [*codecs.GEOMETRIES, (33, 2, 200), (20, 1, 576)]


def label(codec: Codec) -> str:
    return f"{codec.name}-{'-'.join(option for option, value in codec.config().items() if value)}"


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_codes_scales_and_numbers_are_those_of_the_reference(codec: Integers, device: Device) -> None:
    for dtype, geometry in [("bfloat16", (33, 3, 64)), ("float16", (5, 2, 40)), ("float32", (7, 1, 3))]:
        array = codecs.numbers(*geometry, dtype)
        batch = codecs.batch_of([array])
        (sections,) = codecs.encode(codec, batch, device)
        codes, scales, minima = oracle.quantize(array, codec.bits, codec.symmetric)
        np.testing.assert_array_equal(sections["SCAL"].view(np.uint16), scales.view(np.uint16).reshape(-1))
        if not codec.symmetric:
            np.testing.assert_array_equal(sections["MINS"], minima.reshape(-1).view(np.uint8))
        if not codec.tuned:
            np.testing.assert_array_equal(sections["WORD"].view(np.uint32), oracle.pack(codes, codec.bits).reshape(-1))
        (restored,) = codecs.decode(codec, batch, [sections], device)
        expected = oracle.dequantize(codes, scales, minima, codec.bits, codec.symmetric).astype(array.dtype)
        np.testing.assert_array_equal(restored.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("order", codecs.ORDERS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_same_bytes_on_every_device(geometry: tuple[int, int, int], order: str, device: Device, cpu: Device) -> None:
    first = GEOMETRIES.index(geometry) + list(codecs.ORDERS).index(order)
    for i in (first, first + 3):
        codec, dtype = CODECS[i % 8], list(codecs.DTYPES)[i % 3]
        codecs.check_same_bytes(
            codec, codecs.batch_of([codecs.ORDERS[order](codecs.numbers(*geometry, dtype))]), device, cpu
        )


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_the_error_is_half_a_step(codec: Integers, cpu: Device) -> None:
    """Also where float16 scales would overflow or vanish: a token's numbers may be of any size."""
    for size in (1e-30, 1.0, 1e5, 1e36):
        array = codecs.numbers(50, 2, 40, "float32") * np.float32(size)
        batch = codecs.batch_of([array])
        (restored,) = codecs.decode(codec, batch, codecs.encode(codec, batch, cpu), cpu)
        span = np.abs(array).max(axis=2) if codec.symmetric else np.ptp(array, axis=2)
        steps = (1 << (codec.bits - 1)) - 1 if codec.symmetric else (1 << codec.bits) - 1
        assert (np.abs(restored - array) <= (span / steps * 0.505)[:, :, None]).all()


@pytest.mark.parametrize("codec", CODECS, ids=label)
@pytest.mark.parametrize("dtype", codecs.DTYPES)
def test_special_tokens_stay_as_they_are_and_others_do_not_suffer(dtype: str, codec: Integers, device: Device) -> None:
    clean = codecs.numbers(70, 2, 24, dtype)
    array, special = clean.copy(), [3, 40, 41]
    array[3] = np.nan
    array[40, 1, 3] = -np.inf
    array[41, 0, 0] = 3e38 if dtype != "float16" else np.nan
    array[50] = 0
    array[51] = 1.25
    clean[50:52] = array[50:52]
    (restored,) = codecs.decode(
        codec, codecs.batch_of([array]), codecs.encode(codec, codecs.batch_of([array]), device), device
    )
    np.testing.assert_array_equal(codecs.bits(restored[special]), codecs.bits(array[special]))
    assert (restored[50] == 0).all() and np.abs(restored[51].astype(np.float32) - 1.25).max() <= 1.25 / 127
    batch = codecs.batch_of([clean])
    (other,) = codecs.decode(codec, batch, codecs.encode(codec, batch, device), device)
    rest = np.delete(np.arange(70), special)
    np.testing.assert_array_equal(codecs.bits(restored[rest]), codecs.bits(other[rest]))


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_recorded_errors_are_true(codec: Integers, cpu: Device) -> None:
    codecs.check_errors(codec, codecs.batch_of([codecs.numbers(300, 2, 40, seed=seed) for seed in range(2)]), cpu)


def measured(codec: Codec, cpu: Device) -> tuple[float, float]:
    """Bits a number, and squared error over energy, of normal bfloat16 numbers."""
    array = np.random.default_rng(0).normal(size=(1024, 2, 128)).astype(codecs.DTYPES["bfloat16"])
    (encoded,) = codec.encode(codecs.batch_of([array]), cpu)
    size = sum(section.nbytes for section in encoded.sections.values())
    (errors,) = encoded.errors
    return size * 8 / array.size, errors.squared_error / errors.energy


def test_better_than_fp8(cpu: Device) -> None:
    """int8's error is a tenth of fp8's at the same size; entropy-coded it is smaller, too."""
    fp8_bits, fp8_error = measured(Fp8(), cpu)
    for tuned, bits in ((False, 8.13), (True, fp8_bits)):
        found_bits, found_error = measured(Int8(tuned=tuned), cpu)
        assert found_bits <= bits and found_error < fp8_error / 10


def test_entropy_coding_pays_and_changes_no_number(cpu: Device) -> None:
    for cls, symmetric in ((Int8, True), (Int8, False), (Int4, True), (Int4, False)):
        plain, tuned = (measured(cls(symmetric=symmetric, tuned=tuned), cpu) for tuned in (False, True))
        assert tuned[0] < 0.97 * plain[0] and tuned[1] == plain[1]


def test_true_bits_are_told(cpu: Device) -> None:
    for codec in (Int8(), Int8(symmetric=False), Int4(), Int4(symmetric=False)):
        told = codec.describe(codecs.batch_of([np.zeros((1024, 2, 128), codecs.DTYPES["bfloat16"])]).blocks[0].plane)
        assert told["bits"] == codec.bits and told["stored_bits"] == pytest.approx(measured(codec, cpu)[0], abs=1e-3)


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_hostile_sections_are_reported(codec: Integers, device: Device) -> None:
    array = codecs.numbers(70, 2, 24)
    array[3] = np.nan
    assert codecs.check_hostile(codec, codecs.batch_of([array]), device) > 15


@pytest.mark.parametrize(("bits", "limit"), [(4, 124), (8, 120)])
def test_scales_do_not_overflow_and_minima_are_finite(bits: int, limit: int, device: Device) -> None:
    """NaN would come of others, whose bits differ between processors."""
    batch = codecs.batch_of([codecs.numbers(40, 2, 24)])
    codec = {4: Int4, 8: Int8}[bits](symmetric=False)
    for sign in (0, 0x8000):
        scale = sign | (127 + limit) << 7
        codecs.check_number_refused(codec, batch, device, "SCAL", np.uint16(scale - 1), np.uint16(scale))
        codecs.check_number_refused(codec, batch, device, "MINS", np.uint16(sign | 0x7F7F), np.uint16(sign | 0x7F80))


def test_configuration_round_trip() -> None:
    for codec in CODECS:
        codecs.check_config(codec, codecs.batch_of([codecs.numbers(4, 1, 8)]))
