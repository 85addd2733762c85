"""Float32 arithmetic that numpy has no operation for."""

from __future__ import annotations

import numpy as np


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` of float32 arrays, rounded once to float32.

    In float64 the product is exact and the sum rounded to odd, which rounds to float32 as the exact one does
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Transactions on Computers 57, 2008).
    """
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        product, addend = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
        total = product + addend
        back = total - product
        lost = (product - (total - back)) + (addend - back)
        inexact = (lost < 0) | (lost > 0)
        odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
        even = total.view(np.int64) & 1 == 0
        return np.where(inexact & even, odd, total).astype(np.float32)
