"""What is here, and whether the kernels compile for it."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import kvzip
from kvzip.devices import build, cuda_source
from kvzip.devices.cpu import available_cores
from kvzip.devices.cuda_compile import NVRTC
from kvzip.devices.cuda_setup import driver_version
from kvzip.devices.levels import processor_name
from tools.gpu_check.check import Check, words

PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "torch", "numpy", "ml_dtypes", "xxhash")


def machine(check: Check) -> None:
    """Print the versions of everything that has a part in the results, and compile every kernel."""
    # Before other threads ask for it.
    gpu = check.gpu
    print(f"* {gpu}; {_driver()}; NVRTC {_nvrtc()}")
    print(f"* {processor_name()}, {available_cores()} cores; {_cpu(check)}")
    print(f"* Python {platform.python_version()}, {', '.join(_packages())}")
    print(f"* kvzip {kvzip.__version__}, kernels {build.digest(build.kernel_sources())}, {_commit()}", flush=True)
    print("* kernels compiled, or found on disk:", end="", flush=True)
    with ThreadPoolExecutor() as pool:
        jobs = {pool.submit(_compiled, check, file): file for file in cuda_source.sources()}
        for job in as_completed(jobs):
            print(f" {jobs[job]} {job.result()};", end="", flush=True)
    print(flush=True)


def _compiled(check: Check, file: str) -> str:
    began = time.perf_counter()
    try:
        check.gpu.compile(file)
    except Exception as error:
        check.failures += 1
        return f"**failed**: {words(error)}"
    return f"{time.perf_counter() - began:.1f} s"


def _driver() -> str:
    """The driver by its own version, where it tells, and the CUDA version that it is for."""
    cuda = driver_version() or 0
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        found = []
    return f"driver {found[0] if found else 'of unknown version'} (CUDA {cuda // 1000}.{cuda % 1000 // 10})"


def _nvrtc() -> str:
    return ".".join(map(str, importlib.import_module(NVRTC).getVersion()))


def _cpu(check: Check) -> str:
    try:
        return str(check.cpu)
    except Exception as error:
        check.failures += 1
        return (
            f"**no kernels for the CPU**: {words(error)}; where there is no compiler, `make gpu-kernels` on another "
            "machine makes kvzip/_native, which is to be copied"
        )


def _packages() -> list[str]:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """The commit, if this is a clone."""
    if shutil.which("git") is None:
        return "no git"
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return f"commit {found.stdout.strip()}" if found.returncode == 0 else "no clone"
