"""The Python API with tensors on the GPU: the same file as from the host, and decoding to where they are."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import numpy as np

import kvzip
from kvzip.codecs.base import Codec
from kvzip.devices.cuda import Cuda
from tools.gpu_check import equality, speed
from tools.gpu_check.caches import RANDOM_PROFILE, codec_for, profile_for, sample_cases
from tools.gpu_check.check import Check, until

LAYER, TOKENS = 3, (5, 90)
"""The part that is decoded for comparison."""

TIMED = 512

WAYS = {"CuPy": "float16", "torch": "bfloat16"}
"""CuPy has no bfloat16 everywhere."""


def border(check: Check) -> None:
    """Files and parts of them by way of CuPy's arrays and torch's tensors, then how fast that is."""
    case = sample_cases()[0]
    has_torch = importlib.util.find_spec("torch") is not None
    if not has_torch:
        print("torch is not installed.\n", flush=True)
    check.heads("codec, tensors", "file", "part", "#compress, GB/s from tensors on the GPU", "#decode, GB/s to them")
    ways = [way for way in WAYS if way != "torch" or has_torch]
    specs = [*speed.DEFAULTS, f"kvtc:{RANDOM_PROFILE}"]
    timed = (TIMED // 4 if check.quick else TIMED) * speed.MIB

    def row(item: str, end: float) -> int:
        spec, _, way = item.partition(", ")
        names = [f"layers.{plane.layer}.{plane.kind}" for plane in case.planes]
        arrays = [np.ascontiguousarray(array.swapaxes(0, 1)).astype(WAYS[way]) for array in case.arrays]
        host = dict(zip(names, arrays, strict=True))
        with profile_for(spec, case.planes):
            codec = codec_for(spec, case.planes)
            assert codec is not None
            cells = _compared(codec, host, way, check)
        # What is compared must not wait for what is timed.
        rates = [f"{rate:.1f}" for rate in _timed(spec, way, check.gpu, timed, end)] if time.monotonic() < end else []
        print(f"| {item} | {' | '.join(cells + rates)} |", flush=True)
        return sum(cell not in ("equal", "near enough") for cell in cells)

    check.each([f"{spec}, {way}" for way in ways for spec in specs], row)


def _compared(codec: Codec, host: dict[str, np.ndarray], way: str, check: Check) -> list[str]:
    cpu, gpu = check.cpu, check.gpu
    expected = kvzip.compress(host, codec=codec, device=cpu)
    on_gpu = {name: as_tensor(gpu.to_device(array.view(np.uint16)), way, gpu) for name, array in host.items()}
    found = kvzip.compress(on_gpu, codec=codec, device=gpu)
    with kvzip.open(expected, device=cpu) as one, kvzip.open(expected, device=gpu) as other:
        numbers = one.key(LAYER, TOKENS)
        out = as_tensor(gpu.to_device(np.zeros(numbers.shape, np.uint16)), way, gpu)
        other.key(LAYER, TOKENS, out=out)
        bits = gpu.to_host(gpu.to_device(out))
    if codec.profile is not None:
        close = abs(len(found) - len(expected)) < len(expected) / 200
        near = close, not equality.far(numbers, bits.view(numbers.dtype)).any()
        return ["near enough" if each else "**differs**" for each in near]
    return ["equal" if each else "**differs**" for each in (found == expected, bits.tobytes() == numbers.tobytes())]


def as_tensor(array: Any, way: str, gpu: Cuda) -> Any:
    """A device array of 16-bit words as CuPy's float16 or torch's bfloat16, where it lies."""
    if way == "CuPy":
        return array.view(np.float16)
    import torch

    gpu.synchronize()
    return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)


def _timed(spec: str, way: str, gpu: Cuda, nbytes: int, end: float) -> list[float]:
    """GB/s of compressing tensors on the GPU to bytes, and of decoding every plane to one."""
    cache = speed.cache_on(gpu, nbytes)
    tensors = {
        f"layers.{plane.layer}.{plane.kind}": as_tensor(array.swapaxes(0, 1), way, gpu)
        for plane, array in zip(cache.planes, cache.arrays.values(), strict=True)
    }
    first = cache.planes[0]
    shape = (first.tokens, first.heads, first.head_dim)
    out = [as_tensor(gpu.to_device(np.zeros(shape, np.uint16)), way, gpu) for _ in range(2)]
    best = [float("inf")] * 2
    with profile_for(spec, cache.planes):
        codec = codec_for(spec, cache.planes)
        assert codec is not None
        for _ in until(end, 2):
            start = time.perf_counter()
            data = kvzip.compress(tensors, codec=codec, device=gpu)
            best[0] = min(best[0], time.perf_counter() - start)
            with kvzip.open(data, device=gpu) as opened:
                start = time.perf_counter()
                for layer in opened.layers:
                    opened.key(layer, out=out[0])
                    opened.value(layer, out=out[1])
                gpu.synchronize()
                best[1] = min(best[1], time.perf_counter() - start)
    return [cache.nbytes / seconds / 1e9 for seconds in best]
