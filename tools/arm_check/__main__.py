"""The aarch64 wheel under qemu-user: the codecs' tests pass, and every byte is that of x86.

``python -m tools.arm_check`` on a Debian with qemu-user, from a checkout with its development packages. A Python for
aarch64 is unpacked into build/aarch64, nothing is installed; packages come from the usual mirrors of apt and pip.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "aarch64"
PACKAGES = ("numpy", "ml_dtypes", "xxhash", "pytest", "hypothesis", "safetensors", "zstandard")
TESTS = ("test_codec_*.py", "test_coding_*.py", "test_bitflips.py")
NEEDED = ("qemu-aarch64", "apt-get", "dpkg-deb")


def main() -> int:
    """Exit code 1 if a test fails or a byte differs."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        print(f"arm-check needs {', '.join(missing)}: on Debian, apt-get install qemu-user", file=sys.stderr)
        return 1
    python = unpack_python()
    unpack_packages(python)
    build_wheel()
    tests = sorted(str(path.relative_to(ROOT)) for pattern in TESTS for path in (ROOT / "tests").glob(pattern))
    # The emulator stands for a GPU: nothing of it is of this processor.
    # Without the checkout's configuration, which would bring the checkout's package.
    pytest = ("-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={BUILD / 'site'}", "--import-mode=importlib")
    failed = run(*pytest, "-p", "no:cacheprovider", "-k", "not emulated and not ptx", *tests, check=False)
    here = json.loads(subprocess.check_output([sys.executable, "-m", "tools.arm_check.digests"], cwd=ROOT, text=True))
    there = json.loads(run("-m", "tools.arm_check.digests", capture=True).stdout)
    different = [name for name in here if there.get(name) != here[name]]
    print(f"{len(here) - len(different)} of {len(here)} files and what they restore to have the same bytes as here")
    print("\n".join(f"  different: {name}" for name in different), end="\n" if different else "")
    return 1 if failed.returncode or different or not here else 0


def unpack_python() -> str:
    """Debian's Python for aarch64 and what it needs, below ``BUILD/root``; returns its version."""
    root, apt = BUILD / "root", BUILD / "apt"
    if not root.exists():
        for folder in ("state/lists/partial", "cache/archives/partial"):
            (apt / folder).mkdir(parents=True, exist_ok=True)
        (apt / "status").touch()
        options = [
            *("-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64"),
            *("-o", f"Dir::State={apt / 'state'}", "-o", f"Dir::State::status={apt / 'status'}"),
            *("-o", f"Dir::Cache={apt / 'cache'}", "-o", "APT::Sandbox::User="),
        ]
        subprocess.run(["apt-get", *options, "update", "-qq"], check=True)
        wanted = ["install", "-y", "-qq", "--download-only", "--no-install-recommends", "python3", "libstdc++6"]
        subprocess.run(["apt-get", *options, *wanted], check=True)
        for archive in (apt / "cache/archives").glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", archive, root], check=True)
    (library,) = (root / "usr/lib").glob("python3.*")
    return library.name.removeprefix("python")


def unpack_packages(version: str) -> None:
    """Wheels of what kvzip and its tests need, for that Python, below ``BUILD/site``."""
    wheels, site = BUILD / "wheels", BUILD / "site"
    if not wheels.exists():
        platforms = [f"--platform=manylinux{tag}_aarch64" for tag in ("2014", "_2_17", "_2_28")]
        command = ["download", "-q", "-d", wheels, *platforms, "--only-binary=:all:", f"--python-version={version}"]
        subprocess.run([sys.executable, "-m", "pip", *command, *PACKAGES], check=True)
    shutil.rmtree(site, ignore_errors=True)
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site)


def build_wheel() -> None:
    """kvzip's own wheel for aarch64, as ``make wheels`` makes it, unpacked beside the others."""
    with_target = {**os.environ, "KVZIP_TARGET": "aarch64-linux"}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", BUILD / "dist"]
    shutil.rmtree(BUILD / "dist", ignore_errors=True)
    subprocess.run(command, cwd=ROOT, env=with_target, check=True)
    (wheel,) = (BUILD / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(BUILD / "site")
    # Tests and tools lie beside it, so that the package itself is the wheel's and not the checkout's.
    for name in ("tests", "tools", "fuzz"):
        shutil.copytree(ROOT / name, BUILD / "site" / name, ignore=shutil.ignore_patterns("__pycache__"))


def run(*arguments: str, check: bool = True, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the aarch64 Python, in the folder of the unpacked packages."""
    site, root = BUILD / "site", BUILD / "root"
    (python,) = (path for path in (root / "usr/bin").glob("python3.*") if path.suffix[1:].isdigit())
    environment = ["-E", f"PYTHONHOME={root / 'usr'}", "-E", f"PYTHONPATH={site}"]
    command = ["qemu-aarch64", "-L", root, *environment, python, *arguments]
    return subprocess.run(command, cwd=site, text=True, check=check, stdout=subprocess.PIPE if capture else None)


if __name__ == "__main__":
    sys.exit(main())
