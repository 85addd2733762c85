"""The emulator finds the mistakes that a CPU forgives and a GPU does not, in CUDA C++ and in PTX alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvzip.codecs.base import Codec
from kvzip.codecs.cachegen import CacheGen
from kvzip.codecs.fp8 import Fp8
from kvzip.devices.base import Device
from tests import codecs
from tests.emulator import building, ptx
from tests.emulator.devices import Emulated
from tests.emulator.module import Buffer, EmulatorError, Module

SOURCE = Path(__file__).parent.joinpath("emulator", "kernels", "broken.cu")
SEEDS = range(5)


@pytest.fixture(scope="module", params=["cuda", "ptx"])
def module(request: pytest.FixtureRequest) -> Any:
    source = SOURCE.read_text()
    if request.param == "ptx":
        return ptx.module(source, SOURCE.name, "sm_90")
    return Module(building.from_cuda(source, SOURCE.name))


def launch(module: Module, kernel: str, *arguments: Any, blocks: int = 1, seed: int = 0) -> None:
    """Arrays are the only memory that the kernel may touch."""
    arrays = [argument for argument in arguments if isinstance(argument, np.ndarray)]
    buffers = [Buffer(x.ctypes.data, x.ctypes.data + x.nbytes, x.flags.writeable) for x in arrays]
    values = [np.uint64(x.ctypes.data) if isinstance(x, np.ndarray) else x for x in arguments]
    module.launch(kernel, blocks, 128, values, buffers, seed)


def numbers(count: int = 128) -> np.ndarray:
    return np.arange(100, 100 + count, dtype=np.uint32)


def out(count: int = 128) -> np.ndarray:
    return np.zeros(count, np.uint32)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kernel", "distance"),
    # With a barrier of the warp alone, lane 0 must not look into the next warp.
    [("exchange_with_block_barrier", 1), ("exchange_with_block_barrier", 77), ("exchange_with_warp_barrier", 0)],
)
def test_correct_kernels_give_the_same_in_every_order(module: Module, kernel: str, distance: int, seed: int) -> None:
    """Promise: no false alarms, and results that depend on no order are those of CUDA."""
    result = out()
    launch(module, kernel, numbers(), result, np.uint32(distance), seed=seed)
    np.testing.assert_array_equal(result, np.roll(numbers(), -distance))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kernel", "distance"),
    [("exchange_without_barrier", 1), ("exchange_with_vote", 1), ("exchange_with_warp_barrier", 32)],
)
def test_a_missing_barrier_is_found_in_every_order(module: Module, kernel: str, distance: int, seed: int) -> None:
    """Promise: shared memory that is read with no barrier of the right width after the write ends the launch, whether
    the order of this run made the result wrong or not. Votes and shuffles are no barriers.
    """
    with pytest.raises(EmulatorError, match=r"race: thread \d+ .* with no barrier between"):
        launch(module, kernel, numbers(), out(), np.uint32(distance), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_races_in_global_memory_are_found(module: Module, seed: int) -> None:
    """Promise: the same holds for global memory, for writes after reads, and between blocks."""
    for kernel in ("exchange_in_global_memory", "write_after_read"):
        with pytest.raises(EmulatorError, match=rf"{kernel}: race"):
            launch(module, kernel, numbers(), out(), np.uint32(3), seed=seed)
    with pytest.raises(EmulatorError, match=r"race: thread .* of block 1 .* thread .* of block 0 writes the same"):
        launch(module, "blocks_write_the_same", out(), blocks=2, seed=seed)


def test_seeds_choose_the_order_of_threads(module: Module) -> None:
    """Promise: what depends on the order of threads shows: another seed is another order, the same one is the same."""
    orders = []
    for seed in (*SEEDS, *SEEDS):
        result = out(256)
        launch(module, "tickets", out(1), result, blocks=2, seed=seed)
        assert sorted(result.tolist()) == list(range(256))
        orders.append(result.tolist())
    assert orders[: len(SEEDS)] == orders[len(SEEDS) :]
    assert len({tuple(order) for order in orders}) == len(SEEDS)
    assert orders[0] == list(range(256))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("vote_of_some", "at a vote, thread .* at its end|at its end, thread .* at a vote"),
        ("vote_under_a_mask", "a mask that leaves lanes out"),
        ("vote_and_shuffle", "at a (vote|butterfly shuffle), thread .* at a (vote|butterfly shuffle)"),
        ("vote_and_barrier", "at a vote, thread .* at __syncthreads"),
    ],
)
def test_lanes_that_part_are_found(module: Module, kernel: str, reason: str, seed: int) -> None:
    """Promise: warp operations that not all lanes come to end the launch with a message; nothing hangs."""
    launch(module, kernel, out(), np.uint32(32), seed=seed)
    with pytest.raises(EmulatorError, match=reason):
        launch(module, kernel, out(), np.uint32(20), seed=seed)


@pytest.mark.parametrize("kernel", ["read_at", "write_at"])
def test_accesses_outside_are_found(module: Module, kernel: str) -> None:
    """Promise: not one byte outside the buffers of a launch is touched, however far away it is."""
    buffer, beside = np.zeros(101, np.uint8), np.zeros(101, np.uint8)
    start = -buffer.ctypes.data % 4
    last = start + (101 - start - 4) // 4 * 4
    for offset in (start, last):
        launch(module, kernel, buffer, out(), np.int64(offset))
    apart = beside.ctypes.data - buffer.ctypes.data + (start + buffer.ctypes.data - beside.ctypes.data) % 4
    for offset in (last + 4, start - 4, apart, 2**40 + start, -4 - buffer.ctypes.data):
        with pytest.raises(EmulatorError, match="out of bounds"):
            launch(module, kernel, buffer, out(), np.int64(offset))
    assert not beside.any()


def test_accesses_outside_shared_memory_are_found(module: Module) -> None:
    """Promise: shared memory ends where it ends."""
    launch(module, "read_shared_at", out(), np.uint32(127 * 4))
    for offset in (2**20, 2**32 - 2**20):
        with pytest.raises(EmulatorError, match="out of bounds"):
            launch(module, "read_shared_at", out(), np.uint32(offset))


def test_misaligned_accesses_are_found(module: Module) -> None:
    """Promise: an access off its own alignment, which x86 forgives and CUDA does not, ends the launch."""
    buffer = np.zeros(64, np.uint32)
    for kernel in ("read_at", "write_at"):
        with pytest.raises(EmulatorError, match="misaligned"):
            launch(module, kernel, buffer, out(), np.int64(2))


def test_writes_into_read_only_buffers_are_found(module: Module) -> None:
    """Promise: a kernel cannot change an array that numpy protects."""
    buffer = np.zeros(64, np.uint32)
    buffer.flags.writeable = False
    launch(module, "read_at", buffer, out(), np.int64(0))
    with pytest.raises(EmulatorError, match="read-only"):
        launch(module, "write_at", buffer, out(), np.int64(0))


def test_shared_memory_begins_as_garbage(module: Module) -> None:
    """Promise: a kernel that forgets to initialize it does not find zeros."""
    result = out()
    launch(module, "read_uninitialized", result, np.uint32(3))
    assert (result == 0xA5A5A5A5).all()


def test_arguments_of_the_wrong_width_are_refused(module: Module) -> None:
    """Promise: CuPy passes what it is given; the emulator compares it with the kernel's parameters."""
    with pytest.raises(TypeError, match=r"parameters of \[8, 4\] bytes, got \[8, 8\]"):
        launch(module, "read_uninitialized", out(), np.uint64(3))
    with pytest.raises(TypeError, match="parameters"):
        launch(module, "read_uninitialized", out())


@pytest.mark.parametrize(
    "codec", [Fp8(scale="token"), CacheGen(level=6), CacheGen(coder="range")], ids=lambda codec: str(codec.config())
)
def test_codecs_do_not_depend_on_the_order_of_threads(codec: Codec, cpu: Device) -> None:
    """Promise: bytes are the same in any order in which a GPU may run its threads, not only in the one that other tests
    see.
    """
    batch = codecs.batch_of([codecs.numbers(70, 3, 24, seed=seed) for seed in range(2)])
    for seed in SEEDS:
        codecs.check_same_bytes(codec, batch, Emulated(seed), cpu)


# ---------------------------------------------------------------------------------------------------- the translator

ENTRY = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 kernel_param_0, .param .u32 kernel_param_1)
{{
  .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>; .reg .f32 %f<9>;
  ld.param.u64 %rd1, [kernel_param_0];
  ld.param.u32 %r1, [kernel_param_1];
  {}
  st.global.u32 [%rd1], %r2;
  ret;
}}
"""

INSTRUCTIONS: list[tuple[str, Callable[[int], int]]] = [
    ("shl.b32 %r2, 3, %r1;", lambda x: 3 << x if x < 32 else 0),
    ("shr.u32 %r2, -1, %r1;", lambda x: 0xFFFFFFFF >> x if x < 32 else 0),
    ("shr.s32 %r2, -5, %r1;", lambda x: -5 >> min(x, 31)),
    ("div.u32 %r2, 1000, %r1;", lambda x: 1000 // x if x else -1),
    ("rem.u32 %r2, 1000, %r1;", lambda x: 1000 % x if x else 1000),
    ("mul.hi.u32 %r2, %r1, -1;", lambda x: x * 0xFFFFFFFF >> 32),
    ("mad.lo.s32 %r2, %r1, -3, 7;", lambda x: -3 * x + 7),
    ("bfe.u32 %r2, 0x12345678, %r1, 8;", lambda x: 0x12345678 >> x & 255),
    ("bfi.b32 %r2, 0x1ff, 0x12345678, %r1, 8;", lambda x: 0x12345678 & ~(255 << x) | (255 << x)),
    ("shf.l.wrap.b32 %r2, 0x80000001, 0x12345678, %r1;", lambda x: 0x1234567880000001 << x % 32 >> 32),
    ("prmt.b32 %r2, 0x33221100, 0x77665544, 0x7410;", lambda x: 0x77441100),
    ("lop3.b32 %r2, %r1, 0xff00ff00, 0x0f0f0f0f, 0x96;", lambda x: x ^ 0xFF00FF00 ^ 0x0F0F0F0F),
    ("clz.b32 %r2, %r1;", lambda x: 32 - x.bit_length()),
    ("brev.b32 %r2, %r1;", lambda x: int(f"{x:032b}"[::-1], 2)),
    ("setp.gt.s32 %p1, %r1, -1; selp.b32 %r2, 5, 6, %p1;", lambda x: 5 if x < 2**31 else 6),
    ("setp.gt.and.u32 %p1, %r1, 3, !%p2; selp.b32 %r2, 5, 6, %p1;", lambda x: 5 if x > 3 else 6),
    ("cvt.rn.f32.u32 %f1, %r1; cvt.rzi.u32.f32 %r2, %f1;", lambda x: int(np.float32(x)) if x < 2**31 else -1),
    ("cvt.s32.s8 %r2, %r1;", lambda x: (x & 255) - (256 if x & 128 else 0)),
    ("mov.f32 %f1, 0f7FC00001; add.rn.f32 %f1, %f1, %f1; mov.b32 %r2, %f1;", lambda x: 0x7FFFFFFF),
    ("max.NaN.f32 %f1, 0f3F800000, 0fFFC00001; mov.b32 %r2, %f1;", lambda x: 0x7FFFFFFF),
    # Rounded once: neither the product nor, as a double, the sum comes out of this as a tie.
    ("fma.rn.f32 %f1, 0f3F800800, 0f3F800800, 0fBF801000; mov.b32 %r2, %f1;", lambda x: 0x33800000),
    ("fma.rn.f32 %f1, 0f33800100, 0f3F7FFE00, 0f3F800001; mov.b32 %r2, %f1;", lambda x: 0x3F800001),
    ("cvt.rn.bf16x2.f32 %r2, 0f3F808000, 0f7F800001;", lambda x: 0x3F807FFF),
    ("@%p1 bra $A; mov.u32 %r2, 1; bra $B; $A: mov.u32 %r2, 2; $B:", lambda x: 1),
    ("mov.b64 %rd2, {%r1, 9}; shr.u64 %rd2, %rd2, 31; cvt.u32.u64 %r2, %rd2;", lambda x: (9 << 32 | x) >> 31),
]


@pytest.mark.parametrize(("code", "expected"), INSTRUCTIONS, ids=[code for code, _ in INSTRUCTIONS])
def test_instructions_mean_what_the_isa_says(code: str, expected: Callable[[int], int]) -> None:
    """Promise: translated instructions keep PTX's rules where C++ has others: long shifts, division by zero, NaN."""
    translated = Module(building.from_translation(ptx.translate(ENTRY.format(code)), "instruction"))
    for x in (0, 1, 5, 31, 32, 33, 200, 2**31 - 1):
        result = np.zeros(1, np.uint32)
        buffers = [Buffer(result.ctypes.data, result.ctypes.data + 4, True)]
        if "bf" in code and x > 24:
            continue
        translated.launch("kernel", 1, 1, [np.uint64(result.ctypes.data), np.uint32(x)], buffers)
        assert int(result[0]) == expected(x) % 2**32, x


@pytest.mark.parametrize(
    "code",
    [
        "fma.rz.f32 %f1, %f1, %f1, %f1;",
        "add.rz.f32 %f1, %f1, %f1;",
        "cp.async.ca.shared.global [%r1], [%rd1], 16;",
        "mov.u32 %r2, %clock;",
        "ld.global.u32 %r2, [%rd7+%r1];",
        "bar.sync 1;",
        ".maxnreg 32;",
    ],
)
def test_unknown_ptx_is_refused(code: str) -> None:
    """Promise: the translator guesses nothing; it says what it does not know."""
    with pytest.raises(ptx.UnknownPtxError, match=code.split()[0].replace(".", r"\.")):
        ptx.translate(ENTRY.format(code))
