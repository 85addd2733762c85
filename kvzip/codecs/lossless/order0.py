"""Bytes: order-0 rANS with exact tables, one per position of a byte in its number.

    FREQ  number of classes (u32); per class: a map of 256 bits of the bytes that occur, their frequencies (u16)
    STAT  per strip of 64 KiB: length of its stream, final states
    STRM  the streams

The kernels are in kernels/bytes.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvzip.cache import Block
from kvzip.codecs.base import Batch, Sections
from kvzip.codecs.raw import Raw
from kvzip.coding import rans
from kvzip.coding.sections import SectionReader, as_bytes, corrupt_block
from kvzip.coding.tables import SCALE, SCALE_BITS, log2
from kvzip.devices.base import Array, Device

STRIP = 1 << 16
CLASSES = (1, 2, 4, 8)

BLOCK = np.dtype(
    [(name, np.uint64) for name in ("bytes", "tables", "states", "words")]
    + [(name, np.uint32) for name in ("count", "word_count", "classes", "reserved")]
)
"""The host side of ``struct BytesBlock``."""


def encode(arrays: Sequence[Array], itemsize: int, device: Device) -> list[Sections]:
    """The sections of each byte array. Numbers have ``itemsize`` bytes; for 1 the number of classes is searched."""
    if not arrays:
        return []
    chosen = [_choose_frequencies(array, itemsize, device) for array in arrays]
    tables = [device.to_device(_entries(frequencies)) for frequencies in chosen]
    strips = max(_strips(array.size) for array in arrays)
    states = device.xp.empty((len(arrays), strips, rans.STATE_WORDS), np.uint32)
    blocks = np.zeros(len(arrays), BLOCK)
    blocks["bytes"] = [device.address(array) for array in arrays]
    blocks["tables"] = [device.address(table) for table in tables]
    blocks["states"] = device.address(states) + np.arange(len(arrays)) * (strips * rans.STATE_WORDS * 4)
    blocks["count"] = [array.size for array in arrays]
    blocks["classes"] = [len(frequencies) for frequencies in chosen]
    capacity = rans.word_capacity(STRIP // rans.LANES)
    words = device.scratch("order0.words", (len(arrays) * strips, capacity), np.uint16)
    device.launch(
        "bytes_encode", len(arrays) * strips, device.to_device(blocks), words, np.uint32(strips), np.uint32(capacity)
    )
    lengths = device.to_host(states[:, :, 0]).astype(np.int64)
    for row, array in zip(lengths, arrays, strict=True):
        row[_strips(array.size) :] = 0
    streams, starts = rans.gather_runs(words, lengths.reshape(-1), capacity, strips, device, from_end=True)
    return [
        {
            "FREQ": device.to_device(_pack(chosen[i])),
            "STAT": as_bytes(states[i, : _strips(array.size)]),
            "STRM": streams[starts[i] : starts[i + 1]],
        }
        for i, array in enumerate(arrays)
    ]


def decode(batch: Batch, sections: Sequence[Sections], device: Device) -> None:
    """Fill ``batch.arrays``. Raises CorruptError on anything that does not fit."""
    strips = max(_strips(block.nbytes) for block in batch.blocks)
    decoded = [device.xp.empty(block.nbytes, np.uint8) for block in batch.blocks]
    blocks, tables = np.zeros(len(batch.blocks), BLOCK), []
    for fields, block, parts, out in zip(blocks, batch.blocks, sections, decoded, strict=True):
        reader = SectionReader(block, parts, device)
        reader.array("FREQ", 2)
        frequencies = _unpack(block, np.asarray(device.to_host(parts["FREQ"])))
        tables.append(device.to_device(_slots(frequencies)))
        fields["bytes"], fields["count"] = device.address(out), block.nbytes
        fields["tables"], fields["classes"] = device.address(tables[-1]), len(frequencies)
        fields["states"], _ = reader.array("STAT", 4, exactly=_strips(block.nbytes) * rans.STATE_WORDS)
        fields["words"], fields["word_count"] = reader.array("STRM", 2)
        reader.done()
    status = device.scratch("order0.status", (len(batch.blocks), strips), np.uint32)
    device.launch("bytes_decode", len(batch.blocks) * strips, device.to_device(blocks), status, np.uint32(strips))
    rans.check_status(device.to_host(status), batch)
    Raw().decode(batch, [{"DATA": out} for out in decoded], device)


def _strips(nbytes: int) -> int:
    return -(-nbytes // STRIP)


def _choose_frequencies(array: Array, itemsize: int, device: Device) -> np.ndarray:
    """Frequencies int64 ``[classes, 256]`` that make the array smallest, tables included."""
    xp = device.xp
    counted = np.stack([np.asarray(device.to_host(xp.bincount(array[c::8], minlength=256))) for c in range(8)])
    best, best_cost = np.empty(0), None
    for classes in CLASSES if itemsize == 1 else (min(itemsize, CLASSES[-1]),):
        counts = counted.reshape(8 // classes, classes, 256).sum(axis=0)
        frequencies = _frequencies(counts)
        cost = (
            int((counts * (SCALE_BITS * 256 - log2(np.maximum(frequencies, 1)))).sum()) // 2048
            + _pack(frequencies).size
        )
        if best_cost is None or cost < best_cost:
            best, best_cost = frequencies, cost
    return best


def _frequencies(counts: np.ndarray) -> np.ndarray:
    """Frequencies that sum to SCALE in each class: at least 1 for what occurs, else 0. An empty class has byte 0."""
    counts = counts.astype(np.int64)
    counts[counts.sum(axis=1) == 0, 0] = 1
    occurs = counts > 0
    share = counts * (SCALE - occurs.sum(axis=1, keepdims=True)) // counts.sum(axis=1, keepdims=True)
    frequencies: np.ndarray = share + occurs
    # What rounding left over goes to the likeliest byte, the first of equals.
    likeliest = np.argmax(frequencies, axis=1)
    frequencies[np.arange(len(counts)), likeliest] += SCALE - frequencies.sum(axis=1)
    return frequencies


def _pack(frequencies: np.ndarray) -> np.ndarray:
    parts = [np.array([len(frequencies)], np.uint32).view(np.uint8)]
    for row in frequencies:
        parts += [np.packbits(row > 0, bitorder="little"), row[row > 0].astype(np.uint16).view(np.uint8)]
    return np.concatenate(parts)


def _unpack(block: Block, packed: np.ndarray) -> np.ndarray:
    classes = int(packed[:4].view(np.uint32)[0]) if packed.size >= 4 else 0
    if classes not in CLASSES:
        raise corrupt_block(block, f"section FREQ has {classes} classes")
    frequencies, at = np.zeros((classes, 256), np.int64), 4
    for row in frequencies:
        occurs = np.unpackbits(packed[at : at + 32], bitorder="little").astype(bool)
        at += 32
        end = at + 2 * int(occurs.sum())
        if occurs.size < 256 or end > packed.size:
            raise corrupt_block(block, "section FREQ ends early")
        row[occurs] = packed[at:end].view(np.uint16)
        at = end
        if row.sum() != SCALE:
            raise corrupt_block(block, f"the frequencies of section FREQ sum to {row.sum()}, expected {SCALE}")
    if at != packed.size:
        raise corrupt_block(block, f"section FREQ has {packed.size} bytes, expected {at}")
    return frequencies


def _entries(frequencies: np.ndarray) -> np.ndarray:
    """What the encoder needs of each byte (``RansEntry`` of kernels/rans.h), uint32 ``[classes * 256 + 1, 2]``: its
    lower bound, its frequency from bit 16 on; (2^32 - 1) / frequency. The last entry, for no byte, costs nothing.
    """
    low = np.append(np.cumsum(frequencies, axis=1) - frequencies, 0)
    frequency = np.append(frequencies, SCALE)
    return np.stack([low | frequency << 16, 0xFFFFFFFF // np.maximum(frequency, 1)], axis=1).astype(np.uint32)


def _slots(frequencies: np.ndarray) -> np.ndarray:
    """What the decoder needs of each slot, uint32 ``[classes, SCALE]``: byte, frequency less 1, offset above its lower
    bound.
    """
    slots = np.empty((len(frequencies), SCALE), np.uint32)
    low = np.cumsum(frequencies, axis=1) - frequencies
    for row, frequency, start in zip(slots, frequencies, low, strict=True):
        byte = np.repeat(np.arange(256), frequency)
        row[:] = byte | (frequency[byte] - 1) << 8 | (np.arange(SCALE) - start[byte]) << 20
    return slots
