"""fp8 keeps its promises: the reference's codes, LMCache's bytes, NaN kept, the same bytes everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from kvzip.codecs.fp8 import SCALES, Fp8
from kvzip.devices.base import Device
from kvzip.errors import UsageError
from tests import codecs
from tests.reference import fp8 as oracle
from tests.reference import golden

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
def test_every_bfloat16_gets_the_nearest_code(dtype: str, saturate: bool, device: Device) -> None:
    """All 65536 bit patterns: ties to even, subnormals, overflow, infinities, NaN."""
    array = np.arange(65536, dtype=np.uint16).view(codecs.DTYPES["bfloat16"]).reshape(1024, 1, 64)
    batch = codecs.batch_of([array])
    codec = Fp8(dtype=dtype, saturate=saturate)
    (sections,) = codecs.encode(codec, batch, device)
    expected = oracle.encode(array, dtype, saturate)
    np.testing.assert_array_equal(sections["DATA"], expected.reshape(-1))


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
