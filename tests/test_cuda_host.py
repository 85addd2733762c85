"""The host side of the cuda device, with the emulator in CuPy's place: launches, buffers, order, errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvzip.codecs.cachegen import CacheGen
from kvzip.devices import cuda, cuda_setup, cuda_source, get_device
from kvzip.devices.base import SECTION_PADDING
from kvzip.devices.cuda import Cuda
from kvzip.devices.cuda_compile import CompileError
from kvzip.errors import KvzipError, LimitError, UnsupportedError, UsageError
from tests import codecs
from tests.emulator import fake_cupy
from tests.emulator.devices import cuda_on_emulator
from tests.emulator.module import EmulatorError

PROBES = {
    "probe.cu": """
#define KERNEL(name, ...) extern "C" __global__ void name(int warps, __VA_ARGS__)
// Counts the threads of every warp, and those beyond the last one.
KERNEL(probe_warps, unsigned* threads, unsigned* beyond) {
  int warp = blockIdx.x * 4 + threadIdx.x / 32;
  atomicAdd(warp < warps ? threads + warp : beyond, 1u);
}
KERNEL(probe_scalars, int a, unsigned b, long long c, unsigned long long d, float e, double* out) {
  if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = a, out[1] = b, out[2] = c, out[3] = (double)d, out[4] = e;
}
KERNEL(probe_copy, const unsigned char* from, unsigned char* to, unsigned count) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = from[i];
}
"""
}


@pytest.fixture
def gpu() -> Cuda:
    return cuda_on_emulator()


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, gpu: Cuda) -> Iterator[Cuda]:
    """The device with small kernels in place of kvzip's own."""
    monkeypatch.setattr(cuda_source, "sources", lambda: PROBES)
    cuda_source._stems.cache_clear()
    yield gpu
    cuda_source._stems.cache_clear()


@pytest.mark.parametrize("warps", [0, 1, 3, 4, 5, 130])
def test_a_launch_covers_every_warp_once(probes: Cuda, warps: int) -> None:
    """Promise: blocks of four warps, as few as cover them all; the kernel is told where to stop."""
    threads, beyond = probes.to_device(np.zeros(max(warps, 1), np.uint32)), probes.to_device(np.zeros(1, np.uint32))
    probes.launch("probe_warps", warps, threads, beyond)
    assert probes.to_host(threads)[:warps].tolist() == [32] * warps
    assert probes.to_host(beyond).item() == -warps % 4 * 32


def test_scalars_arrive_with_their_own_type(probes: Cuda) -> None:
    """Promise: each scalar type reaches the kernel with every bit, at the ends of its range."""
    out = probes.to_device(np.zeros(5))
    values = np.int32(-(2**31)), np.uint32(2**32 - 1), np.int64(-(2**53)), np.uint64(2**63), np.float32(0.1)
    probes.launch("probe_scalars", 1, *values, out)
    assert probes.to_host(out).tolist() == [float(value) for value in values]


def test_wrong_arguments_are_refused(probes: Cuda) -> None:
    """Promise: what a kernel would misread is refused before the launch."""
    array = probes.to_device(np.zeros(16, np.uint32))
    with pytest.raises(ValueError, match="argument 1 of kernel 'probe_warps' is not C-contiguous"):
        probes.launch("probe_warps", 4, array, array[::2])
    for wrong in (3, 2.5, np.float64(1), np.zeros(4, np.uint32), None):
        with pytest.raises(TypeError, match="argument 0 of kernel 'probe_warps'"):
            probes.launch("probe_warps", 4, wrong, array)
    with pytest.raises(UnsupportedError, match="no kernel 'other'") as error:
        probes.launch("other", 1)
    assert error.value.code == "unknown-kernel"


def test_what_freed_memory_held_is_still_read_in_order(probes: Cuda) -> None:
    """Promise: arrays may be dropped right after a launch that uses them: memory goes back in the stream's order."""
    source, target = np.arange(1000, dtype=np.uint16).view(np.uint8), probes.to_device(np.zeros(2000, np.uint8))
    probes.launch("probe_copy", 64, probes.to_device(source), target, np.uint32(2000))
    for _ in range(3):
        probes.to_device(np.full(2000, 9, np.uint8))
    np.testing.assert_array_equal(probes.to_host(target), source)


def test_kernels_stay_inside_device_memory(probes: Cuda) -> None:
    """The emulator's own promise, without which the other tests of the codecs on this device would say little."""
    array = probes.to_device(np.zeros(100, np.uint8))
    probes.launch("probe_copy", 4, array, array, np.uint32(0))
    far = np.uint32(100 + SECTION_PADDING + 200)
    with pytest.raises(EmulatorError, match="out of bounds"):
        probes.launch("probe_copy", 16, array, probes.to_device(np.zeros(1000, np.uint8)), far)
        probes.synchronize()


def test_arrays_go_there_and_back(gpu: Cuda) -> None:
    """Promise: every shape, dtype and stride survives; dtypes that CuPy has not carry their bits."""
    for dtype in (np.uint8, np.int64, np.float32, *codecs.DTYPES.values()):
        array = codecs.numbers(5, 3, 8).astype(dtype)[:, 1:, ::2]
        there = gpu.to_device(array)
        assert there.shape == array.shape and there.flags.c_contiguous
        np.testing.assert_array_equal(codecs.bits(gpu.to_host(there)), codecs.bits(array))
        out = np.zeros_like(array, order="C")
        assert gpu.to_host(there, out) is out
        np.testing.assert_array_equal(codecs.bits(out), codecs.bits(array))
        assert gpu.to_device(there).data.ptr == there.data.ptr
    records = np.array([(1, 2.0), (3, 4.0)], np.dtype([("a", np.uint64), ("b", np.float32)]))
    assert gpu.to_host(gpu.to_device(records)).tobytes() == records.tobytes()
    empty = gpu.to_device(np.zeros((0, 4), np.uint16))
    assert gpu.to_host(empty).shape == (0, 4)
    assert gpu.address(empty) and gpu.address(there[1:]) == gpu.address(there) + there.strides[0]
    with pytest.raises(ValueError, match="not C-contiguous"):
        gpu.to_host(there, np.zeros((10, *there.shape[1:]), there.dtype)[::2])


def test_many_arrays_go_at_once(gpu: Cuda) -> None:
    """Promise: packed copies keep every array apart and aligned, padding behind the last, and wait once."""
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, n).astype(np.uint8) for n in (5, 0, 64, 1000, 70_000, 1)]
    there = gpu.to_device_all(arrays)
    assert all(gpu.address(one) % 8 == 0 for one in there if one.size)
    end = max(gpu.address(one) + one.nbytes for one in there)
    memory = next(m for m in fake_cupy.Memory.alive if m.address <= gpu.address(there[0]) < m.address + m.bytes.size)
    assert memory.address + memory.bytes.size >= end + SECTION_PADDING
    for host, array in zip(gpu.to_host_all(there), arrays, strict=True):
        np.testing.assert_array_equal(host, array)
    assert gpu.to_device_all([]) == [] and gpu.to_host_all([]) == []


def test_pinned_memory_is_not_used_again_too_early(gpu: Cuda) -> None:
    """Promise: the packed copies of two calls do not meet in one buffer while the first is still on its way."""
    first = gpu.to_device_all([np.full(100_000, 1, np.uint8)])
    second = gpu.to_device_all([np.full(100_000, 2, np.uint8)])
    assert (gpu.to_host(first[0]) == 1).all() and (gpu.to_host(second[0]) == 2).all()


def test_a_copy_from_pinned_memory_is_done_when_results_are_there(gpu: Cuda) -> None:
    """Promise: after to_host or synchronize the source may change; large buffers are pinned, small ones need not be."""
    buffer = gpu.host_buffer(1 << 20)
    buffer[:] = 3
    there = gpu.to_device(buffer)
    gpu.synchronize()
    buffer[:] = 4
    assert (gpu.to_host(there) == 3).all()
    assert fake_cupy.is_pinned(buffer) and not fake_cupy.is_pinned(gpu.host_buffer(100))


def test_memory_that_cannot_be_pinned_is_other_memory(gpu: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a system that lets nothing be pinned only costs speed."""
    monkeypatch.setattr(fake_cupy.cuda, "pinned_limit", 0)
    assert gpu.host_buffer(1 << 20).size == 1 << 20


def test_scratch_and_constants_are_kept(gpu: Cuda) -> None:
    """Promise: scratch memory is reused and grows; a constant is copied once."""
    first = gpu.scratch("a", (100,), np.uint32)
    assert gpu.address(gpu.scratch("a", (10, 2), np.uint16)) == gpu.address(first)
    assert gpu.scratch("a", (1000,), np.uint32).shape == (1000,)
    made: list[int] = []

    def make() -> np.ndarray:
        made.append(1)
        return np.arange(5)

    for _ in range(2):
        assert gpu.to_host(gpu.constant("c", make)).tolist() == [0, 1, 2, 3, 4]
    assert made == [1]


def test_activation_nests(gpu: Cuda) -> None:
    """Promise: work inside a nested activation allocates from the device's pool, and leaving restores CuPy's own."""
    before = fake_cupy.cuda.allocator
    with gpu.activate(), gpu.activate():
        assert fake_cupy.cuda.allocator == gpu._allocate
    assert fake_cupy.cuda.allocator is before


def test_no_memory_is_an_error_that_says_what_to_do(gpu: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: exit code 7 with the sizes, not CuPy's traceback; torch is asked to give back what it keeps."""
    emptied: list[int] = []
    torch = SimpleNamespace(cuda=SimpleNamespace(empty_cache=lambda: emptied.append(1)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(fake_cupy.MemoryPool, "total", 1 << 20)
    with pytest.raises(LimitError, match=r"out of memory on cuda:0.*2 MiB asked for.*--device cpu") as error:
        gpu.to_device(np.zeros(2 << 20, np.uint8))
    assert error.value.code == "out-of-gpu-memory" and emptied == [1]


def test_kernels_that_do_not_compile_are_an_error(gpu: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a GPU that NVRTC does not know is said to be the trouble."""

    def compile_nothing(code: str) -> None:
        raise CompileError("unsupported gpu architecture")

    monkeypatch.setattr(fake_cupy, "emulated", compile_nothing)
    with pytest.raises(UnsupportedError, match=r"do not compile for cuda:0.*unsupported gpu") as error:
        gpu.launch("copy_runs", 1)
    assert error.value.code == "cuda-compile"


def test_a_fault_is_an_error_of_ours(gpu: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: what the driver throws, later and anywhere, ends in one message."""

    def fail(stream: fake_cupy.Stream) -> None:
        raise fake_cupy.CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    monkeypatch.setattr(fake_cupy.Stream, "synchronize", fail)
    with pytest.raises(KvzipError, match=r"cuda:0.* failed: cudaErrorIllegalAddress") as error:
        gpu.synchronize()
    assert error.value.code == "cuda-fault"


def test_a_codec_leaves_nothing_behind(gpu: Cuda) -> None:
    """Promise: memory is bounded by what is under way: encoding again and again takes no more of it."""
    batch = codecs.batch_of([codecs.numbers(100, 2, 40, seed=seed) for seed in range(2)])
    codec = codecs.bind(CacheGen(), batch)
    used = []
    for _ in range(3):
        sections = codecs.encode(codec, batch, gpu)
        codecs.decode(codec, batch, sections, gpu)
        used.append(sum(memory.bytes.nbytes for memory in fake_cupy.Memory.alive))
    assert used[1] == used[2]


# --------------------------------------------------------------------------------------------------- what must be there


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a driver, CuPy and NVRTC, all emulated; tests take something away."""
    nvrtc = ModuleType("cupy_backends.cuda.libs.nvrtc")
    nvrtc.getVersion = lambda: (13, 0)  # type: ignore[attr-defined]
    monkeypatch.setattr(cuda_setup, "driver_version", lambda: 13000)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", nvrtc)
    return monkeypatch


@pytest.mark.usefixtures("machine")
def test_a_gpu_is_found_and_named() -> None:
    """Promise: "auto" takes the GPU where there is one; what was taken is said on one line."""
    assert str(get_device("auto")) == "cuda:0, Emulated GPU, 1 GiB"
    assert isinstance(get_device("cuda"), cuda.Cuda)
    with pytest.raises(UsageError, match=r"no GPU cuda:7: this machine has cuda:0 alone") as error:
        get_device("cuda:7")
    assert error.value.code == "no-such-gpu"


def _no_devices() -> int:
    raise fake_cupy.CUDARuntimeError("cudaErrorNoDevice")


MISSING: dict[str, Any] = {
    "there is no NVIDIA driver": lambda m: m.setattr(cuda_setup, "driver_version", lambda: None),
    r"the driver is for CUDA 11\.4": lambda m: m.setattr(cuda_setup, "driver_version", lambda: 11040),
    "CuPy.*pip install 'kvzip": lambda m: m.setitem(sys.modules, "cupy", None),
    "NVRTC, which compiles the kernels": lambda m: m.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", None),
    r"the driver finds none \(CUDA_VISIBLE": lambda m: m.setattr(fake_cupy.cuda.runtime, "getDeviceCount", lambda: 0),
    r"the driver finds none \(cudaErrorNo": lambda m: m.setattr(fake_cupy.cuda.runtime, "getDeviceCount", _no_devices),
    "CuPy is for CUDA 13.0, newer than the driver": lambda m: (
        m.setattr(cuda_setup, "driver_version", lambda: 12040),
        m.setattr(fake_cupy.cuda.runtime, "getDeviceCount", _no_devices),
    ),
}


@pytest.mark.parametrize("message", MISSING)
def test_what_is_missing_is_said(machine: pytest.MonkeyPatch, message: str) -> None:
    """Promise: --device cuda fails with the one thing to mend; "auto" takes the CPU."""
    MISSING[message](machine)
    with pytest.raises(UnsupportedError, match=message) as error:
        get_device("cuda")
    assert error.value.code == "no-cuda" and "--device cpu" in str(error.value)
    assert get_device("auto").name == "cpu"
