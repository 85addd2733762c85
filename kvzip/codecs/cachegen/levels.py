"""Several quality levels in one block: the coder's symbols, and refinements of them by three.

    REF1, REF2  the digits of the first and the second refinement, five tokens a byte: 1.6 bits a number

A decoder may stop at any of them, and a file may leave them out from some block on: levels share all that they can. The
kernels are in kernels/cachegen_levels.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvzip.cache import Block
from kvzip.codecs.base import Batch, Errors, Sections
from kvzip.codecs.cachegen.coder import levels_of
from kvzip.codecs.cachegen.symbols import TOKEN_SECTION, read_tokens
from kvzip.codecs.cachegen.tokens import Tokens, element_suffix, tiles_of
from kvzip.coding.rans import LANES, groups_of
from kvzip.coding.sections import SectionReader, as_bytes, corrupt_block, total_errors
from kvzip.devices.base import Array, Device
from kvzip.devices.descriptors import describe_planes

DIGITS = 5
TAGS = ("REF1", "REF2")
MOST_BINS = 32
"""Of the coarsest level: rounding its numbers to bfloat16 must not hide their symbols."""

REFINEMENTS = np.dtype([("digits", np.uint64, (len(TAGS),)), ("levels", np.uint32), ("count", np.uint32)])
"""The host side of ``struct Refinements``."""


def section_bytes(block: Block) -> int:
    """Bytes of each refinement of a block."""
    return -(-block.tokens // DIGITS) * groups_of(block.plane) * LANES


def encode(batch: Batch, bins: Sequence[int], sinks: int, count: int, device: Device) -> list[tuple[Sections, Errors]]:
    """``count`` refinements of every block, and the errors of the finest."""
    groups, tokens = groups_of(batch.blocks[0].plane), Tokens.of(batch, bins, sinks, device)
    digits = [[device.xp.empty(section_bytes(block), np.uint8) for _ in range(count)] for block in batch.blocks]
    errors = device.scratch("cachegen.errors", (len(batch.blocks), groups, 3), np.float32)
    device.launch(
        f"cachegen_refine_encode_{element_suffix(batch)}", len(batch.blocks) * groups, tokens.planes,
        device.to_device(_describe(bins, [[device.address(array) for array in arrays] for arrays in digits])),
        tokens.scales, tokens.exact, errors, np.uint32(groups), np.uint32(tokens.tiles),
    )  # fmt: skip
    sums = device.to_host(errors)
    return [
        ({tag: as_bytes(array) for tag, array in zip(TAGS, arrays, strict=False)}, Errors(*total_errors(sums[i])))
        for i, arrays in enumerate(digits)
    ]


def split(sections: Sections, block: Block) -> tuple[dict[str, Array], dict[str, Array]]:
    """A block's own sections and its refinements. Raises ``CorruptError`` if one lacks the one before."""
    refinements = {tag: sections[tag] for tag in TAGS if tag in sections}
    if tuple(refinements) != TAGS[: len(refinements)]:
        raise corrupt_block(block, f"section {next(iter(refinements))} refines what is not there")
    return {tag: section for tag, section in sections.items() if tag not in refinements}, refinements


def refine(
    batch: Batch, bins: Sequence[int], token_sections: Sequence[Array], refinements: Sequence[Sections], device: Device
) -> None:
    """Refine a decoded batch in place, each block by as many ``refinements`` as it has.

    ``token_sections`` are the blocks' ``TOKN``, which their decoder has found sound.
    """
    groups, tokens = groups_of(batch.blocks[0].plane), np.zeros(len(batch.blocks), TOKEN_SECTION)
    addresses = []
    for i, (block, parts) in enumerate(zip(batch.blocks, refinements, strict=True)):
        reader = SectionReader(block, {"TOKN": token_sections[i], **parts}, device)
        tokens["words"][i], tokens["word_count"][i] = reader.array("TOKN", 4)
        addresses.append([reader.array(tag, 1, exactly=section_bytes(block))[0] for tag in parts])
    maxima, exact, _ = read_tokens(batch, tokens, device)
    device.launch(
        f"cachegen_refine_{element_suffix(batch)}", len(batch.blocks) * groups,
        device.to_device(describe_planes(batch.arrays, device)), device.to_device(_describe(bins, addresses)),
        maxima, exact, np.uint32(groups), np.uint32(tiles_of(batch.blocks)),
    )  # fmt: skip


def _describe(bins: Sequence[int], addresses: Sequence[Sequence[int]]) -> np.ndarray:
    described = np.zeros(len(bins), REFINEMENTS)
    described["levels"] = [levels_of(b) for b in bins]
    described["count"] = [len(of_block) for of_block in addresses]
    for fields, of_block in zip(described, addresses, strict=True):
        fields["digits"][: len(of_block)] = of_block
    return described
