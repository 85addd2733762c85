"""The codec: presets, which layers are apart, and which method codes which plane."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch, Codec, Encoded, Sections
from kvzip.codecs.fp8 import Fp8
from kvzip.codecs.options import suggest
from kvzip.codecs.raw import Raw
from kvzip.codecs.turboquant.rotation import MAX_HEAD_DIM
from kvzip.codecs.turboquant.slots import Slots
from kvzip.codecs.turboquant.tuned import Tuned
from kvzip.devices.base import Device
from kvzip.devices.descriptors import has_numbers
from kvzip.errors import CorruptError, UsageError


@dataclass(frozen=True, slots=True)
class Preset:
    """Bits of a key (8: an fp8 cast, or when tuned an index) and of a value."""

    key_bits: int
    value_bits: int


PRESETS = {
    "turboquant_k8v4": Preset(8, 4),
    "turboquant_4bit_nc": Preset(4, 4),
    "turboquant_k3v4_nc": Preset(3, 4),
    "turboquant_3bit_nc": Preset(3, 3),
}

MIN_PIECE = 32


class Method(Protocol):
    """What codes the rows of one kind of plane."""

    def bound(self, block: Block) -> int: ...
    def encode(self, batch: Batch, device: Device) -> list[Encoded]: ...
    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None: ...


class TurboQuant(Codec):
    """Keys and values in 3 or 4 bits a number, without calibration.

    Args:
        preset: ``turboquant_k8v4``, ``turboquant_4bit_nc``, ``turboquant_k3v4_nc`` or ``turboquant_3bit_nc``, with or
            without ``turboquant_``.
        tuned: fewer bits for the same error, in bytes that are not LMCache's.
        sinks: how many of the oldest tokens of the file to keep exact when tuned, 1 if not told; 0 for a chunk from the
            middle of a prompt.
        skip_first_layers, skip_last_layers: layers kept raw, or in 8 bits when tuned.
        block_size: tokens of a block of slots in LMCache's object; of no consequence in kvzip's own files.
        head_dim: channels of a head, for files that do not tell: it cuts planes of one head. Without it planes of one
            head longer than 256 are cut to the largest divisor that is not.
        layers: of the whole cache; found out by :meth:`bind`.

    Raises:
        UsageError: an unknown preset, or a number out of range.
    """

    name = "turboquant"
    found = ("layers",)

    def __init__(
        self, *, preset: str = "turboquant_k8v4", tuned: bool = True, sinks: int | None = None,
        skip_first_layers: int = 2, skip_last_layers: int = 2, block_size: int = 16, head_dim: int | None = None,
        layers: int | None = None,
    ) -> None:  # fmt: skip
        self.preset = preset if preset in PRESETS else f"turboquant_{preset}"
        if self.preset not in PRESETS:
            hint = suggest(self.preset, PRESETS)
            raise UsageError(
                f"turboquant: preset must be one of {', '.join(PRESETS)}, got {preset!r}{hint}", code="codec-option"
            )
        limits = {
            "sinks": 0, "skip_first_layers": 0, "skip_last_layers": 0, "block_size": 1, "head_dim": 1, "layers": 1,
        }  # fmt: skip
        given = (sinks, skip_first_layers, skip_last_layers, block_size, head_dim, layers)
        for (option, least), value in zip(limits.items(), given, strict=True):
            if value is not None and value < least:
                raise UsageError(f"turboquant: {option} must be a number from {least} on, got {value}")
        if sinks and not tuned:
            raise UsageError(
                "turboquant: sinks must be 0 with tuned=false, which quantizes every token as LMCache does"
            )
        self.tuned = tuned
        self.sinks = int(tuned) if sinks is None else sinks
        self.skip_first_layers = skip_first_layers
        self.skip_last_layers = skip_last_layers
        self.block_size = block_size
        self.head_dim = head_dim
        self.layers = layers

    def config(self) -> dict[str, Any]:
        names = ("preset", "tuned", "skip_first_layers", "skip_last_layers", "block_size", "head_dim", "layers")
        config = {name: value for name in names if (value := getattr(self, name)) is not None}
        return config | ({"sinks": self.sinks} if self.sinks else {})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Where it says nothing of sinks, there are none: the default is for who compresses."""
        return cls(**{"sinks": 0, **config})

    def bind(self, planes: Sequence[Plane]) -> Self:
        layers = self.layers or max((plane.layer for plane in planes), default=0) + 1
        return self.from_config({**self.config(), "layers": layers})

    @classmethod
    def ladder(cls) -> list[str]:
        presets = [name.removeprefix("turboquant_") for name in PRESETS]
        return ["", *(f"preset={name}" for name in presets[1:]), *(f"preset={name},tuned=false" for name in presets)]

    def supports(self, plane: Plane) -> bool:
        if not has_numbers(plane):
            return False
        rows = self._rows(plane)
        if rows is None:
            raise UsageError(
                f"turboquant: head_dim {self.head_dim} does not fit {plane}, which has {plane.heads} heads of "
                f"{plane.head_dim}; leave it out, or give a divisor of {plane.head_dim}", code="codec-option",
            )  # fmt: skip
        # Cut to pieces too small a row of a prime length has nothing to rotate.
        return rows.head_dim <= MAX_HEAD_DIM and (rows.head_dim >= MIN_PIECE or rows == plane)

    def describe(self, plane: Plane) -> dict[str, Any]:
        if self._is_boundary(plane):
            return {"bits": 8 if self.tuned else plane.itemsize * 8}
        return {"bits": self._bits(plane)}

    def row_sections(self, plane: Plane) -> dict[str, int]:
        """The sections of LMCache's bytes that rows of a plane have (not ``tuned``), and how many bytes of each."""
        method = self._method(plane)
        return method.row_sections(plane.head_dim) if isinstance(method, Slots) else {"DATA": plane.head_dim}

    def bound(self, block: Block) -> int:
        return self._method(block.plane).bound(self._cut(block))

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        encoded: dict[int, Encoded] = {}
        for method, members, part in self._parts(batch):
            encoded.update(zip(members, method.encode(part, device), strict=True))
        return [encoded[i] for i in range(len(batch.blocks))]

    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        for method, members, part in self._parts(batch):
            method.decode(part, [sections[i] for i in members], device)

    def _parts(self, batch: Batch) -> Iterator[tuple[Method, list[int], Batch]]:
        """The batch by methods, its heads cut as ``head_dim`` says; the numbers are those of its blocks."""
        members: dict[Method, list[int]] = {}
        for i, block in enumerate(batch.blocks):
            members.setdefault(self._method(block.plane), []).append(i)
        for method, numbers in members.items():
            blocks = [self._cut(batch.blocks[i]) for i in numbers]
            shapes = [(block.tokens, block.plane.heads, block.plane.head_dim) for block in blocks]
            # A plane of one head has contiguous channels: cutting them makes a view.
            arrays = [batch.arrays[i].reshape(shape) for i, shape in zip(numbers, shapes, strict=True)]
            yield method, numbers, Batch(blocks, arrays)

    def _method(self, plane: Plane) -> Method:
        if self.tuned:
            bits = 8 if self._is_boundary(plane) else self._bits(plane)
            return Tuned(bits, keep_norm=plane.kind != "value", sinks=self.sinks)
        if self._is_boundary(plane):
            return _RAW
        if self._bits(plane) == 8:
            return _CAST
        return Slots("values" if plane.kind == "value" else "keys", self._bits(plane))

    def _bits(self, plane: Plane) -> int:
        preset = PRESETS[self.preset]
        return preset.value_bits if plane.kind == "value" else preset.key_bits

    def _is_boundary(self, plane: Plane) -> bool:
        if self.layers is None:
            raise ValueError("bind() the codec to a cache first")
        return plane.layer < self.skip_first_layers or plane.layer >= self.layers - self.skip_last_layers

    def _rows(self, plane: Plane) -> Plane | None:
        """The plane with its heads cut as ``head_dim`` says, or to what kernels take; None where that cannot be."""
        head_dim = self.head_dim or (_divisor(plane.head_dim) if plane.heads == 1 else plane.head_dim)
        heads, rest = divmod(plane.channels, head_dim)
        if rest or (head_dim != plane.head_dim and plane.heads > 1):
            return None
        return replace(plane, heads=heads, head_dim=head_dim)

    def _cut(self, block: Block) -> Block:
        rows = self._rows(block.plane)
        if rows is None or rows.head_dim > MAX_HEAD_DIM:
            raise CorruptError(
                f"{block.plane}: the codec's head_dim {self.head_dim} does not fit", code="corrupt-block"
            )
        return replace(block, planes=(rows,))


def _divisor(head_dim: int) -> int:
    """The largest divisor that kernels take."""
    return max(size for size in range(1, min(head_dim, MAX_HEAD_DIM) + 1) if head_dim % size == 0)


_RAW: Method = Raw()
_CAST: Method = Fp8(dtype="float8_e4m3fn")
