"""The work of one comparison, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvzip.bench.ladder import Candidate
from kvzip.bench.measuring import Judge, measure
from kvzip.bench.peers import Peer, copying, measure_peer
from kvzip.bench.rows import Row
from kvzip.bench.sample import Sample
from kvzip.devices.base import Device


class Step(NamedTuple):
    """What makes one row, and its name."""

    name: str
    run: Callable[[], Row]


def plan(
    sample: Sample,
    candidates: Sequence[Candidate],
    peers: Sequence[Peer],
    device: Device,
    judge: Judge,
    seconds: float,
    notice: Callable[[str], None] = lambda text: None,
) -> list[Step]:
    """Every codec, then every peer, then the copy that bounds them all."""

    def one(candidate: Candidate) -> Row:
        return measure(
            sample, candidate.codec, device, name=candidate.name, judge=judge, seconds=seconds, notice=notice
        )

    return [
        *(Step(candidate.name, partial(one, candidate)) for candidate in candidates),
        *(Step(peer.name, partial(measure_peer, sample, peer, seconds)) for peer in peers),
        Step("copy", partial(copying, sample, device, seconds)),
    ]
