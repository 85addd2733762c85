"""Blocks into batches and back: what is of one codec and geometry goes through one kernel launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvzip.cache import Block
from kvzip.codecs.base import Batch, Codec, Encoded, Errors
from kvzip.coding.sections import padded
from kvzip.container import Frame
from kvzip.devices.base import Array, Arrival, Device
from kvzip.pipeline.assignment import Assignment
from kvzip.pipeline.window import Piece, Window, stored_dtype
from kvzip.quality import differences

TINY = 2.0**-100
"""A mean square below this has lost digits to underflow in float32."""


class Codecs(Protocol):
    """The codecs of a file by number."""

    def __getitem__(self, number: int, /) -> Codec: ...


Pieces = Callable[[int, int, int], list[Piece]]
"""``pieces(plane index, start, stop)``: where a decoder's tokens go; those that no piece holds are not wanted."""


class Coded(NamedTuple):
    """An encoded block and the number of its codec."""

    block: Block
    codec: int
    encoded: Encoded


def encode_blocks(
    blocks: Sequence[Block], window: Window, assignment: Assignment, device: Device
) -> Callable[[], list[Coded]]:
    """Encode blocks of an uploaded window. What it returns gives the results, in the order of ``blocks``: it waits for
    their sections to be on the host.
    """
    codecs = [assignment.ids[block.planes[0].index] for block in blocks]
    under_way: list[tuple[list[int], int, list[Encoded], Arrival]] = []
    for members in _alike(blocks, codecs):
        batch = Batch([blocks[number] for number in members])
        for block in batch.blocks:
            for plane in block.planes:
                ((_, _, array),) = window.pieces(plane.index, block.start, block.stop)
                batch.arrays.append(array)
        codec = codecs[members[0]]
        results = assignment.codecs[codec].encode(batch, device)
        _measure_uncounted(batch, results, assignment.codecs[codec], device)
        arrival = device.begin_download([section for encoded in results for section in encoded.sections.values()])
        for encoded in results:
            encoded.sections = dict.fromkeys(encoded.sections)  # what is on its way is not to be kept here, too
        under_way.append((members, codec, results, arrival))

    def arrive() -> list[Coded]:
        done: dict[int, Coded] = {}
        for members, codec, results, arrival in under_way:
            on_host = iter(arrival())
            for number, encoded in zip(members, results, strict=True):
                encoded.sections = {tag: next(on_host) for tag in encoded.sections}
                done[number] = Coded(blocks[number], codec, encoded)
        return [done[number] for number in range(len(blocks))]

    return arrive


def _measure_uncounted(batch: Batch, results: Sequence[Encoded], codec: Codec, device: Device) -> None:
    """Where kernels cannot tell a block's errors: those of its decoded numbers, in double precision.

    So where squares in float32 overflow or sink to zero, or a kernel's sums say that numbers did not stay finite.
    """
    arrays = iter(batch.arrays)
    for block, encoded in zip(batch.blocks, results, strict=True):
        originals = [next(arrays) for _ in block.planes]
        if all(_is_counted(error, array) for error, array in zip(encoded.errors, originals, strict=False)):
            continue
        restored = [device.xp.empty(array.shape, array.dtype) for array in originals]
        sections = {tag: padded(section, device) for tag, section in encoded.sections.items()}
        codec.decode(Batch([block], restored), [sections], device)
        encoded.errors = [
            differences(*(np.asarray(device.to_host(array)).view(plane.dtype) for array in pair))
            for plane, *pair in zip(block.planes, originals, restored, strict=True)
        ]


def _is_counted(error: Errors, original: Array) -> bool:
    finite = math.isfinite(error.squared_error + error.energy + error.max_abs)
    return finite and (error.energy >= TINY * original.size or not (error.max_abs or original.any()))


def load_frames(frames: Sequence[Frame], device: Device) -> Callable[[], list[Frame]]:
    """Begin to bring the sections of frames to the device. What it returns gives frames that have them there."""
    arrival = device.begin_upload([section for frame in frames for section in frame.sections.values()])

    def arrive() -> list[Frame]:
        on_device = iter(arrival())
        return [frame._replace(sections={tag: next(on_device) for tag in frame.sections}) for frame in frames]

    return arrive


def decode_frames(frames: Sequence[Frame], codecs: Codecs, pieces: Pieces, device: Device) -> None:
    """Decode loaded frames to where ``pieces`` says: in place where a block lies there whole, else by way of fresh
    memory.
    """
    blocks = [frame.entry.block for frame in frames]
    numbers = [frame.entry.codec for frame in frames]
    for members in _alike(blocks, numbers):
        batch = Batch([blocks[number] for number in members])
        copies: list[tuple[Block, Array, list[Piece]]] = []
        for block in batch.blocks:
            for plane in block.planes:
                found = pieces(plane.index, block.start, block.stop)
                if len(found) == 1 and found[0].stop - found[0].start == block.tokens:
                    batch.arrays.append(found[0].array)
                else:
                    shape = (block.tokens, plane.heads, plane.head_dim)
                    batch.arrays.append(device.xp.empty(shape, stored_dtype(plane.dtype, device)))
                    copies.append((block, batch.arrays[-1], found))
        codecs[numbers[members[0]]].decode(batch, [frames[number].sections for number in members], device)
        for block, array, found in copies:
            for piece in found:
                piece.array[...] = array[piece.start - block.start : piece.stop - block.start]


def _alike(blocks: Sequence[Block], codecs: Sequence[int]) -> list[list[int]]:
    """The numbers of the blocks that may share a launch: of one codec, dtype, heads and head_dim."""
    found: dict[tuple[int, tuple[tuple[str, int, int], ...]], list[int]] = {}
    for number, (block, codec) in enumerate(zip(blocks, codecs, strict=True)):
        shapes = dict.fromkeys((plane.dtype, plane.heads, plane.head_dim) for plane in block.planes)
        found.setdefault((codec, tuple(shapes)), []).append(number)
    return list(found.values())
