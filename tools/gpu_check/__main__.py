"""``python3 -m tools.gpu_check [--quick] [--seconds 200]``: run in a checkout, installed or not.

Each part runs in a process of its own with a limit of time: a fault on the GPU ends its process for good, and must not
cost what the other parts would have shown. Exits with 1 if the devices disagree or a part that checks could not finish.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvzip.devices.cuda_setup import driver_version, open_cupy
from kvzip.errors import KvzipError

ROOT = Path(__file__).parents[2]

OUT_OF_TIME = "ran out of time"

PARTS = {  # name: title, seconds, whether its failure is ours
    "machine": ("Machine", 40, True),
    "equality": ("Equal bytes on cpu and cuda", 90, True),
    "hostile": ("Damaged sections", 60, True),
    "border": ("Tensors on the GPU", 50, True),
    "kernels": ("Kernels", 60, False),
    "whole": ("One gigabyte", 60, False),
    "casts": ("torch's casts", 30, False),
    "nvcomp": ("nvCOMP", 30, False),
    "sanitizer": ("compute-sanitizer", 60, True),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer trials and sizes")
    parser.add_argument("--seconds", type=float, default=200, help="end after about so long")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--part", choices=[*PARTS, "memcheck"], help="run one part here, in this process")
    options = parser.parse_args()
    if options.part:
        return run_part(options.part, options.device, options.quick)
    deadline = time.monotonic() + options.seconds
    try:
        open_cupy(options.device)
    except KvzipError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return error.exit_code
    failed = []
    print("# gpu-check\n", flush=True)
    for part, (title, seconds, ours) in PARTS.items():
        print(f"\n## {title}\n", flush=True)
        left = deadline - time.monotonic()
        if left < 3:
            print("left out: no time", flush=True)
            failed += [part] if ours else []
            continue
        began = time.monotonic()
        status = run_apart(part, options, min(seconds, left))
        print(f"\n{part}: {status}, {time.monotonic() - began:.1f} s", flush=True)
        if ours and status != "ok" and not (part == "sanitizer" and status == OUT_OF_TIME):
            failed.append(part)
    print(f"\n**{'FAILED: ' + ', '.join(failed) if failed else 'all checks passed'}**", flush=True)
    return 1 if failed else 0


def run_apart(part: str, options: argparse.Namespace, seconds: float) -> str:
    command = [sys.executable, "-m", "tools.gpu_check", "--part", part, "--device", str(options.device)]
    if part == "sanitizer":
        tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if tool is None:
            print("compute-sanitizer is not installed.")
            return "ok"
        command[command.index(part)] = "memcheck"
        command = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "5", *command]
    if options.quick:
        command.append("--quick")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    try:
        code = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.STDOUT, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return OUT_OF_TIME
    return "ok" if code == 0 else f"failed (exit {code})"


def run_part(part: str, index: int, quick: bool) -> int:
    if part == "machine":
        return machine(index)
    from tools.gpu_check import peers

    if part in ("casts", "nvcomp"):
        getattr(peers, part)()
        return 0
    from kvzip.devices.cpu import Cpu
    from kvzip.devices.cuda import Cuda
    from tools.gpu_check import equality, speed

    if part == "equality":
        return 1 if equality.equality(Cpu(), Cuda(index)) else 0
    if part == "hostile":
        return 1 if equality.hostile(Cpu(), Cuda(index), 40 if quick else 400) else 0
    if part == "border":
        from tools.gpu_check.border import border

        return 1 if border(Cpu(), Cuda(index), quick) else 0
    if part == "memcheck":
        from tools.gpu_check.memcheck import Unpooled

        return 1 if equality.hostile(Cpu(), Unpooled(index), 16) else 0
    gpu = speed.Stopwatch(index)
    getattr(speed, part)(gpu, quick)
    return 0


def machine(index: int) -> int:
    """What is here, and how long the kernels take to compile."""
    from kvzip.devices import build, cuda_source
    from kvzip.devices.cpu import Cpu
    from kvzip.devices.cuda import Cuda

    for package in ("numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc", "torch", "xxhash"):
        try:
            print(f"* {package} {version(package)}")
        except PackageNotFoundError:
            continue
    print(f"* python {sys.version.split()[0]}, driver for CUDA {driver_version()}")
    print(f"* kernels {build.digest(build.kernel_sources())}, {Cpu()}")
    gpu = Cuda(index)
    print(f"* {gpu}, batches of {gpu.batch_bytes >> 20} MiB")
    for file in cuda_source.sources():
        began = time.perf_counter()
        gpu.compile(file)
        print(f"* {file} compiled in {time.perf_counter() - began:.2f} s (or read from CuPy's cache)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
