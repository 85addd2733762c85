"""kvtc: keys un-rotated, planes scaled, a learned basis, one step for all, entropy coding with per-column statistics.

Keys of a layer share one step, in units of the geometric mean of their channels' deviations; a value's step follows its
token's rms. What decorrelates is a basis learned once per model (a *profile*): without one the codec still beats any
quantizer of equal quality. docs/kvtc.md tells why, docs/format.md how. Each block holds

    TOKN  exact tokens, scales of keys and of values' tokens
    COLS  per 32 columns: alphabet, deviations, means
    STAT  per 32 columns: length of their stream, final states
    STRM  the streams
    ROWS  what exact tokens have beyond the numbers that ride in the start states (16-bit types)
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from kvzip.cache import BLOCK_TOKENS, Block, Plane
from kvzip.codecs.base import Batch, Codec, Encoded, Errors, Read, Sections
from kvzip.codecs.kvtc import columns, tokens
from kvzip.codecs.kvtc.transform import Basis, Transform
from kvzip.coding import rans
from kvzip.coding.sections import SectionReader, as_bytes, corrupt_block, total_errors
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import has_numbers
from kvzip.errors import UsageError
from kvzip.profiles.library import find
from kvzip.profiles.profile import CUT, Geometry
from kvzip.profiles.ropes import Ropes
from kvzip.profiles.scales import power, step_index

LEVEL_5 = 113
"""Step index of level 5: about 2.1 bits an element without a profile, every byte of a file of 1024 tokens counted."""

LEVEL_STEP = 96
STEPS = range(-12 * 256, 12 * 256 + 1)
MAX_TOKENS = 4096
"""Tokens of a block at the most: an escape reaches no farther."""

LARGEST = 1 << 17
"""Multiples of the step beyond which a token is kept exact."""


class KvTc(Codec):
    """Transform coding.

    Args:
        level: 1 to 9, 5 if nothing is told; each finer one has a step smaller by ``2 ** (3 / 8)`` and costs about 0.37
            bits more.
        step: the step itself, in units of values' rms, in place of ``level``.
        bits: bits a number that the file shall take, all counted; the step is searched for, in place of ``level``.
        max_error: relative error that no plane shall exceed; likewise.
        rope: ``"auto"`` finds the keys' rotation in the file, ``"none"``, or a description such as ``"theta=1e6"``.
        profile: path or hash of a trained profile, which has the rotation, too.
        effort: 1 to 9; with a profile, each higher one codes coefficients that are smaller by ``2 ** (1 / 2)``: less
            error at the same step, slower.
        sinks: how many of the oldest tokens of the file to keep exact; 0 for a chunk from the middle of a prompt.
        window: how many of the newest tokens to keep exact.

    Raises:
        UsageError: an option out of range, a rotation or profile that does not fit.
    """

    name = "kvtc"
    found = ("step_at",)

    def __init__(
        self,
        *,
        level: int | None = None,
        step: float | None = None,
        step_at: int | None = None,
        bits: float | None = None,
        max_error: float | None = None,
        rope: str | Mapping[str, Any] = "auto",
        profile: str | os.PathLike[str] | None = None,
        effort: int = 5,
        sinks: int = 1,
        window: int = 0,
    ) -> None:
        if level is not None and not 1 <= level <= 9:
            raise UsageError(f"level must be 1 to 9, got {level}")
        if not 1 <= effort <= 9:
            raise UsageError(f"effort must be 1 to 9, got {effort}")
        if sum(target is not None for target in (level, step, step_at, bits, max_error)) > 1:
            raise UsageError("level, step, bits and max_error exclude each other")
        if bits is not None and not 0 < bits <= 32:
            raise UsageError(f"bits must be above 0, at most 32, got {bits}")
        if max_error is not None and not 0 < max_error < 1:
            raise UsageError(f"max_error must be between 0 and 1, got {max_error}")
        if profile is not None and rope != "auto":
            raise UsageError("a profile has its own rotation: leave out rope")
        if sinks < 0 or window < 0:
            raise UsageError(f"sinks and window must be 0 or more, got {sinks} and {window}")
        if step is not None and not 2.0**-12 <= step <= 2.0**12:
            raise UsageError(f"step must be between 2^-12 and 2^12, got {step}")
        if step_at is None:
            step_at = step_index(step) if step is not None else LEVEL_5 - LEVEL_STEP * ((level or 5) - 5)
        if step_at not in STEPS:
            raise UsageError(f"step_at must be between {STEPS[0]} and {STEPS[-1]}, got {step_at}")
        self.step_at = step_at
        self.bits, self.max_error = bits, max_error
        self.sinks, self.window = sinks, window
        self.effort = effort
        self.ropes = _ropes(rope)
        self.profile = find(profile) if profile is not None else None
        if self.profile is not None:
            self.ropes = self.profile.ropes
        self._bases: dict[tuple[Device, tuple[int, ...]], Basis] = {}

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"step_at": self.step_at, "sinks": self.sinks}
        if self.window:
            config["window"] = self.window
        if self.profile is not None:
            config["profile"] = self.profile.hash
            if self.effort != 5:
                config["effort"] = self.effort
        else:
            config["rope"] = "auto" if self.ropes is None else self.ropes.to_json()
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From a header, which can name a profile by its hash alone: no file of its choice is opened."""
        if "profile" in config and not re.fullmatch("[0-9a-f]{64}", str(config["profile"])):
            raise UsageError("the profile is not named by its hash")
        return cls(**config)

    @property
    def studies(self) -> bool:  # type: ignore[override]  # a constant of other codecs
        return self.ropes is None or self.bits is not None or self.max_error is not None

    def study(
        self, planes: Sequence[Plane], read: Read, notice: Callable[[str], None], block_tokens: int = BLOCK_TOKENS
    ) -> Self:
        """Find the keys' rotation, and the step that gives the rate or error that is asked for."""
        studied = self if self.ropes is not None else self._with(ropes=_found(planes, read, notice))
        if self.bits is not None or self.max_error is not None:
            from kvzip.codecs.kvtc.search import find_step

            found, told = find_step(studied.bind(planes), planes, read, block_tokens)
            notice(f"kvtc: step {power(found):.4g} gives {told}")
            studied = studied._with(step_at=found, bits=None, max_error=None)
        if self.profile is not None and studied.step_at < self.profile.step:
            notice(
                f"kvtc: the profile serves steps from {power(self.profile.step):.3g} on, this one is {_step(studied)}: "
                "what its bases leave out stays lost (train --step)"
            )
        return studied

    def bind(self, planes: Sequence[Plane]) -> Self:
        bound = self if self.ropes is not None else self._with(ropes=Ropes())
        bound._check_rotations(planes)
        if self.profile is not None and planes:
            self.profile.check(_geometry(planes))
        return bound

    def _check_rotations(self, planes: Sequence[Plane]) -> None:
        """Raises ``UsageError`` for keys that cannot have the rotation of their layer."""
        for plane in planes:
            rope = self.ropes.of(plane.layer) if self.ropes is not None and plane.kind == "key" else None
            if rope is not None:
                rope.width(plane.head_dim)

    def with_step(self, step_at: int) -> Self:
        """The same codec with another step."""
        return self._with(step_at=step_at)

    def _with(self, **changes: Any) -> Self:
        """The same codec but for these attributes."""
        other = copy.copy(self)
        other._bases = {}
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    @classmethod
    def ladder(cls) -> list[str]:
        return ["", "level=1", "level=3", "level=7", "level=9"]

    def supports(self, plane: Plane) -> bool:
        return has_numbers(plane)

    def groups(self, planes: Sequence[Plane]) -> list[tuple[Plane, ...]]:
        if self.profile is None:
            return super().groups(planes)
        place = {(plane.sequence, plane.layer, plane.kind): plane for plane in planes}
        found = {(plane.sequence, self.profile.group_of(plane.layer).layers): None for plane in planes}
        return [
            tuple(place[sequence, layer, kind] for layer in layers for kind in ("key", "value"))
            for sequence, layers in sorted(found)
        ]

    def describe(self, plane: Plane) -> dict[str, Any]:
        return {"step": float(f"{float(power(self.step_at)):.4g}")}

    def bound(self, block: Block) -> int:
        if self.profile is not None:
            _geometry(block.planes, self.profile.geometry)
        self._check_rotations(block.planes)
        if block.tokens > MAX_TOKENS:
            raise ValueError(f"a block has at most {MAX_TOKENS} tokens")
        numbers = sum(plane.channels for plane in block.planes)
        section = 4 * (1 + -(-block.tokens // 32) * (1 + 18 * len(block.planes)))
        return columns.bound(block.tokens, -(-numbers // rans.LANES)) + section + block.nbytes + 64

    def basis(self, block: Block, device: Device) -> Basis | None:
        """The basis of a block's planes at this step, on the device; None without a profile."""
        if self.profile is None:
            return None
        group = self.profile.group_of(block.planes[0].layer)
        basis = self._bases.get((device, group.layers))
        if basis is None:
            rank = max(1, group.rank_at(self.step_at, CUT * float(power(128 * (5 - self.effort)))))
            basis = Basis(device.to_device(group.mean), device.to_device(group.matrix(rank)))
            self._bases[device, group.layers] = basis
        return basis

    # ------------------------------------------------------------------------------------------------------- encoding

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        for block in batch.blocks:
            if block.tokens > MAX_TOKENS:
                raise UsageError(f"kvtc codes blocks of at most {MAX_TOKENS} tokens, not {block.tokens}")
        transform = Transform(self, batch, device)
        side = transform.measure()
        blocks = transform.forward(side)
        values = [self._exact_values(batch, i, side.exact[i], device) for i in range(len(batch.blocks))]
        riders = self._riders(batch, blocks, values)
        on_device = device.to_device(riders)
        starts = np.concatenate([[0], np.cumsum(blocks["groups"].astype(np.int64))])[:-1]
        blocks["riders"] = device.address(on_device) + starts * (rans.LANES * 2)
        streams = columns.encode(blocks, device)
        errors = transform.errors(side)

        encoded = []
        for i, (block, part) in enumerate(zip(batch.blocks, streams, strict=True)):
            keys = [plane.kind == "key" for plane in block.planes]
            section = tokens.pack(side.exact[i], keys, side.exponents[i])
            sections: dict[str, Array] = {
                "TOKN": device.to_device(section).view(np.uint8),
                "COLS": part.columns,
                "STAT": part.states,
                "STRM": part.words,
            }
            rest = values[i][self._riding(block, int(blocks["groups"][i])) :]
            if rest.size:
                sections["ROWS"] = device.to_device(as_bytes(rest))
            found = [Errors(*total_errors(sums)) for sums in errors[i]]
            encoded.append(Encoded(sections, found))
        return encoded

    def exact_tokens(self, block: Block, unfit: np.ndarray) -> np.ndarray:
        """Which tokens of a block are kept as they are: bool ``[tokens]``."""
        position = np.arange(block.start, block.stop)
        return unfit | (position < self.sinks) | (position >= block.planes[0].tokens - self.window)

    def _exact_values(self, batch: Batch, number: int, exact: np.ndarray, device: Device) -> np.ndarray:
        """The exact tokens' numbers as unsigned integers, plane by plane, ``[n]``."""
        first = sum(len(block.planes) for block in batch.blocks[:number])
        block = batch.blocks[number]
        word = np.dtype(f"u{block.planes[0].itemsize}")
        if not exact.any():
            return np.zeros(0, word)
        rows = np.flatnonzero(exact)
        picked = [
            device.to_host(device.xp.ascontiguousarray(batch.arrays[first + i][device.to_device(rows)]))
            for i in range(len(block.planes))
        ]
        return np.concatenate([array.reshape(-1).view(word) for array in picked])

    @staticmethod
    def _riding(block: Block, groups: int) -> int:
        """How many of the exact numbers ride in the start states."""
        return groups * rans.LANES if block.planes[0].itemsize == 2 else 0

    def _riders(self, batch: Batch, blocks: np.ndarray, values: list[np.ndarray]) -> np.ndarray:
        riders = np.zeros(int(blocks["groups"].sum()) * rans.LANES, np.uint16)
        at = 0
        for block, fields, numbers in zip(batch.blocks, blocks, values, strict=True):
            riding = numbers[: self._riding(block, int(fields["groups"]))]
            riders[at : at + len(riding)] = riding
            at += int(fields["groups"]) * rans.LANES
        return riders

    # ------------------------------------------------------------------------------------------------------- decoding

    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        transform = Transform(self, batch, device)
        rows: list[tuple[int, int]] = []
        exact, exponents = [], []
        blocks = transform.describe()
        for fields, block, parts in zip(blocks, batch.blocks, sections, strict=True):
            groups = int(fields["groups"])
            reader = SectionReader(block, parts, device)
            words = reader.words("TOKN")
            fields["columns"], fields["column_word_count"] = reader.array("COLS", 4)
            fields["states"], _ = reader.array("STAT", 4, exactly=groups * rans.STATE_WORDS)
            fields["words"], fields["word_count"] = reader.array("STRM", 2)
            keys = [plane.kind == "key" for plane in block.planes]
            try:
                found = tokens.unpack(words, block.tokens, keys)
            except ValueError as error:
                raise corrupt_block(block, f"section TOKN: {error}") from error
            exact.append(found[0])
            exponents.append(found[1])
            numbers = int(found[0].sum()) * sum(plane.channels for plane in block.planes)
            rest = max(0, numbers - self._riding(block, groups))
            rows.append(reader.array("ROWS", block.planes[0].itemsize, exactly=rest) if rest else (0, 0))
            reader.done()
        side = transform.side(exact, exponents)
        riders = device.xp.zeros(int(blocks["groups"].sum()) * rans.LANES, np.uint16)
        starts = np.concatenate([[0], np.cumsum(blocks["groups"].astype(np.int64))])[:-1]
        blocks["riders"] = device.address(riders) + starts * (rans.LANES * 2)
        transform.place(blocks, side)
        faults = columns.decode(blocks, device)
        rans.check_status(faults[:, None], batch)
        transform.inverse(side)
        carried = device.to_host(riders)
        for i, block in enumerate(batch.blocks):
            if exact[i].any():
                riding = carried[int(starts[i]) * rans.LANES :][: self._riding(block, int(blocks["groups"][i]))]
                self._put_exact(batch, i, exact[i], riding, sections[i].get("ROWS"), device)

    def _put_exact(
        self, batch: Batch, number: int, exact: np.ndarray, riding: np.ndarray, rest: Array | None, device: Device
    ) -> None:
        first = sum(len(block.planes) for block in batch.blocks[:number])
        block = batch.blocks[number]
        word = np.dtype(f"u{block.planes[0].itemsize}")
        parts = [riding.astype(word)] + ([np.array(device.to_host(rest)).view(word)] if rest is not None else [])
        values = np.concatenate(parts)
        tokens_kept = np.flatnonzero(exact)
        at = 0
        for i, plane in enumerate(block.planes):
            count = len(tokens_kept) * plane.channels
            array = batch.arrays[first + i]
            numbers = values[at : at + count].view(plane.dtype).reshape(-1, plane.heads, plane.head_dim)
            array[device.to_device(tokens_kept)] = device.to_device(numbers)
            at += count


def _ropes(rope: str | Mapping[str, Any]) -> Ropes | None:
    if isinstance(rope, str):
        return None if rope == "auto" else Ropes.parse(rope)
    return Ropes.from_json(rope)


def _found(planes: Sequence[Plane], read: Read, notice: Callable[[str], None]) -> Ropes:
    """The rotation that the keys show."""
    from kvzip.profiles.detect import TOKENS, detect, sample_of
    from kvzip.profiles.summary import rotation

    keys = [plane for plane in planes if plane.kind == "key" and plane.sequence == planes[0].sequence]
    found = detect([read(plane, 0, min(plane.tokens, TOKENS + 1)) for plane in sample_of(keys)]) if keys else None
    if found is None or any(plane.head_dim < (found.rope.rotary or 2) for plane in keys):
        notice("kvtc: no rotation stands out in the keys; they are coded as they are (--rope tells it)")
        return Ropes()
    notice(f"kvtc: keys are rotated ({rotation(found.rope)}); undone, that saves {found.gain:.2f} bits a number")
    return Ropes((found.rope,))


def _step(codec: KvTc) -> str:
    return f"{power(codec.step_at):.3g}"


def _geometry(planes: Sequence[Plane], expected: Geometry | None = None) -> Geometry:
    """What planes that share bases have in common; their heads and dims are ``expected`` if that is given."""
    shapes = {(plane.heads, plane.head_dim, plane.dtype) for plane in planes}
    layers = {kind: {plane.layer for plane in planes if plane.kind == kind} for kind in ("key", "value")}
    kinds = {plane.kind for plane in planes}
    if len(shapes) != 1 or kinds != set(layers) or layers["key"] != layers["value"]:
        raise UsageError(
            "with a profile, keys and values of all layers must have one shape and dtype", code="profile-geometry"
        )
    ((heads, dim, _),) = shapes
    if expected is not None and (heads, dim, dim) != (expected.heads, expected.key_dim, expected.value_dim):
        raise ValueError(f"its profile is for {expected}")
    return Geometry(len(layers["key"]), heads, dim, dim)
