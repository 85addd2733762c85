"""Devices: launches cover every warp once, arguments arrive as they are, and what is wrong is said."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvzip.devices import build, cuda_setup, get_device
from kvzip.devices import cpu as cpu_module
from kvzip.devices.cpu import Cpu
from kvzip.devices.levels import runnable_levels
from kvzip.errors import KvzipError, UnsupportedError, UsageError

PROBES = Path(__file__).parent / "kernels"
HOST = build.Target.host()


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory):
    """The device module made to load libraries of the probe kernels instead of kvzip's own."""
    folder = tmp_path_factory.mktemp("native")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "NATIVE", folder)
        patch.setattr(build, "kernel_sources", lambda: PROBES)
        patch.delenv("KVZIP_CPU", raising=False)
        cpu_module._load.cache_clear()
        yield folder
    cpu_module._load.cache_clear()


@pytest.mark.usefixtures("native")
@settings(max_examples=60, deadline=None)
@given(warps=st.integers(0, 700), threads=st.integers(1, 9))
def test_every_warp_runs_exactly_once_in_pieces_that_start_even(warps: int, threads: int) -> None:
    """Promise: a launch runs each warp once, however warps and threads divide, and no piece parts a pair of warps."""
    counts, starts = np.zeros(warps + 1, np.uint32), np.full(warps + 1, -1, np.int32)
    Cpu(threads).launch("probe_pieces", warps, counts, starts)
    assert counts.tolist() == [1] * warps + [0]
    assert not (starts[:warps] % 2).any()
    assert len(set(starts[:warps].tolist())) <= max(1, cpu_module.PIECES_PER_THREAD * threads)


@pytest.mark.usefixtures("native")
def test_work_is_split_over_the_threads() -> None:
    """Promise: with several threads there are enough pieces to balance them; with one there is a single call."""
    counts, starts = np.zeros(256, np.uint32), np.zeros(256, np.int32)
    Cpu(2).launch("probe_pieces", 256, counts, starts)
    assert len(set(starts.tolist())) == 2 * cpu_module.PIECES_PER_THREAD
    Cpu(1).launch("probe_pieces", 256, counts, starts)
    assert set(starts.tolist()) == {0}


@pytest.mark.usefixtures("native")
def test_threads_may_launch_at_once_on_one_device() -> None:
    """Promise: a device is safe to use from several threads; nobody waits for ever behind another's launch."""
    device, results = Cpu(3), [np.zeros(64, np.uint32) for _ in range(8)]
    callers = [
        threading.Thread(target=device.launch, args=("probe_spin", 64, np.uint32(20_000 * (i + 1)), out), daemon=True)
        for i, out in enumerate(results)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert not any(caller.is_alive() for caller in callers)
    expected = np.zeros(64, np.uint32)
    for i, out in enumerate(results):
        Cpu(1).launch("probe_spin", 64, np.uint32(20_000 * (i + 1)), expected)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.usefixtures("native")
def test_python_goes_on_while_a_kernel_runs() -> None:
    """Promise: a launch releases the GIL, so that reading and writing go on beside it."""
    arguments = "probe_spin", 1024, np.uint32(2_000_000), np.zeros(1024, np.uint32)
    kernel = threading.Thread(target=Cpu(1).launch, args=arguments)
    began = last = time.perf_counter()
    longest = 0.0
    kernel.start()
    while kernel.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    # With the GIL held, one pause would be as long as the kernel.
    assert longest < (last - began) / 2


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_can_launch() -> None:
    """Promise: kvzip works in data loaders that fork after its use; the parent's threads are not waited for."""
    device, counts, starts = Cpu(3), np.zeros(64, np.uint32), np.zeros(64, np.int32)
    device.launch("probe_pieces", 64, counts, starts)
    child = os.fork()
    if child == 0:
        device.launch("probe_pieces", 64, counts, starts)
        os._exit(0 if (counts == 2).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.usefixtures("native")
def test_scalars_arrive_with_their_own_type() -> None:
    """Promise: each scalar type reaches the kernel with every bit, at the ends of its range."""
    out = np.zeros(5)
    values = np.int32(-(2**31)), np.uint32(2**32 - 1), np.int64(-(2**53)), np.uint64(2**63), np.float32(0.1)
    Cpu(1).launch("probe_scalars", 1, *values, out)
    assert out.tolist() == [float(value) for value in values]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("level", runnable_levels(HOST))
def test_half_precision_converts_at_every_level(level: str) -> None:
    """Promise: levels without half-precision instructions convert like numpy; no runtime library is needed."""
    half = np.arange(2**16, dtype=np.uint16).view(np.float16)
    single = np.zeros(half.size, np.float32)
    Cpu(2, level).launch("probe_half", half.size // 32, half, single)
    np.testing.assert_array_equal(single, half.astype(np.float32))


@pytest.mark.usefixtures("native")
def test_an_unknown_kernel_is_named() -> None:
    """Promise: a codec that asks for a kernel of another version is told so, not crashed."""
    with pytest.raises(UnsupportedError, match="'no_such_kernel'") as error:
        Cpu(1).launch("no_such_kernel", 1)
    assert error.value.code == "unknown-kernel"


@pytest.mark.usefixtures("native")
def test_a_strided_array_is_refused() -> None:
    """Promise: a kernel never gets the address of an array that it would walk in the wrong order."""
    with pytest.raises(ValueError, match="argument 1 of kernel 'probe_pieces' is not C-contiguous"):
        Cpu(1).launch("probe_pieces", 4, np.zeros(8, np.uint32), np.zeros(16, np.int32)[::2])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("argument", [3, 2.5, np.float64(1), np.uint8(1), None, [1, 2]])
def test_an_argument_without_a_kernel_type_is_refused(argument: object) -> None:
    """Promise: the width of a value is never guessed: a wrong guess would shift all arguments behind it."""
    with pytest.raises(TypeError, match="argument 0 of kernel 'probe_spin'"):
        Cpu(1).launch("probe_spin", 1, argument, np.zeros(1, np.uint32))


@pytest.mark.usefixtures("native")
def test_the_environment_chooses_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: KVZIP_CPU makes this process run the code that a lesser processor would."""
    assert Cpu(1).level == runnable_levels(HOST)[-1]
    monkeypatch.setenv("KVZIP_CPU", HOST.levels[0])
    assert Cpu(1).level == HOST.levels[0]
    monkeypatch.setenv("KVZIP_CPU", "")
    assert Cpu(1).level == runnable_levels(HOST)[-1]


@pytest.mark.usefixtures("native")
def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a mistyped KVZIP_CPU is an error that lists the levels, not a silent default."""
    monkeypatch.setenv("KVZIP_CPU", "avx9")
    with pytest.raises(UsageError, match=f"'avx9'.*{HOST.levels[-1]}"):
        Cpu(1)


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(HOST.arch != "x86_64", reason="the other architectures have one level")
def test_a_level_beyond_the_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: nobody meets an illegal instruction."""
    monkeypatch.setattr(cpu_module, "runnable_levels", lambda target: target.levels[:1])
    with pytest.raises(UnsupportedError, match="cannot run CPU level x86_64_v4"):
        Cpu(1, "x86_64_v4")


def test_no_threads_are_refused() -> None:
    """Promise: -T 0 is an error, not a hang."""
    with pytest.raises(UsageError, match="at least 1"):
        Cpu(0)


@pytest.mark.usefixtures("native")
def test_addresses_and_copies() -> None:
    """Promise: on the CPU the device's arrays are numpy's own: no copy either way, and addresses of views are exact."""
    device, array = Cpu(1), np.arange(10, dtype=np.uint16)
    assert device.address(array[3:]) == device.address(array) + 6
    assert device.to_host(device.to_device(array)) is array


@pytest.mark.usefixtures("native")
def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: "auto" finds a device on every machine; a GPU asked for and not here is an error that says why."""
    assert get_device("cpu", threads=3).name == "cpu"
    assert get_device("auto").name in ("cpu", "cuda")
    for spec in ("gpu", "cuda:", "cuda:x", "cpu:1", ""):
        with pytest.raises(UsageError, match="there is no device"):
            get_device(spec)
    monkeypatch.setattr(cuda_setup, "driver_version", lambda: None)
    assert get_device("auto").name == "cpu"
    with pytest.raises(UnsupportedError, match="no GPU can be used") as error:
        get_device("cuda:1")
    assert isinstance(error.value, KvzipError) and error.value.code == "no-cuda"
