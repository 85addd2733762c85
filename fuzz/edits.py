"""Edit scripts: any bytes are a list of changes to something genuine, so that damage lands deep behind the first check.

A change is eight bytes: what to do, in which part, where in it (as a fraction of 65536) and with which number.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

STEP = struct.Struct("<BBHI")
NUMBERS = (0, 1, 2, 31, 32, 33, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 1 << 31, (1 << 32) - 1)
TOKENS = (
    *(str(n) for n in (-1, *NUMBERS, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 64, 1.5, 1e300)),
    *("null", "true", "{}", "[]", '""', '"key"', '"value"', '"bytes"', '"latent"', '"raw"', '"fp8"', '"cachegen"'),
    *('"float16"', '"bfloat16"', '"float32"', '"uint8"', '"T,H,D"', '"H,T,D"', '"0-1:32"', '"../x"', '"a"'),
    *('"F16"', '"F32"', '"F4"', '"BF16"', '"__metadata__"', '"data_offsets"', '"shape"', '"dtype"', '"\\ud800"'),
)
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|true|false|null|\[\]|\{\}')


class Step(NamedTuple):
    """One change."""

    what: int
    part: int
    where: int
    value: int


def steps(script: bytes) -> Iterator[Step]:
    """The changes of a script; bytes that make no whole change are ignored."""
    for at in range(0, len(script) - STEP.size + 1, STEP.size):
        yield Step(*STEP.unpack_from(script, at))


def edit(data: bytearray, step: Step) -> None:
    """Make one change to some bytes. Half of the kinds of change keep their length."""
    what, size, value = step.what % 16, len(data), step.value
    at = step.where * size >> 16
    if what < 12 and not size:
        return
    word = at // 4 * 4 if size >= 4 else 0
    if what < 3:
        data[at] = value & 255
    elif what < 6:
        data[at] ^= 1 << (value & 7)
    elif what < 8:
        data[word : word + 4] = value.to_bytes(4, "little")[: size - word]
    elif what == 8:
        data[word : word + 4] = NUMBERS[value % len(NUMBERS)].to_bytes(4, "little")[: size - word]
    elif what == 9:
        old = int.from_bytes(data[word : word + 4], "little")
        data[word : word + 4] = ((old + value % 9 - 4) & 0xFFFFFFFF).to_bytes(4, "little")[: size - word]
    elif what == 10:
        count = min(size - at, 1 + (value >> 8) % 200)
        data[at : at + count] = bytes([value & 255]) * count
    elif what == 11:
        source = (value & 0xFFFF) * size >> 16
        count = min(size - at, size - source, 1 + (value >> 16) % 64)
        data[at : at + count] = data[source : source + count]
    elif what == 12:
        del data[at:]
    elif what == 13:
        del data[at : at + 1 + value % 16]
    elif what == 14:
        data[at:at] = bytes([value >> 8 & 255]) * (1 + value % 64)
    else:
        data += value.to_bytes(4, "little") * (1 + value % 9)


def edit_json(text: bytearray, step: Step) -> None:
    """Put another value in the place of a number, a word or an empty list; or change a byte like :func:`edit`."""
    found = list(_TOKEN.finditer(text)) if step.what < 224 else []
    if not found:
        edit(text, step)
        return
    chosen = found[step.where * len(found) >> 16]
    start, stop = chosen.span()
    if step.what % 8 == 7:
        other = found[step.value % len(found)]
        text[start:stop] = other[0]
    elif step.what % 8 == 6 and chosen[0].isdigit():
        text[start:stop] = str(max(0, int(chosen[0]) + step.value % 33 - 16)).encode()
    else:
        text[start:stop] = TOKENS[step.value % len(TOKENS)].encode()
