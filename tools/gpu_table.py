"""Writes the tables of docs/gpu.md: what the compiler makes of the kernels, and how fast that should be on an H200.

    python -m tools.gpu_table

Needs nvidia-cuda-nvrtc and nvidia-cuda-nvdisasm, no GPU. Everything between the markers in docs/gpu.md is replaced.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
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

LOAD, L2, L1, LDS, SHFL = 600, 260, 35, 30, 25
"""Cycles until a number is there that a warp has asked for: of memory that no cache holds, of the caches, of shared
memory, of another lane. A loop that asks for a row, and for the next one when that is done, pays them in each turn.
Where the next n rows are under way meanwhile (``in_turn`` and its like), a turn takes an n-th of the first, or the
others if they are longer.
"""


@dataclass(frozen=True)
class HotLoop:
    """How to find a kernel's hot loop, and what one turn of it does.

    Attributes:
        marker, at_least: the smallest loop with so many instructions like this is meant.
        per_marker: elements that a warp handles for each such instruction.
        shortest: count the shortest way through the loop: the rest is for what is rare.
        moved, least: bytes of global memory an element, as written and as it cannot be less.
        latency: cycles of the chain of dependent instructions for 32 elements, 0 if there is none.
        warp_bytes: bytes of cache that a warp handles, which says how many there are in a batch.
        through: count the shortest way that passes so many of these instructions, one of which comes with each
            ``per_marker`` elements: the first.
        element: bytes of an element in the cache.
        form: the codec's option with which the kernel takes this way; measurements stand beside the row without.
        alternates: a warp comes back to this part with each strip. So some warps wait for memory while others work, and
            the times by issue, by memory and by latency of the kernel's parts add up before the longest counts.
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
    through: sass.Through = ()
    element: int = 2
    form: str = ""
    alternates: bool = False

    def instructions(self, blocks: list[sass.Block]) -> float:
        """Warp instructions for 32 elements."""
        try:
            loop = sass.hot_loop(blocks, self.marker, self.at_least, self.through)
        except ValueError as error:
            raise SystemExit(f"{self.kernel}: {error}: mend HOT_LOOPS") from error
        if loop is None:
            raise SystemExit(f"{self.kernel} has no loop with {self.at_least} of {self.marker}: mend HOT_LOOPS")
        if self.through:
            return 32 * loop.way / (self.through[0][1] * self.per_marker)
        return loop.way if self.shortest else 32 * loop.instructions / (loop.markers * self.per_marker)


CODED = 2.55 / 8  # bytes an element of SmolLM2's caches at cachegen's level 5
KVTC = 2.1 / 8  # kvtc's at level 5
FLOATS = 1.3  # lossless's, of which 7 bits are the mantissa
BYTES = 0.7  # bytes a byte of bfloat16 numbers, order-0
SHARED_NUMBERS = 4 / 32  # bytes of a scale and a minimum, in groups of 32
ROWS = 8 << 10  # bytes of 32 tokens of a head of 128 channels

# fmt: off
HOT_LOOPS = (
    HotLoop("cachegen_decode_bf16", "decode", r"LDS\.U16", 6, 32, True, 2 + CODED, 2 + CODED, latency=300),
    HotLoop("cachegen_tiles_bf16", "maxima", r"\bSTS\.U16", 8, 128, True, 2, 2, latency=(LOAD // 8 + LDS) // 4,
            through=((r"\bSTS\.U16", 8),)),
    HotLoop("cachegen_encode_bf16", "quantize", r"STG?\.E\.U8", 8, 32, True, 3, 2, latency=LOAD // 8 + L1 + 25 + LDS,
            through=((r"STG?\.E\.U8", 8), (r"STS\.U16", 4))),
    HotLoop("cachegen_encode_bf16", "code", r"\bPOPC", 8, 16, False, 1 + CODED, CODED, latency=max(L2 // 4, 100)),
    HotLoop("cachegen_quantize_bf16", "quantize", r"STG\.E ", 8, 128, True, 3, 3,
            latency=(LOAD // 8 + L1 + 25) // 4, through=((r"STG\.E ", 8), (r"\bF2FP\.BF16", 32))),
    HotLoop("cachegen_dequantize_bf16", "dequantize", r"STG?\.E\.64", 8, 128, True, 3, 3,
            latency=(LOAD // 8 + L1 + 40) // 4, through=((r"STG?\.E\.64", 8), (r"\bF2FP\.BF16", 16))),
    HotLoop("range_count", "count", r"\bSTS", 4, 32, True, 1, 1, latency=max(LOAD // 4, 2 * LDS),
            through=((r"\bSTS", 4),)),
    HotLoop("range_encode", "code", r"VOTE", 4, 16, True, 1 + CODED, 1 + CODED, latency=max(LOAD // 2, LDS + 170),
            warp_bytes=16 << 10, through=((r"VOTE", 4), (r"STG\.E\.U16", 2))),
    HotLoop("range_decode", "decode", r"LDS", 7, 32, True, 1 + CODED, 1 + CODED, latency=7 * LDS + 350,
            warp_bytes=16 << 10),
    HotLoop("fp8_encode_e4m3fn_bf16", "encode", r"\bSTG?\.E ", 8, 128, True, 3, 3, latency=LOAD // 32,
            through=((r"\bSTG?\.E ", 8),)),
    HotLoop("fp8_encode_e4m3fn_bf16", "encode", r"\bF2FP\.BF16", 32, 32, True, 3, 3, latency=LOAD // 32,
            through=((r"\bF2FP\.BF16", 32), (r"\bSTG?\.E ", 8)), form="scale=head"),
    HotLoop("fp8_encode_e4m3fn_bf16", "encode", r"\bLDS\.64 ", 4, 128, True, 3, 3, latency=LOAD // 16,
            through=((r"\bLDS\.64 ", 4), (r"\bSTG?\.E ", 4)), form="scale=token"),
    HotLoop("fp8_encode_e4m3fn_f32", "encode", r"\bSTG?\.E ", 8, 128, True, 5, 5, latency=LOAD // 32,
            through=((r"\bSTG?\.E ", 8),), element=4),
    HotLoop("fp8_decode_e4m3fn_bf16", "decode", r"STG?\.E\.64 ", 8, 128, False, 3, 3),
    HotLoop("head_maxima_bf16", "load", r"LDG?\.E\.U16", 8, 32, True, 2, 2, latency=LOAD // 8,
            through=((r"LDG?\.E\.U16", 8),)),
    HotLoop("head_maxima_bf16", "reduce", r"STG", 8, 128, True, 4 / 128, 4 / 128, latency=5 * (SHFL + 8) // 4,
            through=((r"STG", 8), (r"SHFL", 40))),
    HotLoop("integers_encode4_bf16", "extremes", r"STS\.64", 8, 128, True, 2, 2, latency=LOAD // 32,
            through=((r"STS\.64", 8),), alternates=True),
    HotLoop("integers_encode4_bf16", "scales", r"ST\.E\.U16", 1, 4096, True, SHARED_NUMBERS / 4, SHARED_NUMBERS / 4,
            latency=(4 * LDS + 150) // 128, through=((r"ST\.E\.U16", 1), (r"STS\.128", 1)), alternates=True),
    HotLoop("integers_encode4_bf16", "quantize", r"ST\.E\.U16", 4, 128, True, 1 / 2, 1 / 2, latency=L2 // 16,
            through=((r"ST\.E\.U16", 4), (r"\bF2FP\.BF16", 16)), alternates=True),
    HotLoop("integers_encode8_bf16", "extremes", r"STS\.64", 8, 128, True, 2, 2, latency=LOAD // 32,
            through=((r"STS\.64", 8),), alternates=True),
    HotLoop("integers_encode8_bf16", "scales", r"ST\.E\.U16", 1, 4096, True, SHARED_NUMBERS / 4, SHARED_NUMBERS / 4,
            latency=(4 * LDS + 150) // 128, through=((r"ST\.E\.U16", 1), (r"STS\.128", 1)), alternates=True),
    HotLoop("integers_encode8_bf16", "quantize", r"\bF2FP\.BF16", 8, 32, True, 1, 1, latency=L2 // 8,
            through=((r"\bF2FP\.BF16", 8),), alternates=True),
    HotLoop("integers_decode4_bf16", "decode", r"STG?\.E\.64", 8, 128, True, 2.52, 2.52, latency=LOAD // 32,
            through=((r"STG?\.E\.64", 8), (r"LDG?\.E\.U16", 16))),
    HotLoop("integers_decode8_bf16", "decode", r"STG?\.E\.64", 8, 128, True, 3.02, 3.02, latency=LOAD // 32,
            through=((r"STG?\.E\.64", 8),)),
    HotLoop("kivi_encode_keys2_bf16", "extremes", r"LDG?\.E\.64", 8, 128, True, 2, 2, latency=LOAD // 32,
            through=((r"LDG?\.E\.64", 8), (r"HMNMX", 16)), alternates=True),
    HotLoop("kivi_encode_keys2_bf16", "quantize", r"SHF\.R\.W", 16, 32, True, 1 / 4, 1 / 4, latency=L2 // 16,
            through=((r"SHF\.R\.W", 16), (r"\bF2FP\.BF16", 16)), alternates=True),
    HotLoop("kivi_encode_values2_bf16", "extremes", r"STS\.64", 8, 128, True, 2, 2, latency=LOAD // 32,
            through=((r"STS\.64", 8),), alternates=True),
    HotLoop("kivi_encode_values2_bf16", "scales", r"ST\.E\.64", 2, 2048, True, SHARED_NUMBERS, SHARED_NUMBERS,
            latency=(2 * LDS + 150) // 128, alternates=True,
            through=((r"ST\.E\.64", 2), (r"STS\.128", 4), (r"MUFU", 4))),
    HotLoop("kivi_encode_values2_bf16", "quantize", r"ST\.E\.U8", 4, 128, True, 1 / 4, 1 / 4, latency=L2 // 16,
            through=((r"ST\.E\.U8", 4), (r"\bF2FP\.BF16", 16)), alternates=True),
    HotLoop("kivi_decode_keys2_bf16", "decode", r"STG?\.E\.64", 8, 128, True, 2.38, 2.38, latency=LOAD // 32,
            through=((r"STG?\.E\.64", 8),)),
    HotLoop("kivi_decode_values2_bf16", "decode", r"STG?\.E\.64", 8, 128, True, 2.38, 2.38, latency=LOAD // 32,
            through=((r"STG?\.E\.64", 8), (r"LDG?\.E\.U8", 8))),
    HotLoop("symbols_encode", "count", r"\bSTS", 16, 64, True, 1 / 2, 0, latency=max(LOAD // 4, 2 * LDS) // 2,
            through=((r"\bSTS", 16),)),
    HotLoop("symbols_encode", "code", r"\bPOPC", 8, 16, False, 1 + CODED, 1 + CODED, latency=max(L2 // 4, 100)),
    HotLoop("symbols_decode", "decode", r"LDS\.U16", 6, 32, True, 1 + CODED, 1 + CODED, latency=300),
    HotLoop("lossless_tiles_16", "tiles", r"LDG", 4, 32, False, 2, 2, latency=LOAD // 4 + LDS),
    HotLoop("lossless_encode_16", "exponents", r"LD\.E", 8, 64, True, 1, 0, latency=max(LOAD // 4, L1 + 40) // 2,
            through=((r"LD\.E\.U16", 4),)),
    HotLoop("lossless_encode_16", "count", r"\bSTS", 4, 64, True, 1, 0, latency=max(LOAD // 4, 2 * LDS + L1) // 2,
            through=((r"\bSTS", 4),)),
    HotLoop("lossless_encode_16", "code", r"\bPOPC", 8, 32 / 9, True, 2 + FLOATS, 2 + FLOATS,
            latency=max(LOAD // 2, 2 * L1 + 170), through=((r"VOTE", 18), (r"ST\.E", 16), (r"LDS", 2))),
    HotLoop("lossless_decode_16", "decode", r"LDS\.U16", 5, 32, True, 2 + FLOATS, 2 + FLOATS, latency=300 + L1,
            through=((r"ST\.E", 1), (r"LD\.E", 8), (r"VOTE", 2))),
    HotLoop("bytes_encode", "code", r"\bPOPC", 8, 16, False, 1 + BYTES, 1 + BYTES,
            latency=max(LOAD // 4, L1 + 100), element=1),
    HotLoop("bytes_decode", "decode", r"\bPOPC", 8, 16, False, 1 + BYTES, 1 + BYTES, latency=2 * L1 + 130, element=1),
    HotLoop("tuned_means_bf16", "rough", r"LDG", 8, 64, True, 1, 0, latency=LOAD // 8 // 2, through=((r"LDG", 8),)),
    HotLoop("tuned_means_bf16", "means", r"LDG", 8, 32, True, 2, 2, latency=LOAD // 8, through=((r"LDG", 8),)),
    # Rows of 128 channels: the four registers of each go through their shuffles side by side.
    HotLoop("tuned_encode_bf16", "measure", r"SHFL", 30, 128 / 30, True, 2, 2,
            latency=max(LOAD, 10 * (SHFL + 8) + 120) // 4, warp_bytes=ROWS, through=((r"SHFL", 30), (r"LD\.E", 4))),
    HotLoop("tuned_encode_bf16", "quantize", r"^ST\.E\.U8", 8, 128 / 42, True, 1, 1,
            latency=max(L1, 10 * (SHFL + 8) + 250) // 4, warp_bytes=ROWS,
            through=((r"SHFL", 42), (r"^ST\.E\.U8", 4))),
    HotLoop("tuned_decode_bf16", "decode", r"SHFL", 21, 128 / 21, True, 3, 2,
            latency=max(LOAD, 6 * (SHFL + 8) + 100) // 4, warp_bytes=ROWS, through=((r"SHFL", 21), (r"ST\.E", 4))),
    HotLoop("slots_encode_keys_bf16", "encode", r"SHFL", 66, 128 / 66, True, 2.5, 2.5,
            latency=max(LOAD, 19 * (SHFL + 8) + 600) // 4, warp_bytes=ROWS,
            through=((r"SHFL", 66), (r"REDUX", 2), (r"ST\.E", 5))),
    HotLoop("slots_encode_values_bf16", "encode", r"F2I", 4, 32, True, 2.5, 2.5,
            latency=max(LOAD, 6 * (SHFL + 8) + 400) // 4, warp_bytes=ROWS,
            through=((r"F2I", 4), (r"MUFU", 5), (r"SHFL", 11), (r"ST\.E", 6))),
    HotLoop("slots_decode_keys_bf16", "decode", r"SHFL", 32, 4, True, 2.5, 2.5,
            latency=(LOAD + 7 * (SHFL + 8) + 370) // 4, warp_bytes=ROWS,
            through=((r"SHFL", 32), (r"REDUX", 2), (r"ST\.E", 4))),
    HotLoop("slots_decode_values_bf16", "decode", r"\bI2FP?\.", 4, 32, True, 2.5, 2.5, latency=(LOAD + 120) // 4,
            warp_bytes=ROWS, through=((r"\bI2FP?\.", 4), (r"ST\.E", 4))),
    HotLoop("kvtc_tokens_bf16", "squares", r"\bSTS", 8, 32, True, 2, 2, latency=LOAD // 8 + LDS,
            through=((r"\bSTS", 8), (r"LDG?\.E\.U16", 8), (r"\bLDS", 8))),
    # The pass of the squares, which takes a little more than that of the means, for both.
    HotLoop("kvtc_variance_bf16", "two passes", r"\bFMUL", 24, 16 / 3, True, 4, 2,
            latency=2 * max(LOAD // 8, L2 // 8 + 8), through=((r"\bFMUL", 24), (r"LDG?\.E\.U16", 16))),
    # Turned, half-split or by pairs; the angles lie in a cache.
    HotLoop("kvtc_forward_bf16", "scale", r"LDG?\.E\.128", 4, 64, True, 6, 2, latency=max(LOAD // 8, L2 // 4 + 10),
            warp_bytes=32 << 10, through=((r"LDG?\.E\.128", 4), (r"STG?\.E\.128", 2), (r"LDG?\.E\.64", 4))),
    HotLoop("kvtc_encode", "moments", r"\bI2F", 8, 32, True, 4, 0, latency=max(LOAD // 8, 4 * L1 // 8),
            through=((r"\bI2F", 8), (r"\bLD\.E", 9))),
    HotLoop("kvtc_encode", "count", r"\bSTS", 8, 32, True, 4, 0, latency=max(LOAD // 8, 2 * LDS),
            through=((r"\bSTS", 8), (r"\bLD\.E", 9))),
    # Three alphabets, nine tables of each, 40 rows of counts, eight a turn: once for 1024 rows of 32 numbers.
    HotLoop("kvtc_encode", "choose", r"LDG", 8, 1024 * 32 / (27 * 40), False, 0, 0),
    HotLoop("kvtc_encode", "code", r"\bIMAD\.HI", 4, 32, True, 8 + KVTC, 4 + KVTC, latency=max(LOAD // 4, 250),
            through=((r"\bIMAD\.HI", 4), (r"\bLD\.E", 5), (r"\bST\.E ", 4))),
    HotLoop("kvtc_decode", "decode", r"LDS\.U16", 6, 32, True, 4 + KVTC, 2 + KVTC, latency=300 + L1,
            through=((r"ST\.E", 1), (r"LDS\.U16", 6), (r"\bPOPC", 2))),
    HotLoop("kvtc_inverse_bf16", "restore", r"LDG?\.E\.128", 8, 32, True, 6, 2, latency=max(LOAD // 8, L2 // 4 + 10),
            warp_bytes=32 << 10, through=((r"LDG?\.E\.128", 8), (r"STG?\.E\.64", 2))),
    HotLoop("kvtc_errors_bf16", "errors", r"LDG?\.E\.128", 4, 32, True, 6, 2, latency=max(LOAD, L2 + 60) // 4,
            warp_bytes=32 << 10, through=((r"LDG?\.E\.128", 4), (r"LDG?\.E\.64", 1))),
)
# fmt: on

BUS = 50e9
"""Bytes a second each way, of PCIe 5 x16."""
ROADS = (
    ("cachegen, encode", ("cachegen_tiles_bf16", "cachegen_encode_bf16"), 1, CODED / 2),
    ("cachegen, decode", ("cachegen_decode_bf16",), CODED / 2, 1),
    ("kivi with 2 bits, encode keys", ("kivi_encode_keys2_bf16",), 1, 1 / 8 + SHARED_NUMBERS / 2),
    ("lossless, encode", ("lossless_tiles_16", "lossless_encode_16"), 1, FLOATS / 2),
    ("lossless, decode", ("lossless_decode_16",), FLOATS / 2, 1),
    (
        "kvtc, encode",
        ("kvtc_tokens_bf16", "kvtc_variance_bf16", "kvtc_forward_bf16", "kvtc_encode", "kvtc_errors_bf16"),
        1, KVTC / 2,
    ),
    ("kvtc, decode", ("kvtc_decode", "kvtc_inverse_bf16"), KVTC / 2, 1),
)  # fmt: skip
"""What runs for a window, and how many bytes for each of the cache's go up to the GPU and down."""

NOT_HOT = {
    "copy_runs": "moves what is coded once more, a sixth of the cache",
    "range_gather": "moves what is coded once more, a sixth of the cache",
    "range_tables": "33 numbers a channel of a block, for 1024",
    "range_pack_counts": "32 numbers a channel of a block, for 1024",
    "range_unpack_counts": "32 numbers a channel of a block, for 1024",
    "fp8_scales": "a number a head and token",
    "cachegen_tokens_": "a number a token",
    "cachegen_refine_": "only with several levels in a file",
    "cachegen_refine_encode_": "only with several levels in a file",
}
"""Kernels without a row, by the beginning of their names, and why."""


def main() -> None:
    with ThreadPoolExecutor(2) as pool:
        jobs = {
            (file, architecture): pool.submit(nvrtc.compile_kernels, file, architecture)
            for file in cuda_source.sources()
            for architecture in nvrtc.ARCHITECTURES
        }
        compiled = {key: job.result() for key, job in jobs.items()}
    tables = "\n".join([*resources(compiled), "", *predictions(compiled)])
    tables = "\n".join([tables, "", *windows(_rates(tables))])
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
    code: dict[str, list[sass.Block]] = {}
    for kernel, parts in itertools.groupby(HOT_LOOPS, key=lambda hot: (hot.kernel, hot.alternates)):
        estimates = []
        for hot in parts:
            result = compiled[cuda_source.file_of(hot.kernel), PREDICTED]
            if hot.kernel not in code:
                code |= sass.disassemble(result.cubin)
            instructions = hot.instructions(code[hot.kernel])
            estimates.append(_Estimate.of(hot, instructions, result.resources[hot.kernel]))
            yield estimates[-1].row(f"{hot.kernel} {hot.form}".strip(), hot.part, counts=not hot.alternates)
        if kernel[1]:
            yield sum(estimates[1:], estimates[0]).row(kernel[0], "all of it", counts=True)


@dataclass(frozen=True)
class _Estimate:
    """What a part of a kernel takes.

    Attributes:
        moved, least, instructions: bytes of global memory and warp instructions an element.
        seconds: a byte of cache, by issue, by memory and by latency.
    """

    moved: float
    least: float
    instructions: float
    warps: float
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, hot: HotLoop, instructions: float, found: nvrtc.Resources) -> _Estimate:
        warps = min(_resident(found), BATCH / hot.warp_bytes / MULTIPROCESSORS)
        row = 32 * hot.element
        issue = instructions / (MULTIPROCESSORS * SCHEDULERS * CLOCK * ISSUE_SHARE * row)
        latency = hot.latency / (MULTIPROCESSORS * CLOCK * warps * row)
        return cls(hot.moved, hot.least, instructions / 32, warps, (issue, hot.moved / COPY / hot.element, latency))

    def __add__(self, other: _Estimate) -> _Estimate:
        return _Estimate(
            self.moved + other.moved, self.least + other.least, self.instructions + other.instructions, self.warps,
            tuple(one + two for one, two in zip(self.seconds, other.seconds, strict=True)),
        )  # fmt: skip

    def row(self, kernel: str, part: str, *, counts: bool) -> str:
        """A line of the table; ``counts``: with its GB/s."""
        cells = [f"{1e-9 / seconds:.0f}" if seconds > 1e-15 else "" for seconds in self.seconds]
        rate = f"**{1e-9 / max(self.seconds):.0f}**" if counts else ""
        return (
            f"| {kernel}, {part} | {self.moved:.2f} ({self.least:.2f}) | {self.instructions:.2f} | {self.warps:.0f} "
            f"| {' | '.join(cells)} | {rate} |"
        )


def windows(rates: dict[str, float]) -> Iterator[str]:
    yield f"### What a window of {BATCH >> 20} MiB takes from host memory to host memory"
    yield ""
    yield "| ms | up | kernels | down | one after the other | overlapped |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name, kernels, up, down in ROADS:
        parts = up * BATCH / BUS, sum(BATCH / rates[kernel] / 1e9 for kernel in kernels), down * BATCH / BUS
        whole = (f"{each * 1e3:.1f}, {BATCH / each / 1e9:.0f} GB/s" for each in (sum(parts), max(parts)))
        yield f"| {' | '.join([name, *(f'{each * 1e3:.1f}' for each in parts), *whole])} |"


def predicted() -> dict[str, float]:
    """GB/s of cache by kernel, as the document has them; the parts of a kernel follow each other."""
    return _rates(DOCUMENT.read_text(encoding="utf-8"))


def _rates(tables: str) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for row in re.finditer(r"^\| (\w+), [^|]+ \|.*\| \*\*(\d+)\*\* \|$", tables, re.MULTILINE):
        seconds[row[1]] += 1 / int(row[2])
    return {kernel: 1 / each for kernel, each in seconds.items()}


def _resident(found: nvrtc.Resources) -> int:
    """Warps that fit on a multiprocessor at once."""
    threads = cuda_source.BLOCK_THREADS
    blocks = REGISTERS // (-(-found.registers // 8) * 8 * threads)
    if found.shared:
        blocks = min(blocks, SHARED // (found.shared + 1024))
    return min(MOST_WARPS, blocks * cuda_source.WARPS_PER_BLOCK)


if __name__ == "__main__":
    main()
