"""A KV cache to what LMCache's CacheGen makes of it, and back, bit for bit.

Caches are arrays ``[layers, 2, tokens, heads, head_dim]`` of bfloat16, float16 or float32, on the device, whose last
axis is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch
from kvzip.codecs.cachegen import symbols as planes_of_symbols
from kvzip.codecs.cachegen.tokens import TILE, Tokens
from kvzip.coding import bins as schedule
from kvzip.devices.base import Array, Device
from kvzip.lmcache.blob import CacheGenBlob
from kvzip.lmcache.streams import decode_symbols, encode_symbols


def lmcache_bins(layers: int) -> tuple[list[int], list[int]]:
    """LMCache's bins per layer, for keys and for values."""
    keys, values = (
        [schedule.lookup(schedule.lmcache(layers, kind), layer) for layer in range(layers)] for kind in ("key", "value")
    )
    return keys, values


def encode(kv: Array, key_bins: Sequence[int], value_bins: Sequence[int], device: Device) -> CacheGenBlob:
    """What LMCache's serializer makes of ``kv``; every stream is whole, where LMCache cuts at 256 bytes.

    Raises ``LimitError`` for more than 65535 tokens.
    """
    layers, _, tokens, heads, head_dim = kv.shape
    batch = _batch([kv[layer, which] for which in (0, 1) for layer in range(layers)])
    bins = [*key_bins, *value_bins]
    symbols = planes_of_symbols.symbol_scratch(batch, device)
    of_tokens = Tokens.of(batch, 0, device)
    planes_of_symbols.quantize(batch, bins, of_tokens, symbols, device)
    tables, chunks = encode_symbols(symbols, tokens, heads * head_dim, device)
    maxima = device.to_host(of_tokens.maxima)[:, :tokens, None].astype(kv.dtype)
    return CacheGenBlob(chunks, tables, maxima[:layers], maxima[layers:], heads, head_dim)


def decode(
    blob: CacheGenBlob, key_bins: Sequence[int], value_bins: Sequence[int], device: Device, dtype: Any = None
) -> Array:
    """The cache that LMCache's deserializer makes of a blob, in ``dtype`` or the dtype of its max tensors."""
    return _decode(blob, [*key_bins, *value_bins], device, dtype)[0]


def decode_checked(
    blob: CacheGenBlob, key_bins: Sequence[int], value_bins: Sequence[int], device: Device
) -> tuple[Array, np.ndarray]:
    """:func:`decode`, and which tokens, bool ``[2L, T]``, would not get their symbols back by quantizing it again.

    There are none in what LMCache writes: its largest channel has the first or the last symbol, and rounding to the
    cache's type moves no value by half a symbol. Tokens with NaN or Inf, which codecs keep exact, do not count.
    """
    bins = [*key_bins, *value_bins]
    kv, batch, symbols = _decode(blob, bins, device, None)
    tokens, again = Tokens.of(batch, 0, device), device.xp.empty_like(symbols)
    planes_of_symbols.quantize(batch, bins, tokens, again, device)
    rows, channels = blob.tokens, blob.heads * blob.head_dim
    lost = device.to_host((symbols != again)[:, :rows, :channels].any(axis=2))
    lost = lost | (device.to_host(tokens.maxima)[:, :rows] != _maxima(blob))
    for plane, exact in enumerate(tokens.exact_tokens(device)):
        lost[plane, exact] = False
    return kv, lost


def _decode(blob: CacheGenBlob, bins: Sequence[int], device: Device, dtype: Any) -> tuple[Array, Batch, Array]:
    """The cache, as a batch too, and its symbols."""
    shape = (blob.layers, 2, blob.tokens, blob.heads, blob.head_dim)
    kv = device.xp.empty(shape, dtype or blob.key_maxima.dtype)
    batch = _batch([kv[layer, which] for which in (0, 1) for layer in range(blob.layers)])
    symbols = planes_of_symbols.symbol_scratch(batch, device)
    decode_symbols(blob.tables, blob.chunks, symbols, blob.heads * blob.head_dim, device)
    tiles = -(-blob.tokens // TILE)
    maxima = np.zeros((2 * blob.layers, tiles * TILE), np.float32)
    maxima[:, : blob.tokens] = _maxima(blob)
    planes_of_symbols.dequantize(
        batch, bins, np.zeros(len(maxima), planes_of_symbols.TOKEN_SECTION), device.to_device(maxima),
        device.to_device(np.zeros((len(maxima), tiles), np.uint32)), symbols, device,
    )  # fmt: skip
    return kv, batch, symbols


def _maxima(blob: CacheGenBlob) -> np.ndarray:
    """float32 ``[2L, T]``"""
    return np.concatenate([blob.key_maxima, blob.value_maxima])[..., 0].astype(np.float32)


def _batch(arrays: list[Array]) -> Batch:
    """A batch of one block per plane, keys of all layers first."""
    blocks = []
    for index, array in enumerate(arrays):
        tokens, heads, head_dim = array.shape
        which, layer = divmod(index, len(arrays) // 2)
        plane = Plane(index, layer, ("key", "value")[which], tokens, heads, head_dim, array.dtype.name)
        blocks.append(Block((plane,), 0, tokens))
    return Batch(blocks, arrays)
