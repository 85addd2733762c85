"""Writes the tables of docs/gpu.md: what the compiler makes of the kernels, and how fast that should be on an H200.

    python -m tools.gpu_table

Needs nvidia-cuda-nvrtc and nvidia-cuda-nvdisasm, no GPU. Everything between the markers in docs/gpu.md is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvzip.devices import cuda_source
from tools import nvrtc, sass

DOCUMENT = Path(__file__).parents[1] / "docs" / "gpu.md"
BEGIN, END = "<!-- tables: python -m tools.gpu_table -->", "<!-- end of tables -->"

# An H200: multiprocessors, their clock, schedulers that issue one warp instruction a cycle each, and a measured copy.
MULTIPROCESSORS, CLOCK, SCHEDULERS, COPY = 132, 1.83e9, 4, 4.3e12
ISSUE_SHARE = 0.7
"""The share of issue slots that well-behaved code fills."""
REGISTERS, SHARED, MOST_WARPS = 65536, 227 << 10, 64
BATCH = 128 << 20
PREDICTED = "sm_90"


@dataclass(frozen=True)
class HotLoop:
    """How to find a kernel's hot loop, and what one turn of it does.

    Attributes:
        marker, at_least: the smallest loop with so many instructions like this is meant.
        per_marker: elements that a warp handles for each such instruction.
        shortest: count the shortest way through the loop: the rest is for what is rare.
        moved, least: bytes of global memory an element, as written and as it cannot be less.
        latency: cycles of the chain of dependent instructions in a turn of 32 elements, 0 if there is none.
        warp_bytes: bytes of cache that a warp handles, which says how many there are in a batch.
    """

    kernel: str
    part: str
    marker: str
    at_least: int
    per_marker: float
    shortest: bool
    moved: float
    least: float
    latency: int = 0
    warp_bytes: int = 64 << 10


CODED = 2.55 / 8  # bytes an element of SmolLM2's caches at cachegen's level 5

HOT_LOOPS = (
    HotLoop("cachegen_decode_bf16", "decode", r"LDS\.U16", 6, 32, True, 2 + CODED, 2 + CODED, latency=300),
    HotLoop("cachegen_tiles_bf16", "maxima", r"\bLDG?\.(E\.)?U16", 4, 32, False, 2, 2, warp_bytes=64 << 10),
    HotLoop("cachegen_encode_bf16", "quantize", r"STG?\.E\.U8", 1, 32, True, 3, 2),
    HotLoop("cachegen_encode_bf16", "code", r"\bPOPC", 10, 16, False, 1 + CODED, CODED, latency=180),
    HotLoop("fp8_encode_e4m3fn_bf16", "encode", r"STG?\.E ", 8, 128, False, 3, 3),
    HotLoop("fp8_decode_e4m3fn_bf16", "decode", r"STG?\.E\.64 ", 8, 128, False, 3, 3),
    HotLoop("integers_decode4_bf16", "decode", r"STG?\.E\.U16", 2, 32, False, 2.52, 2.52),
    HotLoop("kivi_decode_keys2_bf16", "decode", r"STG?\.E\.U16", 4, 32, False, 2.38, 2.38),
    HotLoop("kivi_decode_values2_bf16", "decode", r"STG?\.E\.U16", 2, 32, False, 2.38, 2.38),
    HotLoop("symbols_decode", "decode", r"LDS\.U16", 6, 32, True, 1 + CODED, 1 + CODED, latency=300),
    HotLoop("lossless_decode_16", "decode", r"LDS\.U16", 5, 32, True, 2 + 1.4, 2 + 1.4, latency=300),
    HotLoop("tuned_symbols_decode", "decode", r"LDS\.U16", 5, 32, True, 1 + CODED, 1 + CODED, latency=300),
)


def main() -> None:
    with ThreadPoolExecutor(2) as pool:
        jobs = {
            (file, architecture): pool.submit(nvrtc.compile_kernels, file, architecture)
            for file in cuda_source.sources()
            for architecture in nvrtc.ARCHITECTURES
        }
        compiled = {key: job.result() for key, job in jobs.items()}
    tables = "\n".join([*resources(compiled), "", *predictions(compiled)])
    text = DOCUMENT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")


def resources(compiled: dict[tuple[str, str], nvrtc.Compiled]) -> Iterator[str]:
    """Per kernel and architecture; versions for several types that take the same are one row."""
    yield "### What a kernel takes: registers, and bytes of shared memory of a block where it has any"
    yield ""
    yield "| kernel | " + " | ".join(nvrtc.ARCHITECTURES) + " | spills, local memory |"
    yield "|---|" + "--:|" * len(nvrtc.ARCHITECTURES) + "--:|"
    rows: dict[tuple[str, tuple[nvrtc.Resources, ...]], list[str]] = {}
    for file in cuda_source.sources():
        for kernel in sorted(compiled[file, PREDICTED].resources):
            found = tuple(compiled[file, each].resources[kernel] for each in nvrtc.ARCHITECTURES)
            stem = re.sub(r"_(bf16|f16|f32|8|16|32)$", "", kernel)
            rows.setdefault((stem, found), []).append(kernel.removeprefix(stem).strip("_"))
    for (stem, found), types in rows.items():
        cells = " | ".join(str(each.registers) + (f", {each.shared}" if each.shared else "") for each in found)
        wasted = sum(each.local + each.spilled for each in found)
        yield f"| {' '.join((stem, *types)).strip()} | {cells} | {wasted} |"


def predictions(compiled: dict[tuple[str, str], nvrtc.Compiled]) -> Iterator[str]:
    yield f"### What that predicts on an H200 ({PREDICTED}, bfloat16, batches of {BATCH >> 20} MiB)"
    yield ""
    heads = ("kernel", "bytes moved (least)", "instructions", "warps an SM", "by issue", "by memory", "by latency")
    yield "| " + " | ".join((*heads, "GB/s of cache")) + " |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for hot in HOT_LOOPS:
        file = cuda_source.file_of(hot.kernel)
        result = compiled[file, PREDICTED]
        loop = sass.hot_loop(sass.disassemble(result.cubin)[hot.kernel], hot.marker, hot.at_least)
        if loop is None:
            raise SystemExit(f"{hot.kernel} has no loop with {hot.at_least} of {hot.marker}: mend HOT_LOOPS")
        lanes = 32.0 if hot.shortest else loop.markers * hot.per_marker
        instructions = 32 * (loop.shortest if hot.shortest else loop.instructions) / lanes
        warps = min(_resident(result.resources[hot.kernel]), BATCH / hot.warp_bytes / MULTIPROCESSORS)
        slots = MULTIPROCESSORS * SCHEDULERS * CLOCK * ISSUE_SHARE
        issue = slots / instructions * 64
        memory = COPY / hot.moved * 2
        latency = MULTIPROCESSORS * CLOCK * warps / hot.latency * 64 if hot.latency else float("inf")
        cells = [f"{rate / 1e9:.0f}" if rate < 1e15 else "" for rate in (issue, memory, latency)]
        yield (
            f"| {hot.kernel}, {hot.part} | {hot.moved:.2f} ({hot.least:.2f}) | {instructions / 32:.2f} | {warps:.0f} "
            f"| {' | '.join(cells)} | **{min(issue, memory, latency) / 1e9:.0f}** |"
        )


def _resident(found: nvrtc.Resources) -> int:
    """Warps that fit on a multiprocessor at once."""
    threads = cuda_source.BLOCK_THREADS
    blocks = REGISTERS // (-(-found.registers // 8) * 8 * threads)
    if found.shared:
        blocks = min(blocks, SHARED // (found.shared + 1024))
    return min(MOST_WARPS, blocks * cuda_source.WARPS_PER_BLOCK)


if __name__ == "__main__":
    main()
