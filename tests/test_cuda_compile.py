"""Compile gates: what NVRTC makes of the kernels for every architecture, on machines without a GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from kvzip.devices import build, cuda_source
from kvzip.errors import UnsupportedError
from tools import nvrtc

FILES = sorted(cuda_source.sources())
STATIC_SHARED_LIMIT = 48 << 10

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the NVRTC wheel is loaded as on Linux")


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[tuple[str, str], Future[nvrtc.Compiled]]]:
    """Everything for everything, compiled side by side: NVRTC does most of it outside the GIL."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            (file, architecture): pool.submit(nvrtc.compile_kernels, file, architecture)
            for architecture in nvrtc.ARCHITECTURES
            for file in FILES
        }


@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("file", FILES)
def test_kernels_compile_without_local_memory(
    compiled: dict[tuple[str, str], Future[nvrtc.Compiled]], file: str, architecture: str
) -> None:
    """Promise: no kernel spills or indexes registers at run time; each fits in a block's plain shared memory."""
    result = compiled[file, architecture].result()
    assert result.resources, "ptxas reported nothing"
    wrong = {
        kernel: found
        for kernel, found in result.resources.items()
        if found.local or found.spilled or found.shared > STATIC_SHARED_LIMIT
    }
    assert not wrong
    assert ".local " not in result.ptx


@pytest.mark.parametrize("file", FILES)
def test_no_multiply_add_is_contracted(compiled: dict[tuple[str, str], Future[nvrtc.Compiled]], file: str) -> None:
    """Promise: a float is rounded after every operation, as on the CPU; divisions are exact ones."""
    ptx = compiled[file, nvrtc.ARCHITECTURES[0]].result().ptx
    assert not re.findall(r"\b(?:fma|mad)\.[a-z.]*f32\b.*|\b\w+\.ftz\..*|\b(?:div|sqrt|rcp)\.approx.*", ptx)


@pytest.mark.parametrize("file", FILES)
def test_every_kernel_is_found_in_its_file(compiled: dict[tuple[str, str], Future[nvrtc.Compiled]], file: str) -> None:
    """Promise: the device, which compiles a file when the first of its kernels is launched, knows where each one is."""
    result = compiled[file, nvrtc.ARCHITECTURES[0]].result()
    kernels = re.findall(r"\.visible \.entry (\w+)", result.ptx)
    assert sorted(kernels) == sorted(result.resources)
    assert {cuda_source.file_of(kernel) for kernel in kernels} == {file}


def test_an_unknown_kernel_is_named() -> None:
    """Promise: a codec that asks for a kernel of another version is told so."""
    with pytest.raises(UnsupportedError, match="no kernel 'no_such_kernel'") as error:
        cuda_source.file_of("no_such_kernel")
    assert error.value.code == "unknown-kernel"


def test_a_changed_header_changes_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: CuPy's cache, which hashes the source alone, never gives out kernels of an old header."""
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
