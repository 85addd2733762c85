"""Symbols of all planes to LMCache's tables and chunks of streams, and back.

Symbols are uint8 ``[planes, rows, groups * 32]`` on the device, ``rows`` at least the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvzip.coding import range_coder
from kvzip.coding.range_coder import LANES, MOST_TOKENS, STREAM_TOKENS, SYMBOLS
from kvzip.coding.sections import padded
from kvzip.devices.base import Array, Device
from kvzip.errors import CorruptError, LimitError
from kvzip.lmcache.blob import StreamChunk


def encode_symbols(
    symbols: Array, tokens: int, channels: int, device: Device
) -> tuple[np.ndarray, tuple[StreamChunk, ...]]:
    """LMCache's tables, uint16 ``[planes, channels, 33]``, and streams.

    Raises ``LimitError`` for more than 65535 tokens: cut the cache.
    """
    if tokens > MOST_TOKENS:
        raise LimitError(
            f"one call of LMCache's coder takes at most {MOST_TOKENS} tokens, not {tokens}; cut the cache into chunks",
            code="range-block",
        )
    planes, _, width = symbols.shape
    groups = width // LANES
    whole = _describe(symbols, 0, tokens, channels, device)
    counts = range_coder.count_symbols(whole, groups, device)
    tables = range_coder.make_tables(whole, counts, groups, device)
    chunks = []
    for start in range(0, tokens, STREAM_TOKENS):
        count = min(STREAM_TOKENS, tokens - start)
        blocks = _describe(symbols, start, count, channels, device)
        blocks["tables"] = whole["tables"]
        streams, _, lengths = range_coder.encode_streams(blocks, groups, device)
        by_channel = device.to_host(lengths).reshape(planes, width)[:, :channels].astype(np.int32)
        chunks.append(StreamChunk(device.to_host(streams), by_channel, count))
    by_channel = device.to_host(tables).swapaxes(2, 3).reshape(planes, width, SYMBOLS + 1)[:, :channels]
    return np.ascontiguousarray(by_channel), tuple(chunks)


def decode_symbols(
    tables: np.ndarray, chunks: tuple[StreamChunk, ...], symbols: Array, channels: int, device: Device
) -> None:
    """Fill ``symbols``; tables and chunks as :func:`kvzip.lmcache.blob.read_blob` has checked them."""
    planes, _, width = symbols.shape
    groups = width // LANES
    # Idle lanes have a table too: any will do.
    filled = np.broadcast_to(np.arange(SYMBOLS + 1, dtype=np.uint16), (planes, width, SYMBOLS + 1)).copy()
    filled[:, :channels] = tables
    filled[..., -1] = range_coder.TOP
    by_group = np.ascontiguousarray(filled.reshape(planes, groups, LANES, SYMBOLS + 1).swapaxes(2, 3))
    on_device = device.to_device(by_group)
    start = 0
    for number, chunk in enumerate(chunks):
        lengths = np.zeros((planes, groups * LANES), np.uint16)
        lengths[:, :channels] = chunk.lengths
        ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64))
        streams, lengths_on_device = padded(chunk.streams, device), device.to_device(lengths)
        blocks = _describe(symbols, start, chunk.tokens, channels, device)
        blocks["tables"] = device.address(on_device) + np.arange(planes) * by_group[0].nbytes
        blocks["lengths"] = device.address(lengths_on_device) + np.arange(planes) * lengths[0].nbytes
        blocks["byte_count"] = lengths.sum(axis=1)
        blocks["bytes"] = device.address(streams) + ends - blocks["byte_count"]
        if device.to_host(range_coder.decode_streams(blocks, groups, device)).any():
            raise CorruptError(f"chunk {number}: the streams do not fit their lengths", code="lmcache-lengths")
        start += chunk.tokens


def join_planes(parts: Sequence[tuple[StreamChunk, ...]]) -> tuple[StreamChunk, ...]:
    """The chunks of all planes, of those of planes that follow each other."""
    return tuple(
        StreamChunk(
            np.concatenate([chunk.streams for chunk in chunks]),
            np.concatenate([chunk.lengths for chunk in chunks]),
            chunks[0].tokens,
        )
        for chunks in zip(*parts, strict=True)
    )


def cut_planes(chunk: StreamChunk, planes: slice) -> StreamChunk:
    """The mirror: what a chunk has of some planes."""
    ends = np.cumsum(chunk.lengths.sum(axis=1, dtype=np.int64))
    lengths = chunk.lengths[planes]
    stop = int(ends[planes][-1])
    return StreamChunk(chunk.streams[stop - int(lengths.sum(dtype=np.int64)) : stop], lengths, chunk.tokens)


def _describe(symbols: Array, start: int, count: int, channels: int, device: Device) -> np.ndarray:
    """Descriptors of ``count`` tokens from ``start`` on of every plane."""
    planes, rows, width = symbols.shape
    blocks = np.zeros(planes, range_coder.BLOCK)
    blocks["symbols"] = device.address(symbols) + (np.arange(planes) * rows + start) * width
    blocks["tokens"], blocks["channels"] = count, channels
    return blocks
