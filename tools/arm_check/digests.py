"""Hashes of what every codec writes and restores on this processor: ``python -m tools.arm_check.digests``."""

from __future__ import annotations

import hashlib
import json
import sys

import ml_dtypes
import numpy as np

import kvzip
from kvzip.codecs import available_codecs, get_codec
from kvzip.devices.base import Device
from kvzip.devices.cpu import Cpu
from kvzip.errors import UnsupportedError, UsageError

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
GEOMETRIES = ((1, 1, 1), (33, 2, 80), (130, 1, 33), (300, 3, 64))
"""Tokens, heads and head_dim."""

OPTIONS = ("cachegen:level=9,sinks=3", "cachegen:coder=range", "fp8:scale=head", "fp8:dtype=float8_e5m2,scale=token")


def digests() -> dict[str, str]:
    """By codec, dtype and geometry: a hash of the file and of the numbers that come back from it."""
    device = Cpu(threads=1)
    found = {}
    for spec in (*available_codecs(), *OPTIONS):
        try:
            get_codec(spec)
        except (UnsupportedError, UsageError):
            continue
        for dtype in DTYPES:
            for geometry in GEOMETRIES:
                found[f"{spec} {dtype} {geometry}"] = digest(spec, dtype, geometry, device)
    return found


def digest(spec: str, dtype: str, geometry: tuple[int, int, int], device: Device) -> str:
    """Numbers are made from integers: random floats may differ between processors."""
    rng = np.random.default_rng(geometry[0])
    arrays = {
        f"layers.{layer}.{kind}": (rng.integers(-(1 << 20), 1 << 20, geometry) / 2**17).astype(DTYPES[dtype])
        for layer in range(2)
        for kind in ("key", "value")
    }
    arrays["layers.1.key"].reshape(-1)[::37] = np.nan
    packed = kvzip.compress(arrays, codec=spec, layout="T,H,D", device=device)
    restored = kvzip.decompress(packed, device=device)
    content = b"".join(restored[name].tobytes() for name in sorted(restored))
    return f"{hashlib.sha256(packed).hexdigest()[:16]} {hashlib.sha256(content).hexdigest()[:16]}"


if __name__ == "__main__":
    json.dump(digests(), sys.stdout, indent=0)
