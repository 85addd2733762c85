"""LMCache's TurboQuant object: raw first layers, slots, raw last layers; no header, dtype, shape or checksum.

    raw   [2, skip_first_layers, tokens, heads * head_dim]
    slots [layers between, blocks, block_size, heads, slot]: key, value, padding to an even number of bytes
    raw   [2, skip_last_layers, tokens, heads * head_dim]

Layout after LMCache 0.5.6's serde ``turboquant``. Slots past the last token, which LMCache leaves as its memory was,
are zero. Caches are ``[layers, 2, tokens, heads, head_dim]``.
"""

from __future__ import annotations

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch
from kvzip.codecs.turboquant import TurboQuant
from kvzip.devices.base import Array, Device
from kvzip.errors import CorruptError, UsageError
from kvzip.lmcache.fp8 import Geometry

PARTS = (("DATA", 0), ("NORM", 0), ("DATA", 1), ("SCAL", 1))
"""The sections of a slot and whether they are of the key (0) or the value (1); an fp8 key has no NORM."""


def write_turboquant(kv: np.ndarray, codec: TurboQuant, device: Device) -> bytes:
    """The object that LMCache makes of ``[layers, 2, tokens, heads, head_dim]`` with the options of ``codec``.

    Its ``tuned`` does not matter. Rows with NaN, Inf or beyond fp16 are as broken as LMCache has them.
    """
    layers, _, tokens, heads, _ = kv.shape
    first, stop = _inner(codec, layers)
    stock = _stock(codec, layers)
    batch = _batch(kv[first:stop], first, device)
    sections = [
        {tag: np.asarray(device.to_host(section)) for tag, section in encoded.sections.items()}
        for encoded in stock.encode(batch, device)
    ] if batch.blocks else []  # fmt: skip
    layout = _slot_layout(stock, batch)
    blocks = -(-tokens // codec.block_size)
    slots = np.zeros((stop - first, blocks * codec.block_size, heads, _slot_bytes(layout)), np.uint8)
    for layer in range(stop - first):
        at = 0
        for tag, which, size in layout:
            part = sections[2 * layer + which][tag].reshape(tokens, heads, size)
            slots[layer, :tokens, :, at : at + size] = part
            at += size
    raw = np.swapaxes(kv, 0, 1)
    return raw[:, :first].tobytes() + slots.tobytes() + raw[:, stop:].tobytes()


def read_turboquant(
    data: bytes, codec: TurboQuant, geometry: Geometry, device: Device, what: str = "the file"
) -> np.ndarray:
    """The cache that LMCache makes of its object, in the dtype of ``geometry``.

    Raises ``CorruptError`` if the bytes are more or fewer than options and geometry say.
    """
    layers, _, tokens, heads, head_dim = geometry.shape
    first, stop = _inner(codec, layers)
    kv = np.empty(geometry.shape, np.dtype(geometry.dtype))
    stock, batch = _stock(codec, layers), _batch(kv[first:stop], first, device)
    layout = _slot_layout(stock, batch)
    raw_bytes = 2 * tokens * heads * head_dim * kv.itemsize
    shape = (stop - first, -(-tokens // codec.block_size) * codec.block_size, heads, _slot_bytes(layout))
    expected = (layers - stop + first) * raw_bytes + int(np.prod(shape))
    if len(data) != expected:
        raise CorruptError(
            f"{what} has {len(data)} bytes; {codec.preset} of {layers} layers x {tokens} tokens x {heads} heads x "
            f"{head_dim} makes {expected}; give the shape and the options that it was written with",
            code="lmcache-turboquant-size",
        )
    bytes_of = np.frombuffer(data, np.uint8)
    for start, end, begin in ((0, first, 0), (stop, layers, len(data) - (layers - stop) * raw_bytes)):
        raw = bytes_of[begin : begin + (end - start) * raw_bytes].view(kv.dtype)
        kv[start:end] = raw.reshape(2, end - start, tokens, heads, head_dim).swapaxes(0, 1)
    slots = bytes_of[first * raw_bytes : len(data) - (layers - stop) * raw_bytes].reshape(shape)
    sections: list[dict[str, Array]] = [{} for _ in batch.blocks]
    for layer in range(stop - first):
        at = 0
        for tag, which, size in layout:
            part = np.zeros(tokens * heads * size + 128, np.uint8)[: tokens * heads * size]
            part.reshape(tokens, heads, size)[...] = slots[layer, :tokens, :, at : at + size]
            sections[2 * layer + which][tag] = device.to_device(part)
            at += size
    if batch.blocks:
        stock.decode(batch, sections, device)
        for i, array in enumerate(batch.arrays):
            kv[first + i // 2, i % 2] = device.to_host(array)
    return kv


def _inner(codec: TurboQuant, layers: int) -> tuple[int, int]:
    """The layers that have slots."""
    first, stop = codec.skip_first_layers, layers - codec.skip_last_layers
    if first > stop:
        raise UsageError(
            f"{layers} layers are fewer than the {first} first and {layers - stop} last ones that stay raw",
            code="lmcache-layers",
        )
    return first, stop


def _stock(codec: TurboQuant, layers: int) -> TurboQuant:
    return TurboQuant(**{**codec.config(), "tuned": False, "layers": layers})


def _batch(kv: np.ndarray, first: int, device: Device) -> Batch:
    """Keys and values of one layer after the other; ``kv[0]`` is layer ``first``."""
    batch = Batch([])
    for i, array in enumerate(kv.reshape(-1, *kv.shape[2:])):
        tokens, heads, head_dim = array.shape
        plane = Plane(i, first + i // 2, ("key", "value")[i % 2], tokens, heads, head_dim, kv.dtype.name)
        batch.blocks.append(Block((plane,), 0, tokens))
        batch.arrays.append(device.to_device(array))
    return batch


def _slot_layout(stock: TurboQuant, batch: Batch) -> list[tuple[str, int, int]]:
    """Tag, key or value, and bytes of what a slot has, in order."""
    if not batch.blocks:
        return []
    sizes = [stock.row_sections(block.plane) for block in batch.blocks[:2]]
    return [(tag, which, sizes[which][tag]) for tag, which in PARTS if tag in sizes[which]]


def _slot_bytes(layout: list[tuple[str, int, int]]) -> int:
    size = sum(size for _, _, size in layout)
    return size + size % 2
