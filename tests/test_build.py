"""The native build: what a library is named after, who may build it, and a wheel that needs no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvzip.devices import build

ROOT = Path(__file__).parents[1]
PROBES = Path(__file__).parent / "kernels"
HOST = build.Target.host()
LEVEL = HOST.levels[0]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernels of a checkout of its own, with the folder of its libraries beside them."""
    sources = tmp_path / "kernels"
    shutil.copytree(PROBES, sources)
    monkeypatch.setattr(build, "kernel_sources", lambda: sources)
    monkeypatch.setattr(build, "NATIVE", tmp_path / "native")
    return sources


def test_a_library_is_named_after_kernels_and_flags(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: whatever changes the machine code changes the name, so a stale library is never loaded."""
    names = {HOST.library_name(LEVEL, checkout)}
    assert names == {HOST.library_name(LEVEL, PROBES)}
    (checkout / "probe.cu").write_text((checkout / "probe.cu").read_text() + "\n")
    names.add(HOST.library_name(LEVEL, checkout))
    (checkout / "added.h").touch()
    names.add(HOST.library_name(LEVEL, checkout))
    (checkout / "added.h").rename(checkout / "renamed.h")
    names.add(HOST.library_name(LEVEL, checkout))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DX"))
    names.add(HOST.library_name(LEVEL, checkout))
    names.add(HOST.library_name("other", checkout))
    assert len(names) == 6


def test_a_changed_kernel_is_rebuilt_and_an_unchanged_one_is_not(checkout: Path) -> None:
    """Promise: editing a kernel in a checkout is all a developer does; the next process runs it."""
    first = build.ensure_library(LEVEL)
    built_at = first.stat().st_mtime_ns
    assert build.ensure_library(LEVEL).stat().st_mtime_ns == built_at
    (checkout / "probe.cu").write_text(
        (checkout / "probe.cu").read_text() + "\nPROBE(probe_new, int* p) { *p = last; }\n"
    )
    second = build.ensure_library(LEVEL)
    assert second != first
    assert b"probe_new" in second.read_bytes()


def test_only_old_libraries_of_other_kernels_are_removed(checkout: Path) -> None:
    """Promise: the folder does not grow for ever, and no library goes while another process may be about to load it."""
    native = build.NATIVE
    native.mkdir()
    young, old, other = (native / f"kvzip-{name}.so" for name in (f"{LEVEL}-111111", f"{LEVEL}-222222", "other-333333"))
    for path in (young, old, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (1, 1))
    library = build.ensure_library(LEVEL)
    assert sorted(native.iterdir()) == sorted([young, other, library])


def test_processes_may_build_at_once(checkout: Path) -> None:
    """Promise: parallel tests on a fresh checkout all get a whole library, and nothing else is left behind."""
    with ThreadPoolExecutor(3) as pool:
        libraries = set(pool.map(build.ensure_library, [LEVEL] * 3))
    assert list(build.NATIVE.iterdir()) == list(libraries)


def test_a_kernel_that_does_not_compile_shows_the_compilers_words(checkout: Path) -> None:
    """Promise: a mistake in a kernel is shown with its file and line."""
    (checkout / "wrong.cu").write_text("int wrong( { }\n")
    with pytest.raises(build.BuildError, match=r"wrong\.cu:1:\d+: error"):
        build.ensure_library(LEVEL)


@pytest.mark.skipif(HOST.system != "linux", reason="only this linker is told to check")
def test_a_library_needs_nothing_from_the_machine(checkout: Path) -> None:
    """Promise: a kernel that calls into a C library fails when it is built, not on a user's machine."""
    (checkout / "needy.cu").write_text(
        'extern "C" int puts(const char*);\n'
        'extern "C" __attribute__((visibility("default"))) void needy(int, int) { puts("x"); }\n'
    )
    with pytest.raises(build.BuildError, match="undefined symbol: puts"):
        build.ensure_library(LEVEL)


def test_a_missing_compiler_is_named(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a checkout without ziglang says which package to install."""
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(build.BuildError, match="pip install ziglang"):
        build.ensure_library(LEVEL)


def test_missing_kernels_are_named(checkout: Path) -> None:
    """Promise: an incomplete checkout is told so, not given an empty library."""
    (checkout / "probe.cu").unlink()
    with pytest.raises(build.BuildError, match="no kernels in"):
        build.ensure_library(LEVEL)


def test_a_home_that_cannot_be_written_is_no_hindrance(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a build sandbox without a home folder can build."""
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.delenv("ZIG_GLOBAL_CACHE_DIR", raising=False)
    assert build.ensure_library(LEVEL).exists()


@pytest.mark.parametrize("name", ["aarch64-linux", "aarch64-macos", "x86_64-windows"])
def test_other_platforms_are_built_from_here(name: str, tmp_path: Path) -> None:
    """Promise: one machine makes the wheels of all platforms."""
    magic = {"linux": b"\x7fELF", "macos": b"\xcf\xfa\xed\xfe", "windows": b"MZ"}
    target = build.Target.parse(name)
    libraries = build.build_libraries(PROBES, target, target.levels[:1], tmp_path)
    assert len(libraries) == 1
    data = libraries[0].read_bytes()
    assert data.startswith(magic[target.system])
    assert b"probe_pieces" in data


@pytest.mark.parametrize("name", ["riscv64-linux", "x86_64-plan9", "x86_64", ""])
def test_an_unknown_target_is_refused(name: str) -> None:
    """Promise: a mistyped KVZIP_TARGET lists what there is."""
    with pytest.raises(build.BuildError, match="aarch64"):
        build.Target.parse(name)


@pytest.mark.slow
def test_a_wheel_installs_and_runs_without_a_compiler(tmp_path: Path) -> None:
    """Promise: the wheel holds every level and the kernel sources; installed, it loads with no ziglang about."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    command = [*pip, "wheel", str(ROOT), "--no-build-isolation", "--no-deps", "-w", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("kvzip-*.whl")
    assert "-py3-none-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    kernels = {f"kvzip/_native/kernels/{path.name}" for path in build.kernel_files(ROOT / "kernels")}
    libraries = {f"kvzip/_native/{HOST.library_name(level, ROOT / 'kernels')}" for level in HOST.levels}
    assert {name for name in names if name.startswith("kvzip/_native/")} == kernels | libraries
    assert not [name for name in names if name.startswith(("tests/", "samples/", "kernels/"))]

    fresh = tmp_path / "fresh"
    venv.create(fresh)
    python = next(path for path in (fresh / "bin/python", fresh / "Scripts/python.exe") if path.exists())
    target = next(path for path in fresh.rglob("site-packages"))
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    # The dependencies come from here, after the fresh site-packages; a ziglang that is asked for fails the test.
    here = str(Path(build.importlib.util.find_spec("numpy").origin).parents[1])
    program = f"""
import sys; sys.modules["ziglang"] = None; sys.path.append({here!r})
from kvzip.devices import build, levels; from kvzip.devices.cpu import Cpu
assert build.__file__.startswith({str(target)!r}), build.__file__
assert build.kernel_sources().parent == build.NATIVE
for level in levels.runnable_levels(build.Target.host()): Cpu(1, level)
print("loaded")
"""
    ran = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout.strip() == "loaded", ran.stderr
