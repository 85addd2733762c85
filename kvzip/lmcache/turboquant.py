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
from kvzip.codecs.turboquant import TurboQuant
from kvzip.codecs.turboquant.rotation import MAX_HEAD_DIM
from kvzip.coding.sections import padded
from kvzip.devices.base import Device
from kvzip.errors import CorruptError, UsageError
from kvzip.lmcache import planes
from kvzip.lmcache.fp8 import Geometry
from kvzip.pipeline.encoding import ignore
from kvzip.pipeline.steps import Notice

PARTS = (("DATA", 0), ("NORM", 0), ("DATA", 1), ("SCAL", 1))
"""The sections of a slot and whether they are of the key (0) or the value (1); an fp8 key has no NORM."""

Codes = dict[tuple[int, int], dict[str, np.ndarray]]
"""What slots hold, by layer and key (0) or value (1): each section, uint8 ``[tokens, heads, bytes]``."""


def write_turboquant(
    kv: np.ndarray, codec: TurboQuant, device: Device, codes: Codes | None = None, notice: Notice = ignore
) -> bytes:
    """The object that LMCache makes of ``[layers, 2, tokens, heads, head_dim]`` with the options of ``codec``.

    Its ``tuned`` does not matter. Rows with NaN, Inf or beyond fp16 are as broken as LMCache has them. Where ``codes``
    are given, slots are made of them, and ``kv`` has to hold only the layers that stay raw. ``notice`` is told when the
    device is short of memory.
    """
    layers, _, tokens, heads, head_dim = kv.shape
    between = layers_between(codec, layers)
    parts = slot_parts(codec, layers, head_dim)
    codes = _encode(kv, codec, device, notice) if codes is None else codes
    slots = np.zeros(_slots_shape(codec, layers, tokens, heads, head_dim), np.uint8)
    for layer, slot in zip(between, slots, strict=True):
        at = 0
        for tag, which, size in parts:
            slot[:tokens, :, at : at + size] = codes[layer, which][tag]
            at += size
    raw = np.swapaxes(kv, 0, 1)
    return raw[:, : between.start].tobytes() + slots.tobytes() + raw[:, between.stop :].tobytes()


def read_turboquant(
    data: bytes, codec: TurboQuant, geometry: Geometry, device: Device, what: str = "the file"
) -> np.ndarray:
    """The cache that LMCache makes of its object, in the dtype of ``geometry``.

    Raises ``CorruptError`` if the bytes are more or fewer than options and geometry say.
    """
    return read_codes(data, codec, geometry, device, what)[0]


def read_codes(
    data: bytes,
    codec: TurboQuant,
    geometry: Geometry,
    device: Device,
    what: str = "the file",
    notice: Notice = ignore,
) -> tuple[np.ndarray, Codes]:
    """As :func:`read_turboquant`; and the codes of the layers that do not stay raw."""
    layers, _, tokens, heads, head_dim = geometry.shape
    between, dtype = layers_between(codec, layers), np.dtype(geometry.dtype)
    raw_bytes = 2 * tokens * heads * head_dim * dtype.itemsize
    shape = _slots_shape(codec, layers, tokens, heads, head_dim)
    expected = (layers - len(between)) * raw_bytes + int(np.prod(shape))
    if len(data) != expected:
        raise CorruptError(
            f"{what} has {len(data)} bytes; {codec.preset} of {layers} layers x {tokens} tokens x {heads} heads x "
            f"{head_dim} makes {expected}; give the shape and the options that it was written with",
            code="lmcache-turboquant-size",
        )
    kv, bytes_of = np.empty(geometry.shape, dtype), np.frombuffer(data, np.uint8)
    begin, end = between.start * raw_bytes, len(data) - (layers - between.stop) * raw_bytes
    for part, raw in ((kv[: between.start], bytes_of[:begin]), (kv[between.stop :], bytes_of[end:])):
        part[...] = raw.view(dtype).reshape(2, len(part), tokens, heads, head_dim).swapaxes(0, 1)
    codes: Codes = {(layer, which): {} for layer in between for which in (0, 1)}
    for layer, slot in zip(between, bytes_of[begin:end].reshape(shape), strict=True):
        at = 0
        for tag, which, size in slot_parts(codec, layers, head_dim):
            codes[layer, which][tag] = slot[:tokens, :, at : at + size]
            at += size
    _decode(kv, codes, codec, device, notice)
    return kv, codes


def layers_between(codec: TurboQuant, layers: int) -> range:
    """The layers that have slots. Raises ``UsageError`` for fewer layers than stay raw."""
    first, stop = codec.skip_first_layers, layers - codec.skip_last_layers
    if first > stop:
        raise UsageError(
            f"{layers} layers are fewer than the {first} first and {layers - stop} last ones that stay raw",
            code="lmcache-layers",
        )
    return range(first, stop)


def slot_parts(codec: TurboQuant, layers: int, head_dim: int) -> list[tuple[str, int, int]]:
    """Section, key (0) or value (1), and bytes of what a slot has, in order; nothing where all layers stay raw.

    Raises ``UsageError`` for heads that are larger than kernels take.
    """
    if head_dim > MAX_HEAD_DIM:
        raise UsageError(f"turboquant has heads of up to {MAX_HEAD_DIM} channels, not {head_dim}", code="lmcache-shape")
    stock = stock_of(codec, layers)
    sizes = [
        stock.row_sections(Plane(0, layer, kind, 1, 1, head_dim, "bfloat16"))
        for layer in layers_between(codec, layers)[:1]
        for kind in ("key", "value")
    ]
    return [(tag, which, sizes[which][tag]) for tag, which in PARTS if sizes and tag in sizes[which]]


def stock_of(codec: TurboQuant, layers: int) -> TurboQuant:
    """The codec as LMCache has it, of a cache of so many layers: heads are those of the cache."""
    return TurboQuant(**{**codec.config(), "tuned": False, "sinks": 0, "layers": layers, "head_dim": None})


def _encode(kv: np.ndarray, codec: TurboQuant, device: Device, notice: Notice) -> Codes:
    stock, (_, _, tokens, heads, head_dim) = stock_of(codec, len(kv)), kv.shape
    parts = slot_parts(codec, len(kv), head_dim)

    def code(blocks: list[Block]) -> Codes:
        encoded = stock.encode(planes.upload(kv, blocks, device), device)
        return {
            (layer, which): {
                tag: np.asarray(device.to_host(one.sections[tag])).reshape(tokens, heads, size)
                for tag, kind, size in parts
                if kind == which
            }
            for (layer, which), one in zip(map(_member, blocks), encoded, strict=True)
        }

    found = planes.in_parts(planes.blocks_of(kv, layers_between(codec, len(kv))), code, device, notice)
    return {member: sections for part in found for member, sections in part.items()}


def _decode(kv: np.ndarray, codes: Codes, codec: TurboQuant, device: Device, notice: Notice) -> None:
    """Fill the layers between."""
    stock = stock_of(codec, len(kv))

    def code(blocks: list[Block]) -> None:
        batch = planes.allot(kv, blocks, device)
        sections = [{tag: padded(part, device) for tag, part in codes[_member(block)].items()} for block in blocks]
        stock.decode(batch, sections, device)
        planes.download(batch, kv, device)

    planes.in_parts(planes.blocks_of(kv, layers_between(codec, len(kv))), code, device, notice)


def _member(block: Block) -> tuple[int, int]:
    return block.plane.layer, planes.KINDS.index(block.plane.kind)


def _slots_shape(codec: TurboQuant, layers: int, tokens: int, heads: int, head_dim: int) -> tuple[int, int, int, int]:
    size = sum(size for _, _, size in slot_parts(codec, layers, head_dim))
    places = -(-tokens // codec.block_size) * codec.block_size
    return len(layers_between(codec, layers)), places, heads, size + size % 2
