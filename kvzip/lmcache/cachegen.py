"""A KV cache to what LMCache's CacheGen makes of it, and back, bit for bit.

Caches are arrays ``[layers, 2, tokens, heads, head_dim]`` of bfloat16, float16 or float32, on the host, whose last axis
is contiguous. ``notice`` is told when the device is short of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvzip.cache import Block
from kvzip.codecs.base import Batch
from kvzip.codecs.cachegen import symbols as planes_of_symbols
from kvzip.codecs.cachegen.tokens import TILE, Tokens
from kvzip.coding import bins as schedule
from kvzip.devices.base import Array, Device
from kvzip.lmcache import planes
from kvzip.lmcache.blob import CacheGenBlob, StreamChunk
from kvzip.lmcache.streams import cut_planes, decode_symbols, encode_symbols, join_planes
from kvzip.pipeline.encoding import ignore
from kvzip.pipeline.steps import Notice


def lmcache_bins(layers: int) -> tuple[list[int], list[int]]:
    """LMCache's bins per layer, for keys and for values."""
    keys, values = (
        [schedule.lookup(schedule.lmcache(layers, kind), layer) for layer in range(layers)] for kind in ("key", "value")
    )
    return keys, values


def encode(
    kv: np.ndarray, key_bins: Sequence[int], value_bins: Sequence[int], device: Device, notice: Notice = ignore
) -> CacheGenBlob:
    """What LMCache's serializer makes of ``kv``; every stream is whole, where LMCache cuts at 256 bytes.

    Raises ``LimitError`` for more than 65535 tokens.
    """
    layers, _, tokens, heads, head_dim = kv.shape
    bins = [*key_bins, *value_bins]

    def code(blocks: list[Block]) -> tuple[np.ndarray, tuple[StreamChunk, ...], np.ndarray]:
        batch = planes.upload(kv, blocks, device)
        symbols = planes_of_symbols.symbol_scratch(batch, device)
        of_tokens = Tokens.of(batch, bins[_of(blocks)], 0, device)
        planes_of_symbols.quantize(batch, bins[_of(blocks)], of_tokens, symbols, device)
        tables, chunks = encode_symbols(symbols, tokens, heads * head_dim, device)
        return tables, chunks, device.to_host(of_tokens.maxima)[:, :tokens, None].astype(kv.dtype)

    tables, chunks, maxima = zip(*planes.in_parts(planes.blocks_of(kv), code, device, notice), strict=True)
    of_planes = np.concatenate(maxima)
    return CacheGenBlob(
        join_planes(chunks), np.concatenate(tables), of_planes[:layers], of_planes[layers:], heads, head_dim
    )


def decode(
    blob: CacheGenBlob,
    key_bins: Sequence[int],
    value_bins: Sequence[int],
    device: Device,
    dtype: Any = None,
    notice: Notice = ignore,
) -> np.ndarray:
    """The cache that LMCache's deserializer makes of a blob, in ``dtype`` or the dtype of its max tensors."""
    kv = _room(blob, dtype)

    def code(blocks: list[Block]) -> None:
        _decode(blob, kv, blocks, [*key_bins, *value_bins], device)

    planes.in_parts(planes.blocks_of(kv), code, device, notice)
    return kv


def decode_checked(
    blob: CacheGenBlob, key_bins: Sequence[int], value_bins: Sequence[int], device: Device, notice: Notice = ignore
) -> tuple[np.ndarray, np.ndarray]:
    """:func:`decode`, and which tokens, bool ``[2L, T]``, would not get their symbols back by quantizing it again.

    There are none in what LMCache writes: its largest channel has the first or the last symbol, and rounding to the
    cache's type moves no value by half a symbol. Tokens with NaN or Inf, which codecs keep exact, do not count.
    """
    kv, bins = _room(blob, None), [*key_bins, *value_bins]
    rows, channels = blob.tokens, blob.heads * blob.head_dim

    def code(blocks: list[Block]) -> np.ndarray:
        batch, symbols = _decode(blob, kv, blocks, bins, device)
        tokens, again = Tokens.of(batch, bins[_of(blocks)], 0, device), device.xp.empty_like(symbols)
        planes_of_symbols.quantize(batch, bins[_of(blocks)], tokens, again, device)
        lost: np.ndarray = device.to_host((symbols != again)[:, :rows, :channels].any(axis=2))
        lost = lost | (device.to_host(tokens.maxima)[:, :rows] != _maxima(blob)[_of(blocks)])
        for plane, exact in enumerate(tokens.exact_tokens(device)):
            lost[plane, exact] = False
        return lost

    return kv, np.concatenate(planes.in_parts(planes.blocks_of(kv), code, device, notice))


def _decode(
    blob: CacheGenBlob, kv: np.ndarray, blocks: list[Block], bins: Sequence[int], device: Device
) -> tuple[Batch, Array]:
    """Fill the planes of ``blocks``, which follow each other; they as a batch, and their symbols."""
    batch, some = planes.allot(kv, blocks, device), _of(blocks)
    symbols = planes_of_symbols.symbol_scratch(batch, device)
    chunks = tuple(cut_planes(chunk, some) for chunk in blob.chunks)
    decode_symbols(blob.tables[some], chunks, symbols, blob.heads * blob.head_dim, device)
    tiles = -(-blob.tokens // TILE)
    maxima = np.zeros((len(blocks), tiles * TILE), np.float32)
    maxima[:, : blob.tokens] = _maxima(blob)[some]
    planes_of_symbols.dequantize(
        batch, bins[some], np.zeros(len(maxima), planes_of_symbols.TOKEN_SECTION), device.to_device(maxima),
        device.to_device(np.zeros((len(maxima), tiles), np.uint32)), symbols, device,
    )  # fmt: skip
    planes.download(batch, kv, device)
    return batch, symbols


def _room(blob: CacheGenBlob, dtype: Any) -> np.ndarray:
    return np.empty((blob.layers, 2, blob.tokens, blob.heads, blob.head_dim), dtype or blob.key_maxima.dtype)


def _of(blocks: Sequence[Block]) -> slice:
    """Where blocks that follow each other are among all planes."""
    return slice(blocks[0].plane.index, blocks[-1].plane.index + 1)


def _maxima(blob: CacheGenBlob) -> np.ndarray:
    """float32 ``[2L, T]``"""
    maxima: np.ndarray = np.concatenate([blob.key_maxima, blob.value_maxima])[..., 0].astype(np.float32)
    return maxima
