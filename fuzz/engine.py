"""Runs a target on random inputs in a process of its own: what ends or stops that process is found out and kept."""

from __future__ import annotations

import mmap
import os
import random
import resource
import signal
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

BATCH = 64
HANG_SECONDS = 30
SETUP_SECONDS = 600
"""Until the first batch is done: kernels may have to be built."""

ROOM = 1 << 30
"""Bytes of address space that a run may need beyond what the process has at its start."""

FINDINGS = Path(__file__).parent / "findings"


class Target(Protocol):
    """What is fuzzed. ``run`` raises only when it has found a bug."""

    name: str

    def seeds(self) -> Sequence[bytes]:
        """Inputs to start from; none if any bytes are as good."""

    def run(self, inputs: Sequence[bytes]) -> None:
        """Try inputs; several at once so that a target may hand them to one launch."""


class Outcome(NamedTuple):
    """How many inputs were tried, and the finding that ended the run."""

    count: int
    seconds: float
    finding: str = ""


def inputs(seed: int, number: int, seeds: Sequence[bytes]) -> list[bytes]:
    """Batch ``number`` of the run that ``seed`` names: always the same."""
    rng = random.Random(seed << 40 | number)
    return [_one(rng, seeds) for _ in range(BATCH)]


def _one(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    if not seeds or rng.random() < 0.5:
        return rng.randbytes(2 + 8 * rng.choice((0, 1, 1, 1, 2, 2, 3, 4, 6, 10)))
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        at = rng.randrange(2, len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at : at + 1] = rng.randbytes(1)
            case 1:
                del data[at : at + rng.randrange(1, 9)]
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                start = rng.randrange(len(data))
                data[at:at] = data[start : start + rng.randrange(1, 65)]
    data[:2] = rng.randbytes(2)
    return bytes(data)


def fuzz(target: Target, *, seed: int, seconds: float | None = None, batches: int | None = None) -> Outcome:
    """Try inputs until the time or the number of batches is over, or the first finding.

    The target runs in a child that must keep ending batches, and may neither crash nor need much memory.
    """
    progress = mmap.mmap(-1, 8)
    begin = time.monotonic()
    child = _spawn(lambda: _work(target, seed, seconds, batches, progress))
    ending = _watch(child, progress)
    (number,) = struct.unpack("<Q", progress)
    took = time.monotonic() - begin
    return Outcome(number * BATCH, took, ending and _explain(target, seed, number, ending))


def _work(target: Target, seed: int, seconds: float | None, batches: int | None, progress: mmap.mmap) -> None:
    seeds = target.seeds()
    target.run(inputs(seed, 0, seeds))  # what is loaded once must not count against the room
    _limit_memory()
    begin, number = time.monotonic(), 0
    while (batches is None or number < batches) and (seconds is None or time.monotonic() - begin < seconds):
        target.run(inputs(seed, number, seeds))
        number += 1
        progress[:8] = struct.pack("<Q", number)


def _spawn(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _watch(child: int, progress: mmap.mmap) -> str:
    """Wait for the child; returns how it ended, nothing if well."""
    last, since = b"", time.monotonic()
    pause = 0.01
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return _ending(status)
        if progress[:8] != last:
            last, since = progress[:8], time.monotonic()
        elif time.monotonic() - since > (limit := HANG_SECONDS if any(last) else SETUP_SECONDS):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"no end within {limit} s"
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return "" if code == 0 else "an unexpected error" if code > 0 else signal.Signals(-code).name


def _explain(target: Target, seed: int, number: int, ending: str) -> str:
    """Find the input of a batch that does it alone, and keep it."""
    for data in inputs(seed, number, target.seeds()):
        progress = mmap.mmap(-1, 8)
        progress[:8] = struct.pack("<Q", 1)
        if alone := _watch(_spawn(lambda data=data: _alone(target, data)), progress):
            return f"{alone}: {keep(target, data)}"
    return f"{ending} in batch {number} of seed {seed}, by no input alone"


def _alone(target: Target, data: bytes) -> None:
    _limit_memory()
    target.run([data])


def keep(target: Target, data: bytes) -> Path:
    """Write an input that found something where ``python -m fuzz --replay`` finds it."""
    FINDINGS.mkdir(exist_ok=True)
    path = FINDINGS / f"{target.name}-{random.Random(data).getrandbits(32):08x}"
    path.write_bytes(data)
    return path


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + ROOM,) * 2)
