"""LMCache's arithmetic coder: tables, streams and their lengths, as thin calls into kernels/range_coder.cu.

A block is one plane and up to 65535 tokens: one table per channel, one stream per channel and 256 tokens. Symbols lie
as uint8 ``[tokens, groups * 32]``, tables as uint16 ``[groups, 33, 32]`` (a group's 32 channels side by side), lengths
as uint16 ``[streams, groups, 32]``. Channels beyond the last are idle: symbol 0, length 0.
"""

from __future__ import annotations

import numpy as np

from kvzip.coding.rans import gather_runs
from kvzip.coding.sections import as_bytes
from kvzip.devices.base import Array, Device

LANES = 32
TOP = 65535
"""The last entry of a table; it stands for 65536."""
SYMBOLS = 32
STREAM_TOKENS = 256
STREAM_BYTES = STREAM_TOKENS * 18 // 8 + 8
"""The most bytes of a stream: a symbol takes 18 bits at most."""

MOST_TOKENS = (1 << 16) - 1
"""Tokens of a block: counts have 16 bits."""

COUNT_WIDTH_BITS = 5
COUNT_WORDS = COUNT_WIDTH_BITS + 16 * SYMBOLS

BLOCK = np.dtype(
    [(name, np.uint64) for name in ("symbols", "tables", "lengths", "bytes", "byte_count")]
    + [("tokens", np.uint32), ("channels", np.uint32)]
)
"""The host side of ``struct RangeBlock``."""

PACKED = np.dtype([("words", np.uint64), ("word_count", np.uint32), ("alphabet", np.uint32)])
"""The host side of ``struct PackedCounts``."""


def streams_of(tokens: int) -> int:
    """Streams of a channel."""
    return -(-tokens // STREAM_TOKENS)


def count_symbols(blocks: np.ndarray, groups: int, device: Device) -> Array:
    """How often each symbol occurs: uint16 ``[blocks, groups, 32 symbols, 32]``."""
    counts = device.xp.empty((len(blocks), groups, SYMBOLS, LANES), np.uint16)
    device.launch("range_count", len(blocks) * groups, device.to_device(blocks), counts, np.uint32(groups))
    return counts


def make_tables(blocks: np.ndarray, counts: Array, groups: int, device: Device) -> Array:
    """LMCache's tables for ``counts``: uint16 ``[blocks, groups, 33, 32]``; ``blocks["tables"]`` is set to them."""
    tables = device.xp.empty((len(blocks), groups, SYMBOLS + 1, LANES), np.uint16)
    device.launch("range_tables", len(blocks) * groups, device.to_device(blocks), counts, tables, np.uint32(groups))
    blocks["tables"] = device.address(tables) + np.arange(len(blocks)) * (groups * (SYMBOLS + 1) * LANES * 2)
    return tables


def encode_streams(blocks: np.ndarray, groups: int, device: Device) -> tuple[Array, np.ndarray, Array]:
    """Code the symbols of all blocks; ``blocks["lengths"]`` is set.

    Returns:
        All streams (uint8), where each block starts in them, with the end, and the lengths ``[blocks, streams, groups,
        32]``.
    """
    streams = streams_of(int(blocks["tokens"].max()))
    warps = len(blocks) * streams * groups
    lengths = device.xp.zeros((len(blocks), streams, groups, LANES), np.uint16)
    blocks["lengths"] = device.address(lengths) + np.arange(len(blocks)) * (streams * groups * LANES * 2)
    slots = device.scratch("range.slots", (warps, LANES, STREAM_BYTES), np.uint8)
    on_device, shape = device.to_device(blocks), (np.uint32(groups), np.uint32(streams))
    device.launch("range_encode", warps, on_device, slots, *shape)
    ends = np.concatenate([[0], np.cumsum(device.to_host(lengths).reshape(warps, LANES).sum(axis=1, dtype=np.int64))])
    joined = device.xp.empty(int(ends[-1]), np.uint8)
    targets = (device.address(joined) + ends[:-1]).astype(np.uint64)
    device.launch("range_gather", warps, on_device, slots, device.to_device(targets), *shape)
    return joined, ends[:: streams * groups], lengths


def decode_streams(blocks: np.ndarray, groups: int, device: Device) -> Array:
    """Fill the symbols of all blocks from their streams; 128 readable bytes must follow each block's.

    Returns:
        A status per block and warp, uint32 ``[blocks, streams * groups]``: see :func:`kvzip.coding.rans.check_status`.
    """
    streams = streams_of(int(blocks["tokens"].max()))
    status = device.xp.empty((len(blocks), streams * groups), np.uint32)
    device.launch("range_decode", status.size, device.to_device(blocks), status, np.uint32(groups), np.uint32(streams))
    return status


def pack_counts(blocks: np.ndarray, alphabets: np.ndarray, counts: Array, groups: int, device: Device) -> list[Array]:
    """The counts of each block as they are stored, uint8: ``alphabets`` (uint32) says how many symbols can occur."""
    warps = len(blocks) * groups
    slots = device.scratch("range.count_slots", (warps, COUNT_WORDS), np.uint32)
    used = device.scratch("range.count_words", (warps,), np.uint32)
    device.launch(
        "range_pack_counts", warps, device.to_device(blocks), device.to_device(alphabets), counts, slots, used,
        np.uint32(groups),
    )  # fmt: skip
    halves = device.to_host(used).astype(np.int64) * 2
    packed, starts = gather_runs(slots, halves, COUNT_WORDS * 2, groups, device)
    return [as_bytes(packed[starts[i] : starts[i + 1]]) for i in range(len(blocks))]


def unpack_counts(blocks: np.ndarray, packed: np.ndarray, groups: int, device: Device) -> tuple[Array, Array]:
    """The mirror: counts, zeros where the stored ones are damaged, and a status per block and group."""
    counts = device.xp.empty((len(blocks), groups, SYMBOLS, LANES), np.uint16)
    status = device.xp.empty((len(blocks), groups), np.uint32)
    device.launch(
        "range_unpack_counts", len(blocks) * groups, device.to_device(blocks), device.to_device(packed), counts, status,
        np.uint32(groups),
    )  # fmt: skip
    return counts, status
