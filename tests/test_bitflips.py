"""Every single-bit flip in a small file of each codec is detected."""

from __future__ import annotations

import io

import numpy as np
import pytest

import kvzip
from kvzip.codecs import available_codecs
from kvzip.container import Reader, StreamReader
from kvzip.devices.base import Device
from kvzip.errors import CorruptError, UnsupportedError, UsageError
from tests.containers import frames


def small_file(codec: str, cpu: Device) -> bytes:
    """A cache of 40 tokens in two blocks, with a tensor that is no KV."""
    values = np.random.default_rng(0).standard_normal((2, 40, 1, 2)).astype(np.float16)
    arrays = {"layers.0.key": values[0], "layers.0.value": values[1], "x": np.arange(2, dtype=np.uint8)}
    return kvzip.compress(arrays, codec=codec, layout="T,H,D", block_tokens=32, device=cpu)


@pytest.mark.parametrize("codec", available_codecs())
def test_every_bit_counts(codec: str, cpu: Device) -> None:
    """Whichever bit a disk or a cable turns over, both readers refuse the file; no bit is without a meaning."""
    try:
        data = small_file(codec, cpu)
    except UsageError as error:
        pytest.skip(f"{codec} needs more than a cache: {error}")
    file = io.BytesIO(data)
    damaged = file.getbuffer()
    blocks = {entry.offset: entry for entry in Reader.open(io.BytesIO(data)).index}
    sound = Reader.open(file)
    unnoticed = []
    for kind, start, length in [(b"", 0, 16), *frames(data)]:
        for bit in range(8 * start, 8 * (start + length)):
            damaged[bit >> 3] ^= 1 << (bit & 7)
            try:
                if bit % 7 == 0:
                    list(StreamReader(io.BytesIO(damaged)).frames())
                elif kind == b"DATA":  # header and index are what they were
                    sound.read_frames([blocks[start]])
                else:
                    reader = Reader.open(io.BytesIO(damaged))
                    reader.read_frames(list(reader.index))
                unnoticed.append(bit)
            except (CorruptError, UnsupportedError):
                pass
            damaged[bit >> 3] ^= 1 << (bit & 7)
    assert damaged == data
    assert unnoticed == []
