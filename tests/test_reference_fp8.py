"""The fp8 oracle, on which other tests lean, agrees with LMCache and, inside its range, with ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.reference import fp8, golden


@pytest.mark.parametrize("name", golden.names("fp8"))
def test_oracle_has_lmcaches_bytes(name: str) -> None:
    case = golden.load_case(name)
    fmt = case.options["fp8_dtype"]
    assert fp8.encode(case.input, fmt).tobytes() == case.encoded
    decoded = fp8.decode(np.frombuffer(case.encoded, np.uint8), fmt).reshape(case.input.shape)
    assert golden.same_bits(decoded.astype(case.decoded.dtype), case.decoded)


@pytest.mark.parametrize("fmt", fp8.FORMATS)
def test_oracle_rounds_every_float16_as_ml_dtypes_does(fmt: str) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    largest = np.float32(ml_dtypes.finfo(fmt).max)
    values = values[np.abs(values.astype(np.float32)) <= largest]
    assert np.array_equal(fp8.encode(values, fmt), values.astype(fmt).view(np.uint8))


@pytest.mark.parametrize("fmt", fp8.FORMATS)
def test_every_code_survives_the_way_there_and_back(fmt: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = fp8.decode(codes, fmt)
    kept = np.isfinite(values)
    assert np.array_equal(fp8.encode(values, fmt)[kept], codes[kept])
    assert np.isnan(fp8.decode(fp8.encode(values, fmt), fmt)[np.isnan(values)]).all()


@pytest.mark.parametrize("fmt", fp8.FORMATS)
def test_saturation_is_explicit_and_keeps_nan(fmt: str) -> None:
    largest = float(ml_dtypes.finfo(fmt).max)
    x = np.array([np.inf, -np.inf, 3e38, -3e38, np.nan], np.float32)
    decoded = fp8.decode(fp8.encode(x, fmt, saturate=True), fmt)
    assert decoded[:4].tolist() == [largest, -largest, largest, -largest]
    assert np.isnan(decoded[4])
