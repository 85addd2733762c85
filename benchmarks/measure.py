"""Timing: medians of several runs, commands with their peak memory."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


def seconds(function: Callable[[], object], runs: int = 9) -> float:
    """The median time of a call, after one that does not count."""
    function()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@dataclass(frozen=True)
class Run:
    seconds: float
    peak_megabytes: float


def command(arguments: Sequence[str], runs: int = 3, target: Path | None = None) -> Run:
    """The median wall time of a command, and the largest peak of its memory.

    Its ``target`` is removed before each run: giving back the pages of a large file takes as long as writing them.
    Python keeps its bytecode, as it does for users, whatever the environment of the benchmark says.

    Raises:
        RuntimeError: the command fails.
    """
    times, peaks = [], []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(runs):
        if target is not None:
            target.unlink(missing_ok=True)
        start = time.perf_counter()
        process = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert process.stderr is not None
        message = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(arguments)} failed with {process.returncode}: {message.decode()}")
        times.append(time.perf_counter() - start)
        peaks.append(_megabytes(usage))
    return Run(statistics.median(times), max(peaks))


def _megabytes(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss * 1024 / 1e6
