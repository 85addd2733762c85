"""Arithmetic of warp.h that every processor must do alike."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from kvzip.devices import build
from kvzip.devices import cpu as cpu_module
from kvzip.devices.cpu import Cpu
from kvzip.devices.levels import runnable_levels
from tests.reference import arithmetic as oracle

HOST = build.Target.host()


@pytest.fixture(scope="module")
def fused_kernel(tmp_path_factory: pytest.TempPathFactory):
    """The device made to load a kernel that calls ``fused`` of ``warp.h``."""
    sources = tmp_path_factory.mktemp("arithmetic")
    for header in build.kernel_sources().glob("warp*.h"):
        (sources / header.name).write_bytes(header.read_bytes())
    (sources / "arithmetic.cu").write_text("""
#include "warp.h"
KERNEL(fused_numbers, const u32* a, const u32* b, const u32* c, u32* result) {
  FOR_EACH_WARP(warp) {
    auto load = [=](const u32* p) { return as_float(load_u32(p + warp * LANES)); };
    store_u32(result + warp * LANES, as_bits(fused(load(a), load(b), load(c))));
  }
}
""")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "NATIVE", sources)
        patch.setattr(build, "kernel_sources", lambda: sources)
        cpu_module._load.cache_clear()
        yield
    cpu_module._load.cache_clear()


def rounded(exact: Fraction) -> np.float32:
    """The float32 nearest to a number within its range, ties to even."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


@pytest.mark.usefixtures("fused_kernel")
@pytest.mark.parametrize("level", runnable_levels(HOST))
def test_a_fused_multiply_add_rounds_once_at_every_level(level: str) -> None:
    """Promise: with the instruction or without it, down to subnormal numbers, where products cancel, and at ties."""
    random = np.random.default_rng(5)
    a, b = (
        random.standard_normal((6, 512)).astype(np.float32) * np.float32(2.0) ** random.integers(-9, 9, (6, 512))
        for _ in "ab"
    )
    c = random.standard_normal((6, 512)).astype(np.float32)
    c[1] = -(a[1] * b[1])  # what rounding the product would lose
    a[2:4] *= np.float32(2.0) ** -70
    b[2:4] *= np.float32(2.0) ** -66
    c[2] = 0
    c[3] *= np.float32(2.0) ** -140
    a[4], b[4], c[4] = 1 + 2.0**-12, 1 + 2.0**-12, random.integers(-(2**12), 2**12, 512) * 2.0**-12
    a[5], b[5] = 2.0**-24 * (1 + 2.0**-15), 1 - 2.0**-15  # just below a tie of c, which float64 cannot tell from one
    c[5] = 1 + random.integers(0, 2**20, 512) * 2.0**-22
    a, b, c = (x.astype(np.float32).reshape(-1) for x in (a, b, c))
    expected = [
        rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)
    ]
    result = np.zeros(a.size, np.float32)
    Cpu(1, level).launch("fused_numbers", a.size // 32, *(x.view(np.uint32) for x in (a, b, c)), result.view(np.uint32))
    np.testing.assert_array_equal(result, np.array(expected))
    np.testing.assert_array_equal(oracle.fused(a, b, c), result)

    special = np.array([np.inf, np.inf, np.nan, 3e38, -3e38, 1.0, 0.0, -0.0], np.float32).repeat(4)
    other = np.array([0, 1, 2, -np.inf, 3e38, np.nan, -0.0, 0.0], np.float32).repeat(4)
    third = np.array([1, -np.inf, np.inf, -0.0] * 8, np.float32)
    result = np.zeros(32, np.float32)
    Cpu(1, level).launch(
        "fused_numbers", 1, *(x.view(np.uint32) for x in (special, other, third)), result.view(np.uint32)
    )
    with np.errstate(all="ignore"):
        expected = (special.astype(np.float64) * other + third).astype(np.float32)
    np.testing.assert_array_equal(result, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(result[number]), np.signbit(expected[number]))
