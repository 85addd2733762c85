"""What a codec records of its errors is what a decoder's numbers show, also where single precision cannot count it."""

from __future__ import annotations

import io
import math

import ml_dtypes
import numpy as np
import pytest

import kvzip
from fuzz.decoders import OPTIONS
from kvzip.codecs import BUILT_IN, codec_class
from kvzip.devices.base import Device
from kvzip.inspection import members_of
from kvzip.quality import differences

SPECS = [spec for name in BUILT_IN for spec in OPTIONS.get(name, (name,)) if not codec_class(name).lossless]
KINDS = {"usual": 1, "huge": 1e37, "tiny": 1e-25, "subnormal": 1e-40}


def tensors(factor: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    kinds = [(layer, kind) for layer in range(2) for kind in ("key", "value")]
    return {f"layers.{i}.{kind}": np.float32(rng.standard_normal((2, 70, 32)) * factor) for i, kind in kinds}


def check(given: dict[str, np.ndarray], spec: str, device: Device, block_tokens: int = 1024) -> None:
    """Recorded and real errors agree, as far as sums in single precision can; what is infinite is so in both."""
    file = io.BytesIO()
    report = kvzip.compress(given, file, codec=spec, layout="per-layer", device=device, block_tokens=block_tokens)
    restored = kvzip.decompress(file.getvalue(), device=device)
    assert len(report.errors) == len(given)
    for found in report.errors:
        name = f"layers.{found.plane.layer}.{found.plane.kind}"
        real = differences(given[name], restored[name])
        relative = math.sqrt(real.squared_error / real.energy) if real.energy else 0.0
        assert found.relative == pytest.approx(relative, rel=1e-3), name
        assert found.max_abs == pytest.approx(real.max_abs, rel=1e-3), name
    (member,) = members_of(io.BytesIO(file.getvalue()), "file")
    for found, shown in zip(report.errors, member.errors(), strict=True):
        assert shown.plane.index == found.plane.index
        for number, told in ((found.relative, shown.relative), (found.max_abs, shown.max_abs)):
            assert told == (pytest.approx(number, rel=1e-5) if math.isfinite(number) else None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_numbers_of_any_size_have_their_errors_recorded(spec: str, kind: str, cpu: Device) -> None:
    check(tensors(KINDS[kind]), spec, cpu)


def test_uncounted_errors_are_measured_on_every_device(device: Device) -> None:
    for spec in ("int8", "kvtc"):
        check(tensors(KINDS["tiny"]), spec, device)


def test_tiny_numbers_of_blocks_that_are_kept_whole_count(cpu: Device) -> None:
    """They have no error, but energy, which the relative error of the plane is a part of."""
    check(tensors(1e-30), "kivi:bits=2,residual=38", cpu, block_tokens=32)


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_not_finite_is_kept_or_an_infinite_error(spec: str, cpu: Device) -> None:
    given = tensors()
    given["layers.0.key"][0, 5, 3] = np.inf
    given["layers.1.value"][1, 66, 0] = -np.inf
    given["layers.1.value"][0, 7, 1] = np.nan
    check(given, spec, cpu)


@pytest.mark.filterwarnings("error")
def test_signalling_nan_are_measured_without_a_warning() -> None:
    """numpy warns where it widens them."""
    numbers = np.full((4, 1, 8), 0x7F81, np.uint16).view(ml_dtypes.bfloat16)
    found = differences(numbers, numbers)
    assert (found.squared_error, found.energy, found.max_abs) == (0, 0, 0)
