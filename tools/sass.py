"""Machine code counted: how many instructions the hot loop of a kernel takes, as nvdisasm shows it."""

from __future__ import annotations

import heapq
import re
import shutil
import site
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Through = Sequence[tuple[str, int]]
"""Patterns, and how many instructions have to match each."""

_SECTION = re.compile(r"^\.text\.(\w+):$", re.MULTILINE)
_LABEL = re.compile(r"^(\.L_x_\d+):$")
_INSTRUCTION = re.compile(r"^/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_BRANCH = re.compile(r"^(@!?U?P\w+ )?BRA\s+.*`\((\.L_x_\d+)\)$")
_END = re.compile(r"^(EXIT|RET\b|BRX)")


@dataclass
class Block:
    """Instructions that run one after the other, and the numbers of the blocks that may follow."""

    instructions: list[str] = field(default_factory=list)
    follows: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """A loop: the instructions in all of it, those on the way that was asked for, the number of markers."""

    instructions: int
    way: int
    markers: int


def disassemble(cubin: bytes) -> dict[str, list[Block]]:
    """The kernels in a cubin as control flow graphs, by name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([_nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True).stdout
    starts = [*_SECTION.finditer(text)]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    return {match[1]: _blocks(text[match.end() : end]) for match, end in zip(starts, ends, strict=True)}


def hot_loop(blocks: list[Block], marker: str, at_least: int = 1, through: Through = ()) -> Loop | None:
    """The smallest loop in which ``at_least`` so many instructions match ``marker``.

    Args:
        through: what a turn cannot do without: patterns, and how many instructions on its way match each. By default
            one marker; the way is the shortest one.
    """
    pattern, found = re.compile(marker), []
    # What only a warp that has come apart runs (behind BRA.DIV) is left out.
    for tail in sorted(_distances(blocks, 0, set(range(len(blocks))))):
        for head in blocks[tail].follows:
            if head <= tail:
                around = _natural_loop(blocks, head, tail)
                inside = set(_distances(blocks, head, around))
                marked = sum(bool(pattern.search(line)) for n in inside for line in blocks[n].instructions)
                if marked >= at_least:
                    found.append((sum(len(blocks[n].instructions) for n in inside), head, tail, inside, marked))
    if not found:
        return None
    total, head, tail, inside, marked = min(found, key=lambda loop: loop[0])
    return Loop(total, _shortest_way(blocks, head, tail, inside, through or ((marker, 1),)), marked)


def _shortest_way(blocks: list[Block], head: int, tail: int, inside: set[int], through: Through) -> int:
    """The fewest instructions of a turn that passes so many of each pattern. Raises ``ValueError`` if there is none."""
    passed = {
        n: tuple(sum(bool(re.search(pattern, line)) for line in blocks[n].instructions) for pattern, _ in through)
        for n in inside
    }

    def onwards(counts: tuple[int, ...], number: int) -> tuple[int, ...]:
        return tuple(min(c + p, most) for c, p, (_, most) in zip(counts, passed[number], through, strict=True))

    enough = tuple(most for _, most in through)
    queue = [(len(blocks[head].instructions), head, onwards((0,) * len(through), head))]
    seen = set()
    while queue:
        distance, number, counts = heapq.heappop(queue)
        if (number, counts) in seen:
            continue
        seen.add((number, counts))
        if number == tail and counts == enough:
            return distance
        for follower in blocks[number].follows:
            if follower in inside and follower != head:
                step = distance + len(blocks[follower].instructions), follower, onwards(counts, follower)
                heapq.heappush(queue, step)
    raise ValueError(f"no way through the loop passes {through}")


def _blocks(text: str) -> list[Block]:
    blocks, labels = [Block()], {}
    for raw in text.splitlines():
        line = raw.strip()
        if label := _LABEL.match(line):
            blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
        elif found := _INSTRUCTION.match(line):
            blocks[-1].instructions.append(found[1])
            if _BRANCH.match(found[1]) or _END.match(found[1]):
                blocks.append(Block())
    for number, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else ""
        branch = _BRANCH.match(last)
        if branch and branch[2] in labels:
            block.follows.append(labels[branch[2]])
        if number + 1 < len(blocks) and not _END.match(last) and not (branch and not branch[1]):
            block.follows.append(number + 1)
    return blocks


def _natural_loop(blocks: list[Block], head: int, tail: int) -> set[int]:
    """The blocks from which ``tail`` is reached without passing ``head``."""
    before = _reversed(blocks)
    inside, left = {head, tail}, [tail]
    while left:
        number = left.pop()
        if number != head:
            new = [n for n in before[number].follows if n not in inside and n >= head]
            inside.update(new)
            left += new
    return inside


def _reversed(blocks: list[Block]) -> list[Block]:
    found = [Block(block.instructions) for block in blocks]
    for number, block in enumerate(blocks):
        for follower in block.follows:
            found[follower].follows.append(number)
    return found


def _distances(blocks: list[Block], start: int, inside: set[int]) -> dict[int, int]:
    """Instructions from ``start`` to the end of each block inside that can be reached, both included."""
    found: dict[int, int] = {}
    queue = [(len(blocks[start].instructions), start)]
    while queue:
        distance, number = heapq.heappop(queue)
        if number in found:
            continue
        found[number] = distance
        for follower in blocks[number].follows:
            if follower in inside and follower not in found:
                heapq.heappush(queue, (distance + len(blocks[follower].instructions), follower))
    return found


def _nvdisasm() -> str:
    for path in _candidates():
        return str(path)
    raise FileNotFoundError("nvdisasm is not here: pip install nvidia-cuda-nvdisasm")


def _candidates() -> Iterator[Path]:
    if found := shutil.which("nvdisasm"):
        yield Path(found)
    for folder in site.getsitepackages():
        yield from sorted(Path(folder).glob("nvidia/**/bin/nvdisasm"))
