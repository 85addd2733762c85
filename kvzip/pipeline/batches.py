"""Blocks into batches and back: what is of one codec and geometry goes through one kernel launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvzip.cache import Block
from kvzip.codecs.base import Batch, Codec, Encoded
from kvzip.container import Frame
from kvzip.devices.base import Array, Device
from kvzip.pipeline.assignment import Assignment
from kvzip.pipeline.window import Piece, Window, stored_dtype


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


def encode_blocks(blocks: Sequence[Block], window: Window, assignment: Assignment, device: Device) -> list[Coded]:
    """Encode blocks of an uploaded window; results in the order of ``blocks``, sections on the host."""
    codecs = [assignment.ids[block.planes[0].index] for block in blocks]
    done: dict[int, Coded] = {}
    for members in _alike(blocks, codecs):
        batch = Batch([blocks[number] for number in members])
        for block in batch.blocks:
            for plane in block.planes:
                ((_, _, array),) = window.pieces(plane.index, block.start, block.stop)
                batch.arrays.append(array)
        codec = codecs[members[0]]
        results = assignment.codecs[codec].encode(batch, device)
        on_host = iter(device.to_host_all([section for encoded in results for section in encoded.sections.values()]))
        for number, encoded in zip(members, results, strict=True):
            encoded.sections = {tag: next(on_host) for tag in encoded.sections}
            done[number] = Coded(blocks[number], codec, encoded)
    return [done[number] for number in range(len(blocks))]


def decode_frames(frames: Sequence[Frame], codecs: Codecs, pieces: Pieces, device: Device) -> None:
    """Decode frames to where ``pieces`` says: in place where a block lies there whole, else by way of fresh memory."""
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
        read = [frames[number].sections for number in members]
        on_device = iter(device.to_device_all([section for sections in read for section in sections.values()]))
        sections = [{tag: next(on_device) for tag in one} for one in read]
        codecs[numbers[members[0]]].decode(batch, sections, device)
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
