"""make gpu-check, of which no CI has the GPU: what it compares and times, on an emulated one."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from kvzip.codecs.fp8 import Fp8
from kvzip.devices.cpu import Cpu
from kvzip.devices.cuda import Cuda
from tools.gpu_check import caches, equality

if sys.platform != "linux":
    pytest.skip("the emulator is for Linux", allow_module_level=True)
from tests.emulator.devices import cuda_on_emulator

SHAPES = [("bfloat16", 40, 2, 24, True), ("float16", 33, 1, 40, False), ("float32", 21, 3, 20, True)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "SHAPES", SHAPES)
    monkeypatch.setattr(equality, "sample_cases", list)
    monkeypatch.setattr(equality, "codec_specs", lambda: ["cachegen", "fp8:scale=head", "raw"])


@pytest.fixture
def gpu() -> Cuda:
    return cuda_on_emulator()


def test_equal_devices_pass(gpu: Cuda, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: no false alarm, on sound and on damaged sections; a row per codec."""
    assert equality.equality(Cpu(1), gpu) == 0
    assert equality.hostile(Cpu(1), gpu, 24) == 0
    assert capsys.readouterr().out.count("| equal |") == 3 + 3


def test_a_wrong_byte_is_found(gpu: Cuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: numbers that differ fail the check, and the block is named."""
    launch = Cuda.launch

    def wrong(self: Cuda, kernel: str, warps: int, *arguments: object) -> None:
        launch(self, kernel.replace("decode_e4m3fn", "decode_e5m2"), warps, *arguments)

    monkeypatch.setattr(Cuda, "launch", wrong)
    monkeypatch.setattr(equality, "codec_specs", lambda: ["fp8"])
    assert equality.equality(Cpu(1), gpu) > 0
    assert "layer 0 key 0:40: " in capsys.readouterr().out


def test_random_caches_hold_what_is_hard() -> None:
    """Promise: both signs of NaN, infinity, zeros and denormals are compared."""
    numbers = caches.random_cases()[0].arrays[0].astype(np.float32)
    nan = np.isnan(numbers)
    assert np.signbit(numbers[nan]).any() and not np.signbit(numbers[nan]).all() and np.isinf(numbers).any()
    assert (np.abs(numbers[12]) < 2.0**-126).all() and numbers[12].all() and not numbers[7].any()
    assert Fp8().supports(caches.random_cases()[0].planes[0])
