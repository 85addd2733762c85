"""One target per codec: its decoder on the sections of genuine blocks, changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np

from fuzz.edits import edit, steps
from fuzz.guard import GuardedCpu, Region
from kvzip.cache import Block, Plane
from kvzip.codecs import get_codec
from kvzip.codecs.base import Batch, Codec
from kvzip.devices.base import SECTION_PADDING
from kvzip.devices.build import Target as Machine
from kvzip.devices.levels import runnable_levels
from kvzip.errors import KvzipError, UsageError

OPTIONS = {
    "fp8": ("fp8", "fp8:scale=tensor", "fp8:scale=head,dtype=float8_e5m2", "fp8:scale=token,saturate=false"),
    "cachegen": (
        *("cachegen", "cachegen:level=9,sinks=3", "cachegen:level=1,sinks=0", "cachegen:coder=range"),
        "cachegen:levels=3",
    ),
    "int8": ("int8", "int8:symmetric=false", "int8:tuned=true"),
    "int4": ("int4", "int4:symmetric=false", "int4:tuned=true"),
    "kivi": ("kivi:residual=8", "kivi:bits=2,residual=0", "kivi:tuned=true,residual=16"),
    "kvtc": ("kvtc", "kvtc:level=1", "kvtc:level=9,sinks=3,window=4", "kvtc:rope=theta=1e4"),
    "turboquant": tuple(
        f"turboquant:preset=turboquant_{preset},tuned={tuned},skip_first_layers=0,skip_last_layers=0"
        for preset in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
        for tuned in ("true", "false")
    ),
}
"""The codecs' options, where the defaults do not reach all of a decoder."""

GEOMETRIES = ((1, 1, 1), (5, 1, 3), (33, 2, 40), (70, 4, 16), (64, 1, 32))
"""Tokens, heads and head_dim: one number, idle lanes, lanes across heads, several tiles, whole warps."""

DTYPES = ("bfloat16", "float16", "float32")
LARGEST = 1 << 16


@dataclass(frozen=True)
class Sample:
    """A genuine block: its codec, bound to the cache that it is from, and its sections."""

    codec: Codec
    block: Block
    sections: Mapping[str, bytes]


class DecoderTarget:
    """The first byte of an input names a sample, the second a level of instructions and where buffers lie; then come
    edits.
    """

    def __init__(self, codec: str) -> None:
        self.codec = codec
        self.name = f"decode-{codec}"
        self._regions: dict[int, Region] = {}

    def seeds(self) -> Sequence[bytes]:
        """Any bytes are as good as others."""
        return ()

    @cached_property
    def _devices(self) -> list[GuardedCpu]:
        return [GuardedCpu(level) for level in runnable_levels(Machine.host())]

    @cached_property
    def samples(self) -> list[Sample]:
        """A block of every combination of options, geometry and dtype that the codec takes."""
        return [
            sample
            for spec in OPTIONS.get(self.codec, (self.codec,))
            for geometry in GEOMETRIES
            for dtype in DTYPES
            for sample in samples(spec, geometry, dtype, self._devices[0])
        ]

    def run(self, inputs: Sequence[bytes]) -> None:
        """Decode all inputs of one sample and level by one launch, those whose sections have other lengths alone."""
        together: dict[tuple[int, int, bool], list[dict[str, bytearray]]] = {}
        for data in inputs:
            number, device, at_end = self._choice(data)
            sample = self.samples[number]
            sections = changed(sample.sections, data[2:])
            if {tag: len(part) for tag, part in sections.items()} == {t: len(p) for t, p in sample.sections.items()}:
                together.setdefault((number, device, at_end), []).append(sections)
            else:
                self._decode(sample, [sections], self._devices[device], at_end)
        for (number, device, at_end), many in together.items():
            self._decode(self.samples[number], many, self._devices[device], at_end)

    def _choice(self, data: bytes) -> tuple[int, int, bool]:
        first, second = (*data[:2], 0, 0)[:2]
        # Few samples a batch of inputs, so that launches are shared; all of them over many batches.
        return first % len(self.samples), second % len(self._devices), second < 192

    def _decode(self, sample: Sample, many: list[dict[str, bytearray]], device: GuardedCpu, at_end: bool) -> None:
        batch = Batch([sample.block] * len(many))
        placed, used = [], 0
        for sections in many:
            batch.arrays += [self._array(used + i, plane, at_end) for i, plane in enumerate(sample.block.planes)]
            used += len(sample.block.planes)
            placed.append(
                {tag: self._section(used + i, part, at_end) for i, (tag, part) in enumerate(sections.items())}
            )
            used += len(sections)
        before = device.launches
        try:
            sample.codec.decode(batch, placed, device)
        except KvzipError as error:
            assert error.code != type(error).default_code, f"an error without a code: {error}"
            if device.launches == before and len(many) > 1:
                # One was refused before the kernel saw any: it must not hide the others.
                for sections in many:
                    self._decode(sample, [sections], device, at_end)

    def _array(self, number: int, plane: Plane, at_end: bool) -> np.ndarray:
        dtype = np.dtype(plane.dtype)
        place = self._region(number).place(plane.nbytes, align=dtype.itemsize, at_end=at_end)
        return place.view(dtype).reshape(plane.tokens, plane.heads, plane.head_dim)

    def _section(self, number: int, data: bytearray, at_end: bool) -> np.ndarray:
        place = self._region(number).place(len(data), readable=SECTION_PADDING, at_end=at_end)
        place[...] = np.frombuffer(data, np.uint8)
        return place

    def _region(self, number: int) -> Region:
        if number not in self._regions:
            self._regions[number] = Region(LARGEST)
        return self._regions[number]


def samples(spec: str, geometry: tuple[int, int, int], dtype: str, device: GuardedCpu) -> list[Sample]:
    """The first block of each group of a cache of two layers; none if the codec does not take such planes."""
    tokens, heads, head_dim = geometry
    kinds = [(layer, kind) for layer in range(2) for kind in ("key", "value")]
    planes = [Plane(i, layer, kind, tokens, heads, head_dim, dtype) for i, (layer, kind) in enumerate(kinds)]
    codec = get_codec(spec)
    try:
        codec = codec.bind(planes)
    except UsageError:
        return []
    if not all(map(codec.supports, planes)):
        return []
    found = []
    for group in list(codec.groups(planes))[:2]:
        block = Block(tuple(group), 0, tokens)
        arrays = [numbers(plane, seed=plane.index) for plane in group]
        (encoded,) = codec.encode(Batch([block], arrays), device)
        sections = {tag: np.asarray(part).tobytes() for tag, part in encoded.sections.items()}
        check_genuine(codec, block, sections, device)
        found.append(Sample(codec, block, sections))
    return found


def check_genuine(codec: Codec, block: Block, sections: Mapping[str, bytes], device: GuardedCpu) -> None:
    """What is unchanged must be decoded: nothing would be learnt from changes to what is refused anyway."""
    arrays = [np.empty((plane.tokens, plane.heads, plane.head_dim), plane.dtype) for plane in block.planes]
    placed = {}
    for tag, part in sections.items():
        placed[tag] = Region(len(part) + SECTION_PADDING).place(len(part), readable=SECTION_PADDING)
        placed[tag][...] = np.frombuffer(part, np.uint8)
    codec.decode(Batch([block], arrays), [placed], device)


def numbers(plane: Plane, seed: int) -> np.ndarray:
    """Numbers whose channels have means of their own, with a few that are no numbers, zero or tiny."""
    rng = np.random.default_rng(seed)
    mean = rng.normal(0, 2, (1, plane.heads, plane.head_dim))
    values = (rng.normal(size=(plane.tokens, plane.heads, plane.head_dim)) + mean).astype(np.float32)
    for token, value in ((3, np.nan), (7, 0.0), (20, np.inf), (50, 1e-38)):
        values[token : token + 1] = value
    return values.astype(plane.dtype)


def changed(sections: Mapping[str, bytes], script: bytes) -> dict[str, bytearray]:
    """Sections after the changes of a script, one of them dropped now and then."""
    parts = {tag: bytearray(part) for tag, part in sections.items()}
    for step in steps(script):
        tags = list(parts)
        if not tags:
            break
        tag = tags[step.part % len(tags)]
        if step.what >= 252:
            del parts[tag]
        elif len(parts[tag]) < LARGEST // 2:
            edit(parts[tag], step)
    return parts
