"""Compiles ``kernels/*.cu`` for the CPU, for the wheel and for a checkout alike.

The compiler is the clang inside the ``ziglang`` wheel. There is no other to fall back to: g++ makes the same kernels
many times slower. A library is self-contained (no libc, no C++ library), so one wheel per platform serves every Python.

The build backend loads this file by its path, before kvzip's dependencies are there: standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).parents[1] / "_native"
"""Where libraries live: shipped in a wheel, built on demand in a checkout."""

FLAGS = (
    *("-x", "c++", "-std=c++17", "-O3", "-shared", "-fPIC", "-g0", "-s"),
    *("-ffreestanding", "-nostdlib", "-rtlib=compiler-rt", "-fno-exceptions", "-fno-rtti"),
    "-fvisibility=hidden",
    # A multiply-add that the compiler fuses rounds once instead of twice: bytes would differ between processors.
    "-ffp-contract=off",
    *("-fno-sanitize=all", "-fno-stack-protector"),
)

STALE_SECONDS = 3600


class BuildError(RuntimeError):
    """The libraries cannot be built here; the message says what is missing."""


@dataclass(frozen=True)
class Target:
    """A platform that libraries are built for.

    Attributes:
        arch: ``x86_64`` or ``aarch64``.
        system: ``linux``, ``macos`` or ``windows``.
    """

    arch: str
    system: str

    @classmethod
    def parse(cls, name: str) -> Target:
        """The target named ``arch-system``, such as ``aarch64-linux``. Raises :class:`BuildError` on any other name."""
        arch, _, system = name.partition("-")
        if arch not in LEVELS or system not in _SYSTEMS:
            raise BuildError(
                f"unknown target {name!r}: expected ARCH-SYSTEM with ARCH one of {', '.join(LEVELS)} "
                f"and SYSTEM one of {', '.join(_SYSTEMS)}"
            )
        return cls(arch, system)

    @classmethod
    def host(cls) -> Target:
        """The machine that this process runs on."""
        machine = platform.machine()
        arch = {"AMD64": "x86_64", "arm64": "aarch64", "ARM64": "aarch64"}.get(machine, machine)
        system = {"darwin": "macos", "win32": "windows"}.get(sys.platform, sys.platform)
        return cls.parse(f"{arch}-{system}")

    @property
    def levels(self) -> tuple[str, ...]:
        """The instruction-set levels that a wheel for this target carries, from the least to the most able."""
        return LEVELS[self.arch]

    @property
    def wheel_tag(self) -> str:
        """The platform tag. Without a libc inside, one Linux library serves glibc and musl."""
        return _SYSTEMS[self.system].wheel_tags[self.arch]

    def library_name(self, level: str, sources: Path) -> str:
        """The file name of the library for ``level``: a changed kernel changes it, so no stale one is ever loaded."""
        return f"kvzip-{level}-{digest(sources)}{_SYSTEMS[self.system].suffix}"


@dataclass(frozen=True)
class _System:
    suffix: str
    zig_name: str
    flags: tuple[str, ...]
    wheel_tags: dict[str, str]


LEVELS = {"x86_64": ("x86_64", "x86_64_v3", "x86_64_v4"), "aarch64": ("aarch64",)}

_SYSTEMS = {
    "linux": _System(
        ".so",
        "linux",
        # Nothing may be left to find at load time.
        ("-Wl,--no-undefined",),
        {arch: f"manylinux_2_17_{arch}.musllinux_1_1_{arch}" for arch in LEVELS},
    ),
    "macos": _System(".dylib", "macos.11.0", (), {"x86_64": "macosx_11_0_x86_64", "aarch64": "macosx_11_0_arm64"}),
    "windows": _System(".dll", "windows", ("-Wl,--no-entry",), {"x86_64": "win_amd64", "aarch64": "win_arm64"}),
}


def kernel_sources() -> Path:
    """The folder of the kernels: inside the package when installed from a wheel, else the checkout's ``kernels/``."""
    packaged = NATIVE / "kernels"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "kernels"


def kernel_files(sources: Path) -> list[Path]:
    """Every ``.cu`` and ``.h`` file of ``sources``, sorted by name; :class:`BuildError` when no kernel is there."""
    files = sorted(path for path in sources.glob("*") if path.suffix in (".cu", ".h"))
    if not any(path.suffix == ".cu" for path in files):
        raise BuildError(f"no kernels in {sources}: expected the folder kernels/ of a kvzip checkout or wheel")
    return files


def digest(sources: Path) -> str:
    """Twelve hexadecimal digits that stand for the kernels and the way they are compiled."""
    content = hashlib.sha256(repr(FLAGS).encode())
    for path in kernel_files(sources):
        data = path.read_bytes()
        content.update(f"{path.name}\0{len(data)}\0".encode() + data)
    return content.hexdigest()[:12]


def ensure_library(level: str) -> Path:
    """The library for ``level`` of the kernels as they are now; in a checkout it is built if missing.

    Any number of processes may call this at once: each builds under a name of its own, the last replaces an equal file.

    Raises:
        BuildError: ziglang is not installed, the kernels do not compile, or a wheel for another platform is installed.
    """
    sources, target = kernel_sources(), Target.host()
    library = NATIVE / target.library_name(level, sources)
    if library.exists():
        return library
    if sources.parent == NATIVE:
        raise BuildError(
            f"this installation of kvzip has no {library.name}: its wheel is for another platform; reinstall"
        )
    print(f"kvzip: compiling the kernels for {level}, once for every change of theirs", file=sys.stderr, flush=True)
    build_libraries(sources, target, [level], NATIVE)
    _remove_stale(NATIVE, level, keep=library)
    return library


def build_libraries(sources: Path, target: Target, levels: Sequence[str], output: Path) -> list[Path]:
    """Compile the kernels in ``sources`` once per level, side by side, into ``output``; returns the libraries' paths.

    Raises:
        BuildError: ziglang is missing, ``output`` cannot be written, or the compiler refuses (its words are quoted).
    """
    if importlib.util.find_spec("ziglang") is None:
        raise BuildError(
            f"compiling the kernels needs the package ziglang: run {sys.executable} -m pip install ziglang"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=output) as scratch, ThreadPoolExecutor() as pool:
            return list(pool.map(lambda level: _compile(Path(scratch), sources, target, level, output), levels))
    except OSError as error:
        raise BuildError(f"cannot build the kernels in {output}: {error}") from error


def _compile(scratch: Path, sources: Path, target: Target, level: str, output: Path) -> Path:
    """One library. zig keeps the objects of files that did not change."""
    system = _SYSTEMS[target.system]
    library = output / target.library_name(level, sources)
    built = scratch / library.name
    machine = ("-target", f"{target.arch}-{system.zig_name}", f"-mcpu={'generic' if level == 'aarch64' else level}")
    command = [sys.executable, "-m", "ziglang", "cc", *machine, *FLAGS, *system.flags]
    units = [str(path) for path in kernel_files(sources) if path.suffix == ".cu"]
    command += [*units, "-o", str(built)]
    result = subprocess.run(command, env=_environment(scratch), capture_output=True, text=True, check=False)
    if result.returncode != 0:
        first = "\n".join(result.stderr.strip().splitlines()[:20])
        raise BuildError(f"the kernels in {sources} do not compile for {level}:\n{first}")
    built.replace(library)
    return library


def _environment(scratch: Path) -> dict[str, str]:
    """zig keeps a cache in the home folder; where a sandbox has none to write to, it goes with the scratch files."""
    environment = dict(os.environ)
    if not os.access(Path("~").expanduser(), os.W_OK):
        environment.setdefault("ZIG_GLOBAL_CACHE_DIR", str(scratch / "zig-cache"))
    return environment


def _remove_stale(folder: Path, level: str, keep: Path) -> None:
    """Delete libraries of kernels that changed since. Young ones stay: another process may be about to load its own."""
    for path in folder.glob(f"kvzip-{level}-*"):
        # Another process may be cleaning up, too.
        with contextlib.suppress(FileNotFoundError):
            if path != keep and time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
