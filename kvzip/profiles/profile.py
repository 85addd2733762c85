"""A profile: what is learned once per model and shared by many files.

Stored as safetensors. The metadata ``kvzip`` is a JSON object: format, model, geometry, RoPE, steps, what was seen in
training. Group g has the tensors ``g.mean`` float32 ``[n]``, ``g.vectors`` int8 or bfloat16 ``[r, n]``, ``g.scales``
and ``g.deviations`` float32 ``[r]``. The hash of all of it is the profile's name in the files that need it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (safetensors reads bfloat16 only if numpy knows it)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from kvzip.errors import CorruptError, UnsupportedError, UsageError
from kvzip.profiles.ropes import Ropes
from kvzip.profiles.scales import power

FORMAT = "kvzip-profile"
VERSION = 1
CUT = 0.3
"""A coefficient whose deviation in training is below this part of the step is not worth its bits."""

LARGEST_WIDTH = 1 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    """Planes of the model: ``layers`` of keys and values, with ``heads`` of ``key_dim`` and ``value_dim`` channels."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Numbers of a token in one layer."""
        return self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a profile was trained on, and what it gains on what it was not.

    ``bits_plain`` and ``bits`` are bits a number at the finest step without and with it; 0 if nothing was held out.
    """

    caches: int = 0
    tokens: int = 0
    held_out: int = 0
    bits_plain: float = 0.0
    bits: float = 0.0


@dataclass(slots=True)
class Group:
    """The basis of neighbouring layers. A token's numbers are, layer by layer, its keys, then its values, all scaled.

    ``vectors[i] * scales[i]`` is the direction of coefficient i, whose deviation in training was ``deviations[i]``.
    """

    layers: tuple[int, ...]
    mean: np.ndarray
    vectors: np.ndarray
    scales: np.ndarray
    deviations: np.ndarray

    @property
    def rank(self) -> int:
        return len(self.vectors)

    def rank_at(self, step: int, cut: float = CUT) -> int:
        """How many coefficients are worth coding at a step index: the first ones, as deviations fall."""
        return int((self.deviations > np.float32(cut) * power(step)).sum())

    def matrix(self, rank: int) -> np.ndarray:
        """The first directions as float32 ``[rank, n]``."""
        directions: np.ndarray = self.vectors[:rank].astype(np.float32) * self.scales[:rank, None]
        return directions


@dataclass(frozen=True)
class Profile:
    """Everything that a codec needs to know about a model.

    ``key_exponents`` are the layers' key scales in 1/256 octaves, ``step`` the index of the finest step that the ranks
    serve.
    """

    model: str
    geometry: Geometry
    ropes: Ropes
    key_exponents: tuple[int, ...]
    groups: list[Group]
    step: int
    seen: Seen = field(default_factory=Seen)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the content, in hexadecimal; the same whatever the order of tensors in a file."""
        digest = hashlib.sha256(json.dumps(self._metadata(), sort_keys=True).encode())
        for name, tensor in sorted(self._tensors().items()):
            digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
            digest.update(tensor.tobytes())
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def group_of(self, layer: int) -> Group:
        """The group of a layer. Raises ``UsageError`` if the model has no such layer."""
        for group in self.groups:
            if layer in group.layers:
                return group
        raise UsageError(
            f"the profile of {self.model or 'a model'} has {self.geometry.layers} layers, the cache has layer {layer}: "
            "it is for another model",
            code="profile-geometry",
        )

    def check(self, geometry: Geometry) -> None:
        """Raises ``UsageError`` unless a cache of this geometry can be coded."""
        if geometry != self.geometry:
            raise UsageError(
                f"the profile of {self.model or 'a model'} is for {self.geometry}, the cache is {geometry}: "
                "train one on caches of the same model",
                code="profile-geometry",
            )

    def write(self, path: Path) -> None:
        path.write_bytes(self.to_bytes())

    def to_bytes(self) -> bytes:
        text = json.dumps({**self._metadata(), "hash": self.hash}, sort_keys=True)
        return bytes(save(self._tensors(), metadata={"kvzip": text}))

    def _metadata(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "geometry": asdict(self.geometry),
            "rope": self.ropes.to_json(),
            "key_exponents": list(self.key_exponents),
            "groups": [list(group.layers) for group in self.groups],
            "step": self.step,
            "seen": asdict(self.seen),
        }

    def _tensors(self) -> dict[str, np.ndarray]:
        names = ("mean", "vectors", "scales", "deviations")
        return {
            f"{i}.{name}": np.ascontiguousarray(getattr(group, name))
            for i, group in enumerate(self.groups)
            for name in names
        }


def read(path: Path) -> Profile:
    """Read and check a profile.

    Raises:
        UsageError: there is no such file.
        CorruptError: it is no profile, or is damaged.
        UnsupportedError: a later kvzip made it.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get("kvzip")
            tensors = {name: file.get_tensor(name) for name in file.keys()} if text else {}  # noqa: SIM118  (no mapping)
    except OSError as error:
        raise UsageError(f"cannot read the profile {path}: {error}", code="profile-missing") from error
    except (SafetensorError, ValueError, TypeError) as error:
        raise CorruptError(f"{path} is no profile: {error}", code="profile-format") from error
    return _parse(text, tensors, str(path))


def from_bytes(data: bytes, name: str) -> Profile:
    """What :meth:`Profile.to_bytes` made, checked; messages call it ``name``. Raises as :func:`read`."""
    try:
        length = int.from_bytes(data[:8], "little")
        text = json.loads(data[8 : 8 + length]).get("__metadata__", {}).get("kvzip")
        tensors = load(data) if text else {}
    except (SafetensorError, AttributeError, ValueError, TypeError) as error:
        raise CorruptError(f"{name} is no profile: {error}", code="profile-format") from error
    return _parse(text, tensors, name)


def _parse(text: str | None, tensors: Mapping[str, np.ndarray], name: str) -> Profile:
    if text is None:
        raise CorruptError(f"{name} is a safetensors file but no profile of kvzip", code="profile-format")
    try:
        return _build(json.loads(text), tensors)
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise CorruptError(f"the profile {name} is damaged: {error}", code="profile-damaged") from error


def _build(data: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Profile:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}")
    if data["version"] != VERSION:
        raise UnsupportedError(
            f"the profile has version {data['version']}, this kvzip reads {VERSION}: install a later one",
            code="profile-version",
        )
    geometry = Geometry(**data["geometry"])
    groups = [
        Group(tuple(layers), *(tensors[f"{i}.{name}"] for name in ("mean", "vectors", "scales", "deviations")))
        for i, layers in enumerate(data["groups"])
    ]
    profile = Profile(
        model=str(data["model"]),
        geometry=geometry,
        ropes=Ropes.from_json(data["rope"]),
        key_exponents=tuple(map(int, data["key_exponents"])),
        groups=groups,
        step=int(data["step"]),
        seen=Seen(**data["seen"]),
    )
    _check(profile)
    if profile.hash != data["hash"]:
        raise ValueError(f"its content hashes to {profile.hash[:16]}, it says {str(data['hash'])[:16]}")
    return profile


def _check(profile: Profile) -> None:
    geometry = profile.geometry
    if geometry.layers < 1 or not 0 < geometry.width <= LARGEST_WIDTH:
        raise ValueError(f"geometry {geometry}")
    if len(profile.key_exponents) != geometry.layers or any(abs(e) > 1 << 15 for e in profile.key_exponents):
        raise ValueError("one key scale a layer is needed")
    if [layer for group in profile.groups for layer in group.layers] != list(range(geometry.layers)):
        raise ValueError("the groups do not cover the layers in order")
    for number, group in enumerate(profile.groups):
        _check_group(number, group, len(group.layers) * geometry.width)


def _check_group(number: int, group: Group, width: int) -> None:
    shapes = {"mean": (width,), "vectors": (group.rank, width), "scales": (group.rank,), "deviations": (group.rank,)}
    types: dict[str, Sequence[str]] = dict.fromkeys(shapes, ("float32",)) | {"vectors": ("int8", "bfloat16")}
    for name, shape in shapes.items():
        tensor = getattr(group, name)
        if tensor.shape != shape or tensor.dtype.name not in types[name]:
            raise ValueError(
                f"{number}.{name} is {tensor.dtype} {list(tensor.shape)}, not {types[name][0]} {list(shape)}"
            )
        if not np.isfinite(tensor.astype(np.float32)).all():
            raise ValueError(f"{number}.{name} holds NaN or Inf")
    if group.rank > width or (group.deviations < 0).any() or (np.diff(group.deviations) > 0).any():
        raise ValueError(f"the deviations of group {number} do not fall")
