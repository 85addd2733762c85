"""make gpu-check, of which no CI has the GPU: all that it does, on an emulated one, in small."""

from __future__ import annotations

import importlib.machinery
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest

from kvzip.codecs import BUILT_IN
from kvzip.codecs.fp8 import Fp8
from kvzip.devices import build, cpu, cuda_compile, cuda_source
from kvzip.devices.build import BuildError, Target, ensure_library
from kvzip.devices.cpu import Cpu
from kvzip.devices.cuda import Cuda
from kvzip.devices.levels import runnable_levels
from tests.emulator import fake_cupy
from tests.emulator.devices import cuda_on_emulator
from tools.gpu_check import __main__ as main
from tools.gpu_check import border, caches, check, equality, machine, memcheck, peers, speed
from tools.gpu_check.check import MARK, Check

SIZES = {"PLANES": 4, "TOKENS": 64, "HEADS": 2, "HEAD_DIM": 32, "MIB": 256, "COPY": 1, "WHOLE": 4 * 128, "RUNS": 2}
EVERY_KERNEL = speed.KERNELS
FAMILIES = {kernel for found in cuda_source._stems().values() for kernel in found}
LEVELS = runnable_levels(Target.host())
SHAPES = [("bfloat16", 40, 2, 24, True), ("float16", 33, 1, 40, False), ("float32", 21, 3, 20, True)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "SHAPES", [*SHAPES, ("float8_e4m3fn", 33, 2, 24, False)])
    monkeypatch.setattr(caches, "BYTES", [("uint8", 70_000), ("int64", 900)])
    monkeypatch.setattr(equality, "sample_cases", list)
    monkeypatch.setattr(equality, "codec_specs", lambda: ["cachegen", "fp8:scale=head", "raw", "kvtc:profile=random"])
    monkeypatch.setattr(equality, "QUICK_TRIALS", 12)
    monkeypatch.setattr(border, "sample_cases", lambda: caches.random_cases()[:1])
    for name, value in {"LAYER": 1, "TOKENS": (5, 30), "TIMED": 4 * 128}.items():
        monkeypatch.setattr(border, name, value)
    for name, value in SIZES.items():
        monkeypatch.setattr(speed, name, value)
    monkeypatch.setattr(speed, "DEFAULTS", ("cachegen", "lossless"))
    monkeypatch.setattr(speed, "KERNELS", ["lossless of bytes", "kivi:residual=8 of keys", "kvtc:profile=random"])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Check:
    """On an emulated GPU, whose clock stands still."""
    memory = SimpleNamespace(
        OutOfMemoryError=fake_cupy.OutOfMemoryError,
        Memory=lambda nbytes: fake_cupy.MemoryPool().malloc(nbytes),
        MemoryPointer=lambda memory, offset: memory,
    )
    monkeypatch.setattr(fake_cupy.cuda, "memory", memory)
    monkeypatch.setattr(fake_cupy.cuda, "get_elapsed_time", lambda begin, end: 1.0, raising=False)
    found = Check(quick=True, seconds=300)
    found.cpu, found.gpu = Cpu(1), cuda_on_emulator()  # type: ignore[misc]
    return found


def test_equal_devices_pass(run: Check, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: no false alarm, on sound and on damaged sections; a row per codec."""
    equality.equality(run)
    equality.hostile(run)
    output = capsys.readouterr().out
    assert run.failures == 0 and not run.unfinished
    assert output.count("| equal | equal |") == 3 and output.count("near enough | near enough") == 1
    assert len(re.findall(r"^\| .* \| 12 \| \d+ \| \d+ \| equal \|$", output, re.MULTILINE)) == 4


def test_a_wrong_byte_is_found(run: Check, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: numbers that differ fail the check, and the block is named."""
    launch = Cuda.launch

    def wrong(self: Cuda, kernel: str, warps: int, *arguments: object) -> None:
        launch(self, kernel.replace("decode_e4m3fn", "decode_e5m2"), warps, *arguments)

    monkeypatch.setattr(Cuda, "launch", wrong)
    monkeypatch.setattr(equality, "codec_specs", lambda: ["fp8"])
    equality.equality(run)
    assert run.failures > 0
    assert "layer 0 key 0:40: " in capsys.readouterr().out


def test_a_profiles_numbers_may_be_near_but_not_far() -> None:
    """Promise: what is within 1 ulp, or 2^-14 of a token's rms, passes, NaN for NaN; anything else does not."""
    one = np.full((3, 1, 4), 100, np.float32)
    one[1] = np.nan
    near, far = one.copy(), one.copy()
    near[0] += 0.005
    far[2, 0, 1] += 0.01
    assert not equality.far(one, near).any()
    assert equality.far(one, far).nonzero() == (2, 0, 1)
    assert equality.far(one, np.nan_to_num(one)).sum() == 4


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The families of kernels that any CPU has launched."""
    launch, found = Cpu.launch, set()

    def remember(self: Cpu, kernel: str, *rest: Any) -> None:
        found.add(max((stem for stem in FAMILIES if kernel.startswith(stem)), key=len))
        launch(self, kernel, *rest)

    monkeypatch.setattr(Cpu, "launch", remember)
    return found


def test_every_kernel_is_compared(launched: set[str]) -> None:
    """Promise: no kernel waits for a user to be run on a GPU for the first time."""
    device = Cpu(1)
    for case in caches.random_cases() + caches.other_cases():
        for spec in caches.codec_specs():
            if (codec := case.bind(spec)) is not None:
                batch = case.batch(codec, device)
                sections = [equality.host_sections(one, device) for one in codec.encode(batch, device)]
                equality.decode(codec, case, batch, sections, device)
    assert launched == FAMILIES


def test_every_kernel_is_timed(launched: set[str]) -> None:
    device: Any = Cpu(1)
    for item in EVERY_KERNEL:
        spec, _, what = item.partition(" of ")
        cache = speed.cache_on(device, 1 << 15, what)
        codec = speed._codec(spec, cache.planes)
        sections = speed.as_read(codec.encode(cache.batch(codec), device), device)
        codec.decode(cache.blank(device).batch(codec), sections, device)
    assert launched == FAMILIES


def test_every_codec_is_checked() -> None:
    assert {*BUILT_IN} - {"naive"} <= {spec.partition(":")[0] for spec in caches.codec_specs()}


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """torch as far as the check uses it; its GPU is the emulated one."""
    torch: Any = ModuleType("torch")
    torch.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    torch.from_dlpack = lambda array: array
    torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2 = map(
        np.dtype, ("bfloat16", "uint8", "float8_e4m3fn", "float8_e5m2")
    )
    torch.randn, torch.empty_like, torch.cuda = MagicMock(), MagicMock(), MagicMock()
    torch.cuda.Event.return_value.elapsed_time.return_value = 1.0
    torch.randn.return_value.to.return_value.view.return_value.nbytes = 1 << 28
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert ml_dtypes
    return torch


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(cuda_compile.NVRTC)
    module.getVersion = lambda: (13, 0)
    monkeypatch.setitem(sys.modules, cuda_compile.NVRTC, module)


def test_under_the_sanitizer_every_array_is_an_allocation_of_its_own(run: Check) -> None:
    gpu = run.gpu
    memcheck.unpool(gpu)
    gpu._pool = None
    hosts = [np.arange(n, dtype=np.uint8) for n in (3, 1000)]
    for arrays in (gpu.to_device_all(hosts), gpu.begin_upload(hosts)()):
        for host, array in zip(hosts, arrays, strict=True):
            np.testing.assert_array_equal(gpu.to_host(array), host)
    one, other = gpu.to_device_all(hosts)
    assert one._memory is not other._memory


@pytest.mark.usefixtures("torch", "nvrtc")
@pytest.mark.parametrize(
    ("part", "rows"),
    [
        *((speed.kernels, 3), (speed.whole, 3), (border.border, 6)),
        *((memcheck.memcheck, 4), (machine.machine, 4), (peers.casts, 5)),
    ],
    ids=["kernels", "whole", "border", "memcheck", "machine", "casts"],
)
def test_no_line_runs_for_the_first_time_on_a_gpu(
    run: Check, part: Any, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: every part goes through, with torch, and finds nothing wrong."""
    part(run)
    output = capsys.readouterr().out
    assert run.failures == 0 and not run.unfinished, output
    assert "failed" not in output and output.count("\n|") + output.count("\n*") >= rows


def test_peers_that_are_not_installed_are_left_out(
    run: Check, monkeypatch: pytest.MonkeyPatch, torch: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: neither torch nor nvCOMP has to be there; with them nvCOMP is timed."""
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    peers.nvcomp(run)
    assert "nvidia.nvcomp is not installed" in capsys.readouterr().out
    library = MagicMock()
    library.Codec.return_value.encode.return_value.buffer_size = 1 << 27
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", library)
    peers.nvcomp(run)
    assert "| decode | 2.000 | 268 |" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(border.importlib.util, "find_spec", lambda name: None)
    peers.casts(run)
    border.border(run)
    output = capsys.readouterr().out
    assert output.count("torch is not installed") == 2 and "| cachegen, CuPy | equal | equal |" in output
    assert run.failures == 0


def test_a_failure_costs_nothing_else(run: Check, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: an item that throws is said and counted; only a GPU that answers no more ends the process."""

    def work(item: str, end: float) -> int:
        if item == "b":
            raise ValueError("no | such\nthing")
        return 1 if item == "c" else 0

    run.each(["a", "b", "c"], work)
    output = capsys.readouterr().out
    assert run.failures == 2 and "| b | **failed**: ValueError: no / such thing |" in output
    assert output.count(MARK) == 3

    def lost() -> None:
        raise RuntimeError("an illegal memory access")

    run.gpu.synchronize = lost  # type: ignore[method-assign]
    with pytest.raises(SystemExit) as end:
        run.each(["a", "b", "c"], work)
    assert end.value.code == check.BROKEN and f"{MARK}2" not in capsys.readouterr().out


def test_time_that_is_up_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    run = Check(seconds=0)
    run.each(["a", "b"], lambda item, end: 0)
    assert run.unfinished and "no time: a, b" in capsys.readouterr().out


PART = f"""
import os, sys, time
first, blocking = int(sys.argv[sys.argv.index("--first") + 1]), os.environ["CUDA_LAUNCH_BLOCKING"] == "1"
for number in range(first, 5):
    print("{MARK}%d" % number, flush=True)
    if number == 1:
        time.sleep(60)
    if number == 3:
        print("last kernel", blocking, flush=True)
        os._exit({check.BROKEN})
    print("row", number, flush=True)
"""


def test_a_part_that_hangs_or_dies_goes_on_behind_the_item(capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: what comes after an item on which the GPU hangs or is lost is still shown; which kernel it was is asked
    once more, with launches one by one.
    """
    verdicts = main.run_apart([sys.executable, "-c", PART], seconds=50, patience=1.0)
    assert verdicts == ["hung", "lost the GPU", "lost the GPU", "ok"]
    assert capsys.readouterr().out.split("\n")[:-1] == [
        "row 0",
        "row 2",
        "last kernel False",
        "last kernel True",
        "row 4",
    ]
    assert main.run_apart([sys.executable, "-c", PART], seconds=1.0) == ["ran out of time"]
    assert main.run_apart([sys.executable, "-c", "import no_such_module"], seconds=50) == ["exit 1"]
    assert "No module named 'no_such_module'" in capsys.readouterr().out


def test_without_a_gpu_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvzip.devices.cuda_setup.driver_version", lambda: None)
    assert main.main([]) == 4
    assert "there is no NVIDIA driver" in capsys.readouterr().err


@pytest.mark.skipif(len(LEVELS) < 2, reason="this processor has one level")
def test_kernels_of_a_lower_level_do_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a machine without ziglang checks with the best kernels that were copied there."""
    *_, lower, best = LEVELS
    library = ensure_library(best)

    def copied(level: str) -> Path:
        if level == best:
            raise BuildError("compiling the kernels needs the package ziglang")
        return library

    monkeypatch.setattr(build, "ensure_library", copied)
    cpu._load.cache_clear()
    try:
        assert check.ready_cpu().level == lower
    finally:
        cpu._load.cache_clear()


def test_random_caches_hold_what_is_hard() -> None:
    """Promise: both signs of NaN, infinity, zeros and denormals are compared."""
    numbers = caches.random_cases()[0].arrays[0].astype(np.float32)
    nan = np.isnan(numbers)
    assert np.signbit(numbers[nan]).any() and not np.signbit(numbers[nan]).all() and np.isinf(numbers).any()
    assert (np.abs(numbers[12]) < 2.0**-126).all() and numbers[12].all() and not numbers[7].any()
    assert Fp8().supports(caches.random_cases()[0].planes[0])
