"""The step that gives a wanted rate or error, found by trying: the cache itself is coded at a few steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvzip.cache import Block, Plane, blocks_of
from kvzip.codecs.base import Batch, Encoded, Read
from kvzip.devices import get_device
from kvzip.errors import UsageError
from kvzip.pipeline.plan import chunks
from kvzip.pipeline.report import Tally
from kvzip.profiles.scales import OCTAVE

if TYPE_CHECKING:
    from kvzip.codecs.kvtc.codec import KvTc

SAMPLE_BYTES = 64 << 20
"""A rate is measured on so much of a cache, blocks from all layers and all of its length; an error on all of it."""

RATE_WITHIN = 0.003
ERROR_WITHIN = 6
"""Step indices below the largest that keeps the promise: 1.6 %."""

TRIES = 16
FILE_BYTES, FRAME_BYTES, SECTION_BYTES, PLANE_BYTES = 800, 88, 8, 110
"""What a container adds: once, to a frame with its place in the index, to a section, and to a plane in the headers."""


@dataclass(frozen=True)
class Outcome:
    """Bits a number that a file takes at a step, and the largest relative error of a plane."""

    bits: float
    error: float


def find_step(codec: KvTc, planes: Sequence[Plane], read: Read, block_tokens: int) -> tuple[int, str]:
    """The step index for the ``bits`` or the ``max_error`` of a bound codec, and what it gives, in words.

    Raises ``UsageError`` if no step does.
    """
    trials = _Trials(codec, planes, read, block_tokens)
    if codec.bits is not None:
        index, outcome = _search_rate(trials, codec.bits)
        return index, f"{outcome.bits:.3f} bits a number"
    assert codec.max_error is not None
    index, outcome = _search_error(trials, codec.max_error)
    return index, f"relative errors up to {outcome.error:.4g}"


def _search_rate(trials: _Trials, target: float) -> tuple[int, Outcome]:
    """Bits fall by at most 1 an octave: the next guess follows the two nearest tries."""
    from kvzip.codecs.kvtc.codec import STEPS

    low, high = STEPS[0], STEPS[-1]
    at_low = at_high = math.nan
    index = trials.codec.step_at
    for _ in range(TRIES):
        outcome = trials.run(index)
        if abs(outcome.bits / target - 1) < RATE_WITHIN or low == high:
            return index, outcome
        if outcome.bits > target:
            low, at_low = index, outcome.bits
        else:
            high, at_high = index, outcome.bits
        if high - low <= 1 and not math.isnan(at_low + at_high):
            break
        if math.isnan(at_low + at_high):
            index = round(index + OCTAVE * (outcome.bits - target) * 1.1)
        else:
            index = round(low + (high - low) * (at_low - target) / (at_low - at_high))
        index = min(max(index, low + 1), high - 1) if high - low > 1 else high
    if abs(outcome.bits / target - 1) > 0.01:
        raise UsageError(
            f"kvtc cannot give {target:g} bits a number: the nearest is {outcome.bits:.4g}", code="codec-target"
        )
    return index, outcome


def _search_error(trials: _Trials, target: float) -> tuple[int, Outcome]:
    """Errors follow the step: the guesses close in on the largest step that keeps below the target."""
    from kvzip.codecs.kvtc.codec import STEPS

    low, high = STEPS[0] - 1, STEPS[-1] + 1
    index, best = trials.codec.step_at, None
    for _ in range(TRIES):
        outcome = trials.run(index)
        if outcome.error <= target:
            low, best = index, outcome
        else:
            high = index
        if high - low <= ERROR_WITHIN:
            break
        guess = index + OCTAVE * math.log2(target / max(outcome.error, 2.0**-24))
        index = min(max(math.floor(guess), low + 1), high - 1) if low < guess < high else (low + high) // 2
    # At absurdly fine steps whole tokens are kept exact.
    if best is None or best.bits > trials.plain_bits:
        raise UsageError(
            f"kvtc cannot keep every plane's relative error within {target:g}: the numbers as they are take less room"
            + ("; a profile leaves small coefficients out, try a higher effort" if trials.codec.profile else ""),
            code="codec-target",
        )
    return low, best


class _Trials:
    """Codes a cache, or a sample of it, at any step."""

    def __init__(self, codec: KvTc, planes: Sequence[Plane], read: Read, block_tokens: int) -> None:
        self.codec = codec
        self._read = read
        self._device = get_device("cpu")
        blocks = [list(blocks_of(group, block_tokens)) for group in codec.groups(planes) if group[0].tokens]
        total = sum(block.nbytes for own in blocks for block in own)
        # One block of so many, another one in each group.
        stride = max(1, round(total / SAMPLE_BYTES)) if codec.bits is not None else 1
        self._blocks = [
            block for number, own in enumerate(blocks) for i, block in enumerate(own) if (number + i) % stride == 0
        ]
        self._planes = len(planes)
        self.plain_bits = 8 * max((plane.itemsize for plane in planes), default=4)
        self._elements = sum(plane.tokens * plane.channels for plane in planes)

    def run(self, step_at: int) -> Outcome:
        codec = self.codec.with_step(step_at)
        tally, nbytes, elements = Tally(), 0, 0
        for block, encoded in self._encode(codec.encode):
            tally.add(block, encoded.errors)
            nbytes += FRAME_BYTES + sum(SECTION_BYTES + -(-part.nbytes // 8) * 8 for part in encoded.sections.values())
            elements += block.tokens * sum(plane.channels for plane in block.planes)
        worst = max((error.relative for error in tally.totals()), default=0.0)
        if not elements:
            return Outcome(0.0, 0.0)
        headers = FILE_BYTES + PLANE_BYTES * self._planes
        return Outcome(8 * (nbytes / elements + headers / self._elements), worst)

    def _encode(self, encode: Callable[..., list[Encoded]]) -> Iterator[tuple[Block, Encoded]]:
        for blocks in chunks(self._blocks, lambda block: block.nbytes, self._device.batch_bytes):
            shapes = {(plane.dtype, plane.heads, plane.head_dim) for block in blocks for plane in block.planes}
            for shape in sorted(shapes):
                own = [b for b in blocks if (b.planes[0].dtype, b.planes[0].heads, b.planes[0].head_dim) == shape]
                arrays = [self._read(plane, block.start, block.stop) for block in own for plane in block.planes]
                if own:
                    yield from zip(own, encode(Batch(own, arrays), self._device), strict=True)
