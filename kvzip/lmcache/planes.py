"""The planes of a cache in memory, coded as many at a time as a device has memory for.

Caches are ``[layers, 2, tokens, heads, head_dim]``, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from kvzip.cache import Block, Kind, Plane
from kvzip.codecs.base import Batch
from kvzip.devices.base import Device
from kvzip.pipeline.steps import Notice, Work, fitted, once
from kvzip.pipeline.window import stored_dtype

Result = TypeVar("Result")

KINDS: tuple[Kind, Kind] = ("key", "value")
"""What lies along the second axis."""


def blocks_of(kv: np.ndarray, layers: range | None = None) -> list[Block]:
    """A block for each plane of ``layers``, of all if None: keys first. Their planes' indexes count them."""
    count, _, tokens, heads, head_dim = kv.shape
    members = [(layer, kind) for kind in KINDS for layer in (range(count) if layers is None else layers)]
    return [
        Block((Plane(number, layer, kind, tokens, heads, head_dim, kv.dtype.name),), 0, tokens)
        for number, (layer, kind) in enumerate(members)
    ]


def in_parts(
    blocks: list[Block], code: Callable[[list[Block]], Result], device: Device, notice: Notice
) -> list[Result]:
    """What ``code`` makes of each run of blocks that the device has memory for, in order.

    ``notice`` is told when that is less than it likes. Raises what ``code`` raises, LimitError for a single block.
    """
    with device.activate():
        return list(fitted(Work(blocks), lambda work: code(work.items), device, once(notice)))


def upload(kv: np.ndarray, blocks: Sequence[Block], device: Device) -> Batch:
    """The planes of the blocks on the device; on the CPU where they are."""
    return Batch(list(blocks), [device.to_device(_plane(kv, block)) for block in blocks])


def allot(kv: np.ndarray, blocks: Sequence[Block], device: Device) -> Batch:
    """Room for the planes of the blocks on the device, which :func:`download` brings; on the CPU they themselves."""
    if device.xp is np:
        return upload(kv, blocks, device)
    dtype = stored_dtype(kv.dtype.name, device)
    return Batch(list(blocks), [device.xp.empty(_plane(kv, block).shape, dtype) for block in blocks])


def download(batch: Batch, kv: np.ndarray, device: Device) -> None:
    """Bring decoded planes to where they belong in ``kv``, which is C-contiguous."""
    if device.xp is not np:
        device.begin_download(batch.arrays, [_plane(kv, block) for block in batch.blocks])()


def _plane(kv: np.ndarray, block: Block) -> np.ndarray:
    plane: np.ndarray = kv[block.plane.layer, KINDS.index(block.plane.kind)]
    return plane
