"""What else a GPU can do to a cache, where it is installed: torch's casts, nvCOMP's ANS."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from typing import Any

NUMBERS = 1 << 29


def casts() -> None:
    """torch's bfloat16 to float8 and back, 1 GB of bfloat16; the copy beside them."""
    torch = importlib.import_module("torch")
    x = torch.randn(NUMBERS // 8, device="cuda").to(torch.bfloat16).repeat(8)
    y = torch.empty_like(x)
    print("| torch | ms | GB/s of cache | GB/s moved |\n|---|--:|--:|--:|")
    _row(torch, "copy bfloat16", lambda: y.copy_(x), 4)
    for name in ("float8_e4m3fn", "float8_e5m2"):
        dtype = getattr(torch, name)
        eight = x.to(dtype)
        _row(torch, f"bfloat16 to {name}", lambda dtype=dtype: x.to(dtype), 3)
        _row(torch, f"{name} to bfloat16", lambda eight=eight: eight.to(torch.bfloat16), 3)


def _row(torch: Any, name: str, work: Callable[[], object], bytes_moved: int) -> None:
    work()
    found = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    seconds = statistics.median(found)
    rates = [count * NUMBERS / seconds / 1e9 for count in (2, bytes_moved)]
    print(f"| {name} | {seconds * 1e3:.3f} | {rates[0]:.0f} | {rates[1]:.0f} |")


def nvcomp() -> None:
    """nvCOMP's ANS over the bytes of 256 MB of bfloat16: lossless, as a measure of entropy coding alone."""
    try:
        library = importlib.import_module("nvidia.nvcomp")
    except ImportError as error:
        print(f"nvCOMP is not installed ({error}).")
        return
    torch = importlib.import_module("torch")
    data = torch.randn(1 << 27, device="cuda").to(torch.bfloat16).view(torch.uint8)
    source = library.as_array(data)
    coder = library.Codec(algorithm="ANS")
    coded = coder.encode(source)
    print("| nvCOMP ANS | ratio | GB/s |\n|---|--:|--:|")
    for name, work in (("encode", lambda: coder.encode(source)), ("decode", lambda: coder.decode(coded))):
        found = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            work()
            torch.cuda.synchronize()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        rate = data.nbytes / statistics.median(found) / 1e9
        print(f"| {name} | {data.nbytes / coded.buffer_size:.3f} | {rate:.0f} |")
