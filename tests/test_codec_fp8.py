"""fp8 keeps its promises: the reference's codes, LMCache's bytes, NaN kept, the same bytes everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvzip.codecs.fp8 import SCALES, TILE, Fp8
from kvzip.devices.base import Device
from kvzip.errors import UsageError
from tests import codecs
from tests.reference import fp8 as oracle
from tests.reference import golden
from tests.reference.arithmetic import fused

FORMATS = ["float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("name", golden.names("fp8"))
def test_bytes_are_those_of_lmcache(name: str, device: Device) -> None:
    case = golden.load_case(name)
    arrays = [case.input[which, layer][:, None, :] for which in (0, 1) for layer in range(case.input.shape[1])]
    batch = codecs.batch_of(arrays)
    codec = Fp8(dtype=case.options["fp8_dtype"])
    sections = codecs.encode(codec, batch, device)
    assert b"".join(one["DATA"].tobytes() for one in sections) == case.encoded
    restored = np.stack(codecs.decode(codec, batch, sections, device)).reshape(case.decoded.shape)
    # Which of its NaNs a processor gives is its own affair.
    numbers = ~np.isnan(case.decoded.astype(np.float32))
    assert np.isnan(restored.astype(np.float32)[~numbers]).all()
    np.testing.assert_array_equal(codecs.bits(restored)[numbers], codecs.bits(case.decoded)[numbers])


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("element", ["bfloat16", "float16"])
def test_every_device_rounds_every_short_number(element: str, dtype: str, saturate: bool, device: Device) -> None:
    """All 65536 bit patterns: ties to even, subnormals, overflow, infinities, NaN."""
    array = np.arange(65536, dtype=np.uint16).view(codecs.DTYPES[element]).reshape(1024, 1, 64)
    check_codes(Fp8(dtype=dtype, saturate=saturate), array, device)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("saturate", [True, False])
def test_every_device_rounds_float32_around_all_ties(dtype: str, saturate: bool, device: Device) -> None:
    """Three numbers on either side of each code and of each middle between two, and all that is no number."""
    middle, largest = edges(dtype)[-2:]
    others = np.float32([2**-149, 2**-126, 2 * largest - middle, 2 * largest, np.finfo(np.float32).max])
    numbers = neighbours(np.concatenate([edges(dtype), others]))
    none = np.array([0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF], np.uint32).view(np.float32)
    # Alone and with ever smaller ones: a row of small numbers goes another way than one with others.
    for limit in (np.inf, 1.1 * largest, largest):
        some = np.concatenate([numbers, none])
        some = some[some <= limit] if limit < np.inf else some
        check_codes(Fp8(dtype=dtype, saturate=saturate), rows(np.concatenate([some, -some])), device)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("exponent", [-110, -84, -64, 0, 127])
def test_every_device_divides_by_scales_exactly(dtype: str, exponent: int, device: Device) -> None:
    """The last bit of a quotient decides where it is a middle between two codes: tokens of numbers around such
    products, with scales from the smallest ones to where numbers end.
    """
    tops = np.random.default_rng(1).uniform(1, 2, 64).astype(np.float32)
    # The third needs, at 2^-84, what float32 cannot hold of a remainder.
    tops[:3] = 1.75, np.nextafter(np.float32(2), np.float32(0)), float.fromhex("0x1.4ff202p0")
    largest = edges(dtype).max()
    around = [np.minimum(neighbours(edges(dtype) * (top / largest)), top) for top in tops]
    array = np.stack([rows(numbers).reshape(1, -1) for numbers in around])
    check_codes(Fp8(dtype=dtype, scale="token"), array * np.float32(2.0**exponent), device)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("element", codecs.DTYPES)
def test_every_code_decodes_to_its_value(dtype: str, element: str, device: Device) -> None:
    codes = np.arange(256, dtype=np.uint8)
    batch = codecs.batch_of([np.zeros((8, 1, 32), codecs.DTYPES[element])])
    (restored,) = codecs.decode(Fp8(dtype=dtype), batch, [{"DATA": codes}], device)
    expected = oracle.decode(codes, dtype).astype(codecs.DTYPES[element]).reshape(8, 1, 32)
    np.testing.assert_array_equal(restored.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("order", codecs.ORDERS)
@pytest.mark.parametrize("geometry", codecs.GEOMETRIES, ids=str)
def test_same_bytes_on_every_device(geometry: tuple[int, int, int], order: str, device: Device, cpu: Device) -> None:
    for scale in SCALES:
        for dtype in codecs.DTYPES:
            arrays = [codecs.ORDERS[order](codecs.numbers(*geometry, dtype, seed)) for seed in range(2)]
            codecs.check_same_bytes(Fp8(scale=scale), codecs.batch_of(arrays), device, cpu)


@pytest.mark.parametrize("scale", [scale for scale in SCALES if scale != "none"])
def test_scales_save_what_would_overflow_or_vanish(scale: str, device: Device) -> None:
    """The largest number of what shares a scale lands on the largest code, and comes back with fp8's precision."""
    array = codecs.numbers(50, 3, 40, "float32") * np.float32(1e6)
    array[:, 1] *= np.float32(1e-9)
    batch = codecs.batch_of([array])
    codec = Fp8(scale=scale)
    sections = codecs.encode(codec, batch, device)
    (restored,) = codecs.decode(codec, batch, sections, device)
    axes = {"tensor": (0, 1, 2), "head": (0, 2), "token": (1, 2)}[scale]
    top = np.abs(array).max(axis=axes, keepdims=True)
    np.testing.assert_array_equal(sections[0]["SCAL"].view(np.float32), (top / np.float32(448)).reshape(-1))
    assert (np.abs(restored - array) <= np.maximum(np.abs(array) / 16, top / 2**17) * 1.0001).all()
    assert (np.abs(without_scales(batch, device) - array) > np.abs(array) / 2).mean() > 0.5


def without_scales(batch: codecs.Batch, device: Device) -> np.ndarray:
    """What fp8 without scales makes of the batch's only plane."""
    return codecs.decode(Fp8(), batch, codecs.encode(Fp8(), batch, device), device)[0]


@pytest.mark.parametrize("scale", SCALES)
def test_recorded_errors_are_true(scale: str, cpu: Device) -> None:
    codecs.check_errors(Fp8(scale=scale), codecs.batch_of([codecs.numbers(300, 2, 40, seed=s) for s in range(2)]), cpu)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", codecs.DTYPES)
def test_recorded_errors_have_the_same_bits_everywhere(element: str, scale: str, device: Device) -> None:
    """Sums of float32 in one order, whatever has been looked for on the way: rows with NaN, rows that overflow, planes
    of unequal length, idle lanes. What was infinite and no longer is counts as infinite.
    """
    arrays = [codecs.numbers(tokens, 3, 52, element, seed=tokens) for tokens in (70, 31, 40)]
    arrays[0][9, 0, 3] = np.nan
    arrays[0][50:60, 1] *= 500
    arrays[2][33, 2, 51] = -np.inf
    batch = codecs.batch_of(arrays)
    codec = Fp8(scale=scale)
    encoded = codec.encode(codecs.Batch(batch.blocks, [device.to_device(array) for array in arrays]), device)
    for array, one in zip(arrays, encoded, strict=True):
        (errors,) = one.errors
        found = (errors.squared_error, errors.energy, errors.max_abs)
        assert found == expected_errors(array, codecs.on_host(device, one), codec)


def check_codes(codec: Fp8, array: np.ndarray, device: Device) -> None:
    """The codes are the oracle's for the numbers, divided by their scales where there are any."""
    (sections,) = codecs.encode(codec, codecs.batch_of([array]), device)
    scaled = array
    if "SCAL" in sections:
        scaled = array / sections["SCAL"].view(np.float32)[:, None, None]
    with np.errstate(invalid="ignore"):
        expected = oracle.encode(scaled, codec.dtype, codec.saturate)
    np.testing.assert_array_equal(sections["DATA"], expected.reshape(-1))


def edges(dtype: str) -> np.ndarray:
    """The numbers of a format and the middles between them, ascending; float32."""
    values = oracle.value_table(dtype)[:0x80]
    values = values[np.isfinite(values)]
    return np.sort(np.concatenate([values, (values[1:] + values[:-1]) / 2])).astype(np.float32)


def neighbours(numbers: np.ndarray) -> np.ndarray:
    """Those up to three steps away from positive float32 numbers, too."""
    bits = numbers.view(np.int32) + np.arange(-3, 4, dtype=np.int32)[:, None]
    return bits[(bits >= 0) & (bits < 0x7F800000)].view(np.float32)


def rows(numbers: np.ndarray) -> np.ndarray:
    """A plane of at least these numbers: one head of 64."""
    return np.resize(numbers, (-(-numbers.size // 64), 1, 64))


def expected_errors(array: np.ndarray, sections: dict[str, np.ndarray], codec: Fp8) -> tuple[float, float, float]:
    """Squared error, energy (of whatever is finite) and largest error."""
    scales = np.ones((1, 1), np.float32)
    if "SCAL" in sections:
        tokens = len(array) if codec.scale == "token" else 1
        scales = sections["SCAL"].view(np.float32).reshape(tokens, -1)
    codes = sections["DATA"].reshape(array.shape) & 0x7F
    numbers = np.abs(array.astype(np.float32))
    with np.errstate(invalid="ignore", over="ignore"):
        restored = (oracle.decode(codes, codec.dtype) * scales[..., None]).astype(array.dtype).astype(np.float32)
        difference = np.abs(restored - numbers)
    difference = np.where((restored == numbers) | np.isnan(numbers), np.float32(0), difference)
    energy = np.where(np.isfinite(numbers), numbers, np.float32(0))
    totals = [
        math.fsum(float(strip_sums(roots[start : start + TILE])) for start in range(0, len(array), TILE))
        for roots in (difference, energy)
    ]
    return totals[0], totals[1], float(difference.max())


def strip_sums(roots: np.ndarray) -> np.float32:
    """The sum of a tile's squares: channel by channel, then 128 neighbours as a tree, then strip by strip."""
    flat = roots.reshape(len(roots), -1)
    channels = np.zeros(-(-flat.shape[1] // 128) * 128, np.float32)
    for row in flat:
        channels[: row.size] = fused(row, row, channels[: row.size])
    tree = channels.reshape(-1, 128)
    while tree.shape[1] > 1:
        tree = tree[:, ::2] + tree[:, 1::2]
    total = np.float32(0)
    for strip in tree[:, 0]:
        total += strip
    return total


def test_hostile_sections_are_reported(device: Device) -> None:
    """A section of the wrong length is an error; any bytes of the right length are numbers."""
    assert codecs.check_hostile(Fp8(scale="token"), codecs.batch_of([codecs.numbers(40, 2, 24)]), device) > 10


def test_configuration_round_trip() -> None:
    for codec in (Fp8(), Fp8(dtype="float8_e5m2", scale="head", saturate=True)):
        codecs.check_config(codec, codecs.batch_of([codecs.numbers(4, 1, 8)]))


@pytest.mark.parametrize("options", [{"dtype": "float8"}, {"scale": "row"}])
def test_bad_options_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="must be one of"):
        Fp8(**options)
