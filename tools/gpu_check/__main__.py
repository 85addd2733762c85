"""``python3 -m tools.gpu_check [--quick] [--seconds 220]``: run in a checkout, installed or not.

Each part runs in a process of its own with a limit of time: a fault on the GPU ends its process for good, and must not
cost what the rest would have shown. What is printed is markdown for docs/gpu.md. Exits with 1 if the devices disagree
or a part that checks could not finish.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvzip.devices.cuda_compile import cache_folder
from kvzip.devices.cuda_setup import open_cupy
from kvzip.errors import KvzipError
from tools.gpu_check import border, equality, machine, memcheck, peers, speed
from tools.gpu_check.check import BROKEN, DIFFERS, MARK, UNFINISHED, Check

ROOT = Path(__file__).parents[2]

OK, WRONG, MEMORY, LATE, SILENT = "ok", "failures", "memory faults", "ran out of time", "hung"
MEMORY_FAULTS = 99
"""The exit code of compute-sanitizer when it has found some."""

VERDICTS = {0: OK, DIFFERS: WRONG, UNFINISHED: LATE, BROKEN: "lost the GPU", MEMORY_FAULTS: MEMORY}

PATIENCE = 30.0
"""Seconds that an item may take without a word: kernels that never end are not waited for."""


@dataclass(frozen=True)
class Part:
    """Title, seconds at the most, what runs, and whether its failure is ours."""

    title: str
    seconds: float
    run: Callable[[Check], None]
    ours: bool = True


PARTS = {
    "machine": Part("Machine", 40, machine.machine),
    "equality": Part("Equal bytes on cpu and cuda", 60, equality.equality),
    "kernels": Part("Kernels", 40, speed.kernels, ours=False),
    "hostile": Part("Damaged sections", 40, equality.hostile),
    "whole": Part("One gigabyte", 35, speed.whole, ours=False),
    "border": Part("Tensors on the GPU", 30, border.border),
    "casts": Part("torch's casts", 15, peers.casts, ours=False),
    "nvcomp": Part("nvCOMP", 10, peers.nvcomp, ours=False),
    "sanitizer": Part("compute-sanitizer", 40, memcheck.memcheck),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer trials and sizes")
    parser.add_argument("--seconds", type=float, default=220, help="end after about so long")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--part", choices=PARTS, help="run one part here, in this process")
    parser.add_argument("--first", type=int, default=0, help="leave out so many items of the part")
    options = parser.parse_args(arguments)
    if options.part:
        check = Check(options.device, options.quick, options.seconds, options.first)
        PARTS[options.part].run(check)
        return DIFFERS if check.failures else UNFINISHED if check.unfinished else 0
    try:
        open_cupy(options.device)
    except KvzipError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return error.exit_code
    end = time.monotonic() + options.seconds
    print(f"## Measured on {time.strftime('%Y-%m-%d')}", flush=True)
    failed = [name for name in PARTS if not passes(name, options, end)]
    print(f"\n**{'FAILED: ' + ', '.join(failed) if failed else 'All checks passed.'}**", flush=True)
    return 1 if failed else 0


def passes(name: str, options: argparse.Namespace, end: float) -> bool:
    """Run a part in processes of its own; False if it failed and that is ours."""
    part, began = PARTS[name], time.monotonic()
    print(f"\n### {part.title}\n", flush=True)
    command = [sys.executable, "-m", "tools.gpu_check", "--part", name, "--device", str(options.device)]
    command += ["--quick"] if options.quick else []
    if name == "sanitizer":
        tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if tool is None:
            print("compute-sanitizer is not installed.", flush=True)
            return True
        command = [tool, "--tool", "memcheck", "--error-exitcode", str(MEMORY_FAULTS), "--print-limit", "5", *command]
    verdicts = run_apart(command, min(part.seconds, end - began))
    print(f"\n{name}: {', '.join(verdicts)}; {time.monotonic() - began:.1f} s", flush=True)
    if name == "sanitizer":
        # Not every machine lets it work, and it is slow.
        return not {WRONG, MEMORY} & {*verdicts}
    return verdicts == [OK] or not part.ours


def run_apart(command: list[str], seconds: float, patience: float = PATIENCE) -> list[str]:
    """Run a part, and what its process left undone when it ended before its time, in further ones.

    Returns what became of each process: one of :data:`VERDICTS`, ``exit N``, or why it was stopped.
    """
    end, verdicts, first, again = time.monotonic() + seconds, [], 0, False
    while (left := end - time.monotonic()) > 0:
        limits = ["--seconds", f"{max(left - 5, left / 2):.1f}", "--first", str(first)]
        verdict, last = _run([*command, *limits], end, patience, blocking=again)
        verdicts.append(verdict)
        if verdict in (OK, WRONG, MEMORY, LATE) or last is None:
            return verdicts
        # Once more with each launch waited for: then the last kernel is the one at fault.
        again = verdict != SILENT and not (again and last == first)
        first = last if again else last + 1
    return [*verdicts, LATE]


def _run(command: list[str], end: float, patience: float, blocking: bool) -> tuple[str, int | None]:
    """Run a process, print what it prints as it comes; returns what became of it and the last item that it began."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "KVZIP_CACHE_DIR": str(cache_folder()),
        "CUDA_LAUNCH_BLOCKING": "1" if blocking else "0",
    }
    last = None
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        assert process.stdout is not None
        pending = b""
        while True:
            now = time.monotonic()
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, min(patience, end - now)))
            if not ready:
                os.killpg(process.pid, signal.SIGKILL)
                return (LATE if time.monotonic() >= end else SILENT), last
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines + ([pending] if pending and not chunk else []):
                text = line.decode(errors="replace")
                if text.startswith(MARK):
                    last = int(text.removeprefix(MARK))
                else:
                    print(text, flush=True)
            if not chunk:
                break
    return VERDICTS.get(process.returncode, f"exit {process.returncode}"), last


if __name__ == "__main__":
    sys.exit(main())
