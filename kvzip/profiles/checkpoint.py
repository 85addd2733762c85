"""Groups that a training run has finished, kept so that a run that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  (safetensors reads bfloat16 only if numpy knows it)
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from kvzip.profiles.profile import Group

if TYPE_CHECKING:
    from kvzip.profiles.train import Options


@dataclass(slots=True)
class Learned:
    """A finished group, its layers' key exponents, and the bits that its held-out tokens take without and with it."""

    group: Group
    exponents: list[int]
    bits_plain: float
    bits: float


def mark(inputs: list[Any], ropes: dict[str, Any], options: Options) -> bytes:
    """What tells apart runs with other inputs or options: 32 bytes."""
    return hashlib.sha256(json.dumps([inputs, ropes, asdict(options)]).encode()).digest()


def keep(path: Path, learned: Learned, mark: bytes) -> None:
    """Write a group; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: getattr(learned.group, name) for name in ("mean", "vectors", "scales", "deviations")}
    tensors["exponents"] = np.array(learned.exponents, np.int64)
    tensors["bits"] = np.array([learned.bits_plain, learned.bits])
    tensors["mark"] = np.frombuffer(mark, np.uint8)
    unfinished = path.with_suffix(".partial")
    save_file(tensors, unfinished)
    unfinished.replace(path)


def resume(path: Path, mark: bytes, layers: tuple[int, ...]) -> Learned | None:
    """The group that an earlier run of the same mark kept at ``path``, if there is one."""
    try:
        tensors = load_file(path)
        if tensors["mark"].tobytes() != mark:
            return None
        group = Group(layers, *(tensors[name] for name in ("mean", "vectors", "scales", "deviations")))
        return Learned(group, tensors["exponents"].tolist(), float(tensors["bits"][0]), float(tensors["bits"][1]))
    except (SafetensorError, KeyError, OSError, ValueError):
        return None
