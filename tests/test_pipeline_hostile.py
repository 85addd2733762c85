"""A crafted file, sound in every checksum, may say anything: it is decoded or refused by name, never anything else."""

from __future__ import annotations

import io
import json
import random
import time
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
import numpy as np
import pytest

import kvzip
from kvzip.cache import Block
from kvzip.container import Header, Reader, StreamReader, Writer
from kvzip.container import format as fmt
from kvzip.devices import get_device
from kvzip.errors import KvzipError
from kvzip.pipeline import StoredCache, collect
from tests.tensor_files import Pipe

NUMBERS = (0, 1, 2, 3, 5, 8, 16, -1, 2**31 - 1, 2**40)
WORDS = (
    "key",
    "value",
    "bytes",
    "float16",
    "uint8",
    "float32",
    "raw",
    "cachegen",
    "",
    "H,T,D",
    "T,H,D",
    "T,C",
    "0-1:32",
)
PARTS = ((None, None), (None, range(5, 30)), (range(1, 2), None))
LARGEST = 1 << 26


def mutated(value: Any, rng: random.Random) -> Any:
    """``value`` with one thing in it changed, dropped or repeated."""
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        rest = {other: item for other, item in value.items() if other != key}
        return rest if rng.random() < 0.1 else {**value, key: mutated(value[key], rng)}
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        new = rng.choice([[], [value[at]] * 2, *[[mutated(value[at], rng)]] * 12])
        return [*value[:at], *new, *value[at + 1 :]]
    if isinstance(value, int):
        return rng.choice([*NUMBERS, value + 1, value - 1, value * 2])
    return rng.choice(WORDS) if isinstance(value, str) else rng.choice([0, None, "x", []])


def forged(genuine: bytes, rng: random.Random) -> bytes | None:
    """The frames of a genuine file under a changed header; None if not even a writer takes that header."""
    reader = Reader.open(io.BytesIO(genuine))
    head, body = reader.header.to_bytes()
    value = json.loads(head)
    for _ in range(rng.choice([1, 1, 2, 3])):
        value = mutated(value, rng)
    frames = reader.read_frames(list(reader.index))
    by_place = {(frame.entry.group, frame.entry.block.start): frame for frame in frames}
    out = io.BytesIO()
    try:
        header = Header.from_bytes(fmt.canonical_json(value), body)
        if sum(plane.nbytes for plane in header.planes) > LARGEST:
            return None
        writer = Writer(out, header)
        for number, group in enumerate(header.groups):
            tokens, codec = group[0].tokens, header.plane_codec[group[0].index]
            step = max(header.block_tokens, tokens // 100) if group[0].kind != "bytes" else max(1, tokens)
            for start in range(0, tokens, step):
                frame = by_place.get((number, start), frames[0])
                writer.write_block(Block(group, start, min(tokens, start + step)), codec, frame.sections)
        writer.close()
    except (KvzipError, ValueError):
        return None
    return out.getvalue()


@pytest.mark.parametrize("codec", ["raw", "cachegen"])
def test_a_forged_header_is_decoded_or_refused_by_name(codec: str) -> None:
    rng = random.Random(f"kvzip {codec}")
    device = get_device("cpu", 1)
    values = np.random.default_rng(0).standard_normal((2, 40, 8)).astype("bfloat16")
    arrays = {f"layers.{layer}.{kind}": values for layer in range(2) for kind in ("key", "value")}
    genuine = kvzip.compress({**arrays, "x": np.arange(30)}, codec=codec, block_tokens=16, device=device)
    outcomes = {"decoded": 0, "refused": 0}
    for _ in range(400):
        data = forged(genuine, rng)
        for stream in (False, True) if data else ():
            try:
                reader = StreamReader(io.BytesIO(data)) if stream else Reader.open(io.BytesIO(data))
                stored = StoredCache(reader)
                found = collect(stored, stored.select(*rng.choice(PARTS)), device=device)
                outcomes["decoded"] += len(found) > 0
            except KvzipError as error:
                assert error.code != type(error).default_code
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 20


def test_tiny_blocks_cost_no_more_than_their_number() -> None:
    """A few megabytes of blocks of one token each would keep a decoder that looks at all for each busy for hours."""
    device = get_device("cpu", 1)
    values = np.zeros((1, 12000, 1), np.float16)
    begin = time.process_time()
    packed = kvzip.compress(
        {"layers.0.key": values, "layers.0.value": values}, codec="raw", block_tokens=1, device=device
    )
    assert len(kvzip.decompress(packed, device=device)) == 2
    kvzip.decompress(Pipe(packed), io.BytesIO(), device=device)
    # Linear: three seconds on a slow core. Square: three minutes.
    assert time.process_time() - begin < 20
