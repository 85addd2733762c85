"""What every codec owes the pipeline: a block's bytes are its own, whatever is coded before, after or beside it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fuzz.decoders import OPTIONS, numbers
from kvzip.cache import Block, Plane
from kvzip.codecs import available_codecs, get_codec
from kvzip.codecs.base import Batch, Codec
from kvzip.devices.base import Device
from kvzip.errors import UsageError

SPECS = [spec for name in available_codecs() for spec in OPTIONS.get(name, (name,))]
GEOMETRY = (150, 2, 32)


def blocks_of(spec: str, seed: int) -> tuple[Codec, list[tuple[Block, list[np.ndarray]]]]:
    """A bound codec and its groups of planes, with numbers, some of them NaN, infinite, zero or tiny."""
    kinds = [(layer, kind) for layer in range(2) for kind in ("key", "value")]
    planes = [Plane(i, layer, kind, *GEOMETRY, "bfloat16") for i, (layer, kind) in enumerate(kinds)]
    try:
        codec = get_codec(spec).bind(planes)
    except UsageError as error:
        pytest.skip(f"{spec} needs more than a cache: {error}")
    groups = [tuple(group) for group in codec.groups(planes)]
    return codec, [
        (Block(group, 0, GEOMETRY[0]), [special(plane, seed + plane.index) for plane in group]) for group in groups
    ]


def special(plane: Plane, seed: int) -> np.ndarray:
    """Numbers of which other tokens than in other planes are none, so that no plane's masks pass for another's."""
    values = np.roll(numbers(plane, seed), seed, axis=0)
    if plane.kind == "value":
        values[np.isnan(values) | np.isinf(values)] = 1
    return values


def encoded(codec: Codec, parts: list[tuple[Block, list[np.ndarray]]], device: Device) -> list[dict[str, np.ndarray]]:
    batch = Batch([block for block, _ in parts], [array for _, arrays in parts for array in arrays])
    return [{tag: np.asarray(section) for tag, section in one.sections.items()} for one in codec.encode(batch, device)]


def content(sections: list[dict[str, np.ndarray]]) -> Iterator[dict[str, bytes]]:
    return ({tag: part.tobytes() for tag, part in one.items()} for one in sections)


@pytest.mark.parametrize("spec", SPECS)
def test_sections_outlive_the_next_encoding(spec: str, cpu: Device) -> None:
    """They wait for the writer while the next batch is coded: none may lie in memory that is used again."""
    codec, parts = blocks_of(spec, 0)
    sections = encoded(codec, parts, cpu)
    before = list(content(sections))
    encoded(codec, blocks_of(spec, 100)[1], cpu)
    assert list(content(sections)) == before


@pytest.mark.parametrize("spec", SPECS)
def test_a_block_is_coded_alike_alone_and_in_company(spec: str, cpu: Device) -> None:
    """Files do not depend on how large batches are, nor on which kinds of planes share one."""
    codec, parts = blocks_of(spec, 0)
    together = list(content(encoded(codec, parts, cpu)))
    assert together == [next(content(encoded(codec, [part], cpu))) for part in parts]
    assert together == list(content(encoded(codec, parts[::-1], cpu)))[::-1]


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_coded_together_is_decoded_together(spec: str, cpu: Device) -> None:
    """All blocks by one call, as the pipeline does it: what comes back is what each gives alone."""
    codec, parts = blocks_of(spec, 0)
    sections = [padded(one) for one in encoded(codec, parts, cpu)]

    def decode(which: list[int]) -> list[bytes]:
        blocks = [parts[i][0] for i in which]
        arrays = [np.full_like(array, 7) for i in which for array in parts[i][1]]
        codec.decode(Batch(blocks, arrays), [sections[i] for i in which], cpu)
        return [array.tobytes() for array in arrays]

    every = list(range(len(parts)))
    assert decode(every) == [array for i in every for array in decode([i])]


def padded(sections: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each section in a buffer of its own with what decoders may read behind it."""
    buffers = {tag: np.zeros(len(part) + 128, np.uint8) for tag, part in sections.items()}
    for tag, part in sections.items():
        buffers[tag][: len(part)] = part
    return {tag: buffers[tag][: len(part)] for tag, part in sections.items()}
