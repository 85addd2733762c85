"""A whole source as planes, and what a ``.kvz`` stores of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from kvzip.cache import Plane
from kvzip.errors import CorruptError, KvzipError
from kvzip.layouts.axes import parse_axes, spell
from kvzip.layouts.slabs import Role, Slab, TensorMap, planes_of
from kvzip.tensorfile import TAGS, TensorInfo

MAX_AXES = 16
"""More axes than any declaration has: beyond that, a shape is hostile."""

__all__ = ["CacheMap", "Role", "Slab", "TensorMap"]


@dataclass(frozen=True, slots=True)
class CacheMap:
    """A whole source as planes.

    Attributes:
        layout: the layout's name or its declaration.
        maps: one per tensor, in file order.
        notices: what a user should be told, one sentence each.
    """

    layout: str
    maps: tuple[TensorMap, ...]
    notices: tuple[str, ...] = ()

    @property
    def planes(self) -> tuple[Plane, ...]:
        """All planes; ``planes[i].index == i``."""
        return tuple(plane for tensor_map in self.maps for plane in tensor_map.planes)

    @classmethod
    def build(
        cls, layout: str, tensors: Sequence[TensorInfo], roles: Sequence[Role | None], notices: Sequence[str] = ()
    ) -> CacheMap:
        """Number the planes of tensors in their roles. Raises ``UsageError`` where axes and shape do not fit."""
        maps: list[TensorMap] = []
        first = 0
        for tensor, role in zip(tensors, roles, strict=True):
            planes = tuple(planes_of(tensor, role, first))
            maps.append(TensorMap(tensor, role, planes))
            first += len(planes)
        return cls(layout, tuple(maps), tuple(notices))

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` needs to build the map again, besides the tensors themselves."""
        axes = sorted({spell(tensor_map.axes) for tensor_map in self.maps if tensor_map.role})
        roles = [tensor_map.role for tensor_map in self.maps]
        raw = {
            str(tensor.file): {"dtype": tensor.dtype, "shape": list(tensor.shape)}
            for tensor in (tensor_map.tensor for tensor_map in self.maps if tensor_map.role)
            if not tensor.offset
        }
        return {
            "layout": self.layout,
            "axes": axes,
            "tensors": [
                role and [axes.index(spell(role.axes)), role.layer, role.kind, role.heads, role.sequence]
                for role in roles
            ],
            **({"raw": raw} if raw else {}),
        }

    @classmethod
    def from_json(cls, obj: Any, tensors: Sequence[TensorInfo]) -> CacheMap:
        """The map that :meth:`to_json` told of, for the tensors that the source's headers declare.

        Raises ``CorruptError`` for anything that does not fit the tensors: both come from a file.
        """
        try:
            return cls.build(str(obj["layout"]), *_roles_from_json(obj, tensors))
        except (AttributeError, LookupError, TypeError, ValueError, KvzipError) as error:
            raise CorruptError(f"the stored layout does not fit its tensors: {error}", code="layout-map") from error


def _roles_from_json(obj: Any, tensors: Sequence[TensorInfo]) -> tuple[list[TensorInfo], list[Role | None]]:
    axes = [parse_axes(text) for text in obj["axes"]]
    roles: list[Role | None] = []
    for entry in obj["tensors"]:
        if entry is None:
            roles.append(None)
            continue
        number, layer, kind, heads, sequence = entry
        if kind not in (None, "key", "value", "latent") or not all(
            type(value) is int and 0 <= value < 2**31 for value in (number, layer, heads, sequence)
        ):
            raise ValueError(f"tensor entry {entry!r}")
        roles.append(Role(axes[number], layer, kind, heads, sequence))
    raw = obj.get("raw", {})
    return [_as_raw(tensor, raw.get(str(tensor.file))) for tensor in tensors], roles


def _as_raw(tensor: TensorInfo, declared: Any) -> TensorInfo:
    """A tensor of raw bytes with the shape and dtype that its map tells."""
    if declared is None:
        return tensor
    shape, dtype = declared["shape"], declared["dtype"]
    sound = isinstance(shape, list) and len(shape) <= MAX_AXES and all(type(n) is int and n >= 0 for n in shape)
    if tensor.offset or dtype not in TAGS or not sound:
        raise ValueError(f"raw tensor {declared!r}")
    if prod(shape) * np.dtype(dtype).itemsize != tensor.nbytes:
        raise ValueError(f"raw tensor {declared!r} in a file of {tensor.nbytes} bytes")
    return replace(tensor, tag=TAGS[dtype], dtype=dtype, shape=tuple(shape))
