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

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch, Codec, Encoded, Errors, Read, Sections
from kvzip.codecs.kvtc import columns, tokens
from kvzip.codecs.kvtc.transform import Basis, Transform
from kvzip.coding import rans
from kvzip.coding.sections import SectionReader, as_bytes, corrupt_block, total_errors
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import ELEMENT_SUFFIX
from kvzip.errors import UsageError
from kvzip.profiles.profile import Geometry, Profile
from kvzip.profiles.ropes import Ropes
from kvzip.profiles.scales import power, step_index

LEVEL_5 = 116
"""Step index of level 5: about 2.1 bits an element without a profile, every byte of a file of 1024 tokens counted."""

LEVEL_STEP = 96
MAX_TOKENS = 4096
"""Tokens of a block at the most: an escape reaches no farther."""

LARGEST = 1 << 17
"""Multiples of the step beyond which a token is kept exact."""


class KvTc(Codec):
    """Transform coding.

    Args:
        level: 1 to 9; each finer one has a step smaller by ``2 ** (3 / 8)`` and costs about 0.37 bits more.
        step: the step itself, in units of values' rms; wins over ``level``.
        rope: ``"auto"`` finds the keys' rotation in the file, ``"none"``, or a description such as ``"theta=1e6"``.
        profile: path or hash of a trained profile; its rotation wins over ``rope``.
        sinks: how many of the oldest tokens of the file to keep exact; 0 for a chunk from the middle of a prompt.
        window: how many of the newest tokens to keep exact.

    Raises:
        UsageError: an option out of range, a rotation or profile that does not fit.
    """

    name = "kvtc"

    def __init__(
        self,
        *,
        level: int = 5,
        step: float | None = None,
        step_at: int | None = None,
        rope: str | Mapping[str, Any] = "auto",
        profile: str | None = None,
        sinks: int = 1,
        window: int = 0,
    ) -> None:
        if not 1 <= level <= 9:
            raise UsageError(f"level must be 1 to 9, got {level}")
        if sinks < 0 or window < 0:
            raise UsageError(f"sinks and window must be 0 or more, got {sinks} and {window}")
        if step is not None and not 2.0**-12 <= step <= 2.0**12:
            raise UsageError(f"step must be between 2^-12 and 2^12, got {step}")
        if step_at is None:
            step_at = step_index(step) if step is not None else LEVEL_5 - LEVEL_STEP * (level - 5)
        if not -12 * 256 <= step_at <= 12 * 256:
            raise UsageError(f"step_at must be between -3072 and 3072, got {step_at}")
        self.step_at = step_at
        self.sinks, self.window = sinks, window
        self.ropes = _ropes(rope)
        self.profile = _load(profile) if profile is not None else None
        if self.profile is not None:
            self.ropes = self.profile.ropes
        self._bases: dict[tuple[int, ...], Basis] = {}

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"step_at": self.step_at, "sinks": self.sinks}
        if self.window:
            config["window"] = self.window
        if self.profile is not None:
            config["profile"] = self.profile.hash
        else:
            config["rope"] = "auto" if self.ropes is None else self.ropes.to_json()
        return config

    studies = True

    def study(self, planes: Sequence[Plane], read: Read, notice: Callable[[str], None]) -> Self:
        """Find the keys' rotation, unless it is given."""
        if self.ropes is not None:
            return self
        from kvzip.profiles.detect import LAYERS, TOKENS, detect

        keys = [plane for plane in planes if plane.kind == "key"]
        chosen = [keys[i] for i in sorted({round(i) for i in np.linspace(0, len(keys) - 1, min(LAYERS, len(keys)))})]
        found = detect([read(plane, min(plane.tokens, TOKENS + 1)) for plane in chosen]) if chosen else None
        if found is None:
            notice("kvtc: no rotation stands out in the keys; they are coded as they are (--rope tells it)")
            return self._with(Ropes())
        notice(f"kvtc: keys are rotated with {_words(found.rope)}: undone, that saves {found.gain:.2f} bits a number")
        return self._with(Ropes((found.rope,)))

    def bind(self, planes: Sequence[Plane]) -> Self:
        bound = self if self.ropes is not None else self._with(Ropes())
        for plane in planes:
            rope = bound.ropes.of(plane.layer) if bound.ropes is not None and plane.kind == "key" else None
            if rope is not None:
                rope.width(plane.head_dim)
        if self.profile is not None and planes:
            self.profile.check(_geometry(planes))
        return bound

    def _with(self, ropes: Ropes) -> Self:
        return type(self)(step_at=self.step_at, rope=ropes.to_json(), sinks=self.sinks, window=self.window)

    @classmethod
    def ladder(cls) -> list[str]:
        return ["", "level=1", "level=3", "level=7", "level=9"]

    def supports(self, plane: Plane) -> bool:
        return plane.dtype in ELEMENT_SUFFIX and plane.kind != "bytes"

    def groups(self, planes: Sequence[Plane]) -> list[tuple[Plane, ...]]:
        if self.profile is None:
            return super().groups(planes)
        place = {(plane.sequence, plane.layer, plane.kind): plane for plane in planes}
        sequences = sorted({plane.sequence for plane in planes})
        return [
            tuple(place[sequence, layer, kind] for layer in group.layers for kind in ("key", "value"))
            for sequence in sequences
            for group in self.profile.groups
        ]

    def describe(self, plane: Plane) -> dict[str, Any]:
        return {"step": float(f"{float(power(self.step_at)):.4g}")}

    def bound(self, block: Block) -> int:
        numbers = sum(plane.channels for plane in block.planes)
        section = 4 * (1 + -(-block.tokens // 32) * (1 + 18 * len(block.planes)))
        return columns.bound(block.tokens, -(-numbers // rans.LANES)) + section + block.nbytes + 64

    def basis(self, block: Block) -> Basis | None:
        """The basis of a block's planes at this step; None without a profile."""
        if self.profile is None:
            return None
        group = self.profile.group_of(block.planes[0].layer)
        if group.layers not in self._bases:
            rank = max(1, group.rank_at(self.step_at))
            self._bases[group.layers] = Basis(group.mean.astype(np.float32), group.matrix(rank))
        return self._bases[group.layers]

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


def _words(rope: Any) -> str:
    pairs = "neighbouring" if rope.interleaved else "half-split"
    width = f", the first {rope.rotary} channels" if rope.rotary else ""
    return f"theta {rope.theta:g}, {pairs} pairs{width}"


def _geometry(planes: Sequence[Plane]) -> Geometry:
    keys = [plane for plane in planes if plane.kind == "key"]
    values = [plane for plane in planes if plane.kind == "value"]
    shapes = {(plane.heads, plane.head_dim) for plane in keys}, {(plane.heads, plane.head_dim) for plane in values}
    layers = {plane.layer for plane in keys}
    if [len(shape) for shape in shapes] != [1, 1] or layers != {plane.layer for plane in values}:
        raise UsageError("a profile needs keys and values of one shape in every layer", code="profile-geometry")
    ((heads, key_dim),), ((_, value_dim),) = shapes
    return Geometry(len(layers), heads, key_dim, value_dim)


def _load(profile: str) -> Profile:
    from kvzip.profiles.library import find

    return find(profile)
