"""``python -m fuzz.sanitize [--seconds N] [TARGET...]``: the decoders on kernels built with AddressSanitizer.

It sees what guard pages cannot: a wrong place in a kernel's own arrays on the stack. Needs a clang with its runtime
(Debian: clang-19 and libclang-rt-19-dev), and runs each target for a while, at every level of this processor.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fuzz.engine import fuzz
from fuzz.targets import all_targets
from kvzip.devices import build, cpu
from kvzip.devices.levels import runnable_levels

FLAGS = (
    *("-x", "c++", "-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-fno-exceptions", "-fno-rtti", "-w"),
    *("-ffp-contract=off", "-fvisibility=hidden", "-fsanitize=address", "-shared-libasan", "-fno-omit-frame-pointer"),
)


def main() -> int:
    """Exit code 1 if anything was found, 2 where there is no compiler."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.sanitize", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all decoders if none is named")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = compiler()
    if found is None:
        print("fuzz.sanitize needs a clang with the AddressSanitizer runtime", file=sys.stderr)
        return 2
    clang, runtime = found
    if os.environ.get("LD_PRELOAD") != runtime:
        # The runtime must be there before anything else is.
        environment = {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1"}
        os.execve(sys.executable, [sys.executable, "-m", "fuzz.sanitize", *sys.argv[1:]], environment)
    with tempfile.TemporaryDirectory() as folder:
        levels = runnable_levels(build.Target.host())
        libraries = {level: ctypes.CDLL(str(compile_kernels(clang, level, Path(folder)))) for level in levels}
        cpu._load = libraries.__getitem__  # type: ignore[assignment]
        known = all_targets()
        outcomes = []
        for name in options.targets or [name for name in known if name.startswith("decode-")]:
            outcome = fuzz(known[name], seed=options.seed, seconds=options.seconds)
            outcomes.append(outcome)
            found_text = f", FOUND {outcome.finding}" if outcome.finding else ""
            print(f"{name}: {outcome.count} inputs, {outcome.seconds:.0f} s, AddressSanitizer{found_text}", flush=True)
    return 1 if any(outcome.finding for outcome in outcomes) else 0


def compiler() -> tuple[str, str] | None:
    """A clang and its shared AddressSanitizer runtime."""
    for name in ("clang", *(f"clang-{version}" for version in range(25, 13, -1))):
        if path := shutil.which(name):
            asked = [path, "-print-file-name=libclang_rt.asan-x86_64.so"]
            runtime = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
            if Path(runtime).is_file():
                return path, runtime
    return None


def compile_kernels(clang: str, level: str, folder: Path) -> Path:
    """The library of one level."""
    library, unit = folder / f"{level}.so", folder / "kernels.cpp"
    sources = build.kernel_sources()
    unit.write_text(
        "".join(f'#include "{path.name}"\n' for path in build.kernel_files(sources) if path.suffix == ".cu")
    )
    march = f"-march={level.replace('_', '-')}"
    # The runtime is for this process, not for the compiler.
    quiet = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([clang, *FLAGS, march, f"-I{sources}", str(unit), "-o", str(library)], env=quiet, check=True)
    return library


if __name__ == "__main__":
    sys.exit(main())
