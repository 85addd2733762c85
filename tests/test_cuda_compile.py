"""Compile gates: what NVRTC makes of the kernels for every architecture, on machines without a GPU."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from kvzip.devices import build, cuda_compile, cuda_source
from kvzip.errors import UnsupportedError
from tests.emulator import building
from tools import nvrtc

FILES = sorted(cuda_source.sources())
STATIC_SHARED_LIMIT = 48 << 10

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the NVRTC wheel is loaded as on Linux")


@cache
def _compiled(file: str, architecture: str) -> nvrtc.Compiled:
    """As the cuda device compiles it: once, whichever of several test processes asks first, and kept for later runs."""
    key = (cuda_source.sources()[file], architecture, metadata.version("nvidia-cuda-nvrtc"), inspect.getsource(nvrtc))

    def compile_to(path: Path) -> None:
        path.write_bytes(pickle.dumps(nvrtc.compile_kernels(file, architecture)))

    kept = building.kept(f"{Path(file).stem}-{architecture}", "\0".join((*key, *nvrtc.OPTIONS)), ".pickle", compile_to)
    found = pickle.loads(kept.read_bytes())
    assert isinstance(found, nvrtc.Compiled)
    return found


@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("file", FILES)
def test_kernels_compile_without_local_memory(file: str, architecture: str) -> None:
    """Promise: no kernel spills or indexes registers at run time; each fits in a block's plain shared memory."""
    result = _compiled(file, architecture)
    assert result.resources, "ptxas reported nothing"
    wrong = {
        kernel: found
        for kernel, found in result.resources.items()
        if found.local or found.spilled or found.shared > STATIC_SHARED_LIMIT
    }
    assert not wrong
    assert ".local " not in result.ptx


@pytest.mark.parametrize("file", FILES)
def test_no_multiply_add_is_contracted(file: str) -> None:
    """Promise: a float is rounded after every operation, as on the CPU; divisions are exact ones. What is written as
    assembly is meant.
    """
    ptx = _compiled(file, nvrtc.ARCHITECTURES[0]).ptx
    ptx = re.sub(r"// begin inline asm\n.*?// end inline asm\n", "", ptx, flags=re.DOTALL)
    assert not re.findall(r"\b(?:fma|mad)\.[a-z.]*f32\b.*|\b\w+\.ftz\..*|\b(?:div|sqrt|rcp)\.approx.*", ptx)


@pytest.mark.parametrize("file", FILES)
def test_every_kernel_is_found_in_its_file(file: str) -> None:
    """Promise: the device, which compiles a file when the first of its kernels is launched, knows where each one is."""
    result = _compiled(file, nvrtc.ARCHITECTURES[0])
    kernels = re.findall(r"\.visible \.entry (\w+)", result.ptx)
    assert sorted(kernels) == sorted(result.resources)
    assert {cuda_source.file_of(kernel) for kernel in kernels} == {file}


class Nvrtc:
    """CuPy's binding to NVRTC, as far as kvzip uses it, on a small one of our own."""

    NVRTCError = nvrtc.NvrtcError

    def __init__(self, *known: int) -> None:
        self.known = known
        self.compiled: list[tuple[str, ...]] = []

    def getSupportedArchs(self) -> tuple[int, ...]:  # noqa: N802
        return self.known

    def getVersion(self) -> tuple[int, int]:  # noqa: N802
        return (13, 0)

    def createProgram(self, source: str, name: str, headers: tuple[()], names: tuple[()]) -> dict[str, object]:  # noqa: N802
        return {"source": source, "name": name}

    def compileProgram(self, program: dict[str, object], options: tuple[str, ...]) -> None:  # noqa: N802
        self.compiled.append(options)
        program["found"] = nvrtc.compile_source(program["source"], program["name"], options[0].partition("=")[2])

    def getCUBIN(self, program: dict[str, object]) -> bytes:  # noqa: N802
        return program["found"].cubin

    def getPTX(self, program: dict[str, object]) -> bytes:  # noqa: N802
        return program["found"].ptx.encode()

    def getProgramLog(self, program: dict[str, object]) -> str:  # noqa: N802
        return "log"

    def destroyProgram(self, program: dict[str, object]) -> None:  # noqa: N802
        program.clear()


def test_compiled_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: kernels are compiled once for each kind of GPU, for one that is newer than NVRTC to PTX."""
    binding = Nvrtc(80, 90)
    monkeypatch.setitem(sys.modules, cuda_compile.NVRTC, binding)
    monkeypatch.setenv("KVZIP_CACHE_DIR", str(tmp_path / "new" / "cache"))
    sources = {"one.cu": 'extern "C" __global__ void one(int* x) { *x = 1; }'}
    monkeypatch.setattr(cuda_source, "sources", lambda: sources)
    path = cuda_compile.compiled("one.cu", 90)
    assert path.suffix == ".cubin" and path.read_bytes()[:4] == b"\x7fELF"
    assert cuda_compile.compiled("one.cu", 90) == path and len(binding.compiled) == 1
    assert {"--fmad=false", "--ftz=false", "--prec-div=true"} < set(binding.compiled[0])
    newer = cuda_compile.compiled("one.cu", 103)
    assert newer.suffix == ".ptx" and b".target sm_90" in newer.read_bytes()
    sources["one.cu"] += "\n"
    assert cuda_compile.compiled("one.cu", 90) != path
    with pytest.raises(cuda_compile.CompileError, match="no GPU as old"):
        cuda_compile.compiled("one.cu", 75)
    sources["one.cu"] = "nonsense"
    with pytest.raises(cuda_compile.CompileError, match=r"this declaration has no storage class[\s\S]*log"):
        cuda_compile.compiled("one.cu", 90)


def test_without_a_writable_cache_kernels_compile_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a read-only home costs time, nothing else."""
    monkeypatch.setenv("KVZIP_CACHE_DIR", "/proc/nowhere")
    folder = cuda_compile.cache_folder()
    assert folder.is_dir() and folder != Path("/proc/nowhere")
    folder.rmdir()


def test_an_unknown_kernel_is_named() -> None:
    """Promise: a codec that asks for a kernel of another version is told so."""
    with pytest.raises(UnsupportedError, match="no kernel 'no_such_kernel'") as error:
        cuda_source.file_of("no_such_kernel")
    assert error.value.code == "unknown-kernel"


def test_a_changed_header_changes_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the cache on disk, which hashes the source, never gives out kernels of an old header."""
    for path in build.kernel_files(build.kernel_sources()):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = dict(cuda_source.sources())
    header = tmp_path / "warp_cuda.h"
    header.write_text(header.read_text() + "\n// changed\n")
    monkeypatch.setattr(build, "kernel_sources", lambda: tmp_path)
    cuda_source.sources.cache_clear()
    try:
        assert all(cuda_source.sources()[file] != text for file, text in before.items())
    finally:
        cuda_source.sources.cache_clear()
