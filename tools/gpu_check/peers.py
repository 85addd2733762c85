"""What else a GPU can do to a cache, where it is installed: torch's casts, nvCOMP's ANS."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from typing import Any

from tools.gpu_check.check import Check

NUMBERS = 1 << 29
"""A gigabyte of bfloat16."""

RUNS = 9


def casts(check: Check) -> None:
    """torch's bfloat16 to float8 and back, 1 GB of bfloat16; the copy beside them."""
    torch = _module("torch")
    if torch is None:
        return
    x = torch.randn(NUMBERS // 8, device="cuda").to(torch.bfloat16).repeat(8)
    y = torch.empty_like(x)
    check.heads("torch", "#ms", "#GB/s of cache", "#GB/s moved")

    def row(name: str, end: float) -> int:
        to, _, dtype = name.partition(" ")
        if to == "copy":
            seconds, moved = _seconds(torch, lambda: y.copy_(x)), 4
        else:
            eight = x.to(getattr(torch, dtype))
            work = (lambda: x.to(eight.dtype)) if to == "to" else (lambda: eight.to(torch.bfloat16))
            seconds, moved = _seconds(torch, work), 3
        rates = [count * NUMBERS / seconds / 1e9 for count in (2, moved)]
        print(f"| {name} | {seconds * 1e3:.3f} | {rates[0]:.0f} | {rates[1]:.0f} |", flush=True)
        return 0

    check.each(
        ["copy", *(f"{way} {dtype}" for dtype in ("float8_e4m3fn", "float8_e5m2") for way in ("to", "from"))], row
    )


def nvcomp(check: Check) -> None:
    """nvCOMP's ANS over 256 MB of bfloat16: lossless, as a measure of entropy coding alone."""
    library, torch = _module("nvidia.nvcomp"), _module("torch")
    if library is None or torch is None:
        return
    data = torch.randn(NUMBERS // 4, device="cuda").to(torch.bfloat16).view(torch.uint8)
    source, coder = library.as_array(data), library.Codec(algorithm="ANS")
    coded = coder.encode(source)
    check.heads("nvCOMP ANS", "#ratio", "#GB/s")

    def row(name: str, end: float) -> int:
        work = (lambda: coder.encode(source)) if name == "encode" else (lambda: coder.decode(coded))
        # Whatever stream the library uses, all is done before the second event.
        seconds = _seconds(torch, lambda: (torch.cuda.synchronize(), work(), torch.cuda.synchronize()))
        print(f"| {name} | {data.nbytes / coded.buffer_size:.3f} | {data.nbytes / seconds / 1e9:.0f} |", flush=True)
        return 0

    check.each(["encode", "decode"], row)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        print(f"{name} is not installed ({error}).", flush=True)
        return None


def _seconds(torch: Any, work: Callable[[], object]) -> float:
    """The median of some runs, after one to warm up."""
    work()
    found = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)
