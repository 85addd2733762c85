"""The frozen files under ``tests/golden/lmcache``: what LMCache itself wrote and read back."""

from __future__ import annotations

import functools
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

FOLDER = Path(__file__).parent.parent / "golden" / "lmcache"


@dataclass(frozen=True)
class Case:
    """One run of LMCache: its options as in ``case.json``, the cache it was given, its file, and what it read back."""

    name: str
    options: dict[str, Any]
    input: np.ndarray
    encoded: bytes
    decoded: np.ndarray


def names(codec: str) -> list[str]:
    """The cases of ``cachegen``, ``fp8`` or ``turboquant``, sorted: for ``pytest.mark.parametrize``."""
    return sorted(path.parent.name for path in FOLDER.glob(f"{codec}*/case.json"))


def _load(path: Path) -> np.ndarray:
    """The only tensor of a compressed safetensors file."""
    data = lzma.decompress(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + size])["kv"]
    dtype = {"BF16": ml_dtypes.bfloat16, "F16": np.float16}[entry["dtype"]]
    return np.frombuffer(data[8 + size :], dtype).reshape(entry["shape"])


@functools.cache
def load_case(name: str) -> Case:
    folder = FOLDER / name
    options = json.loads((folder / "case.json").read_text())
    return Case(
        name,
        options,
        _load(FOLDER / "inputs" / f"{options['input']}.safetensors.xz"),
        lzma.decompress((folder / "encoded.bin.xz").read_bytes()),
        _load(folder / "decoded.safetensors.xz"),
    )


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays agree in dtype, shape and every bit: -0.0 is not 0.0, and NaN equals itself."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
