"""The Python API with tensors on the GPU: the same file as from the host, and decoding to where they are."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import kvzip
from kvzip.devices.base import Device
from kvzip.devices.cuda import Cuda
from tools.gpu_check.caches import Case, codec_specs, sample_cases
from tools.gpu_check.speed import HEAD_DIM, HEADS, PLANE_BYTES, TOKENS, batch_of


def border(cpu: Device, gpu: Cuda, quick: bool) -> int:
    """Compare and time; prints tables, returns how many results differ."""
    specs = [spec for spec in codec_specs() if ":" not in spec]
    print("| codec | from CuPy | to CuPy | from torch | to torch |\n|---|---|---|---|---|")
    failures = 0
    case = sample_cases()[0]
    for spec in specs:
        cells = _compared(spec, case, cpu, gpu)
        failures += sum(cell != "equal" for cell in cells)
        print(f"| {spec} | {' | '.join(cells)} |", flush=True)
    print("\n| codec | GB/s from tensors on the GPU to bytes | GB/s from bytes to tensors on the GPU |\n|---|--:|--:|")
    for spec in specs:
        try:
            print(_timed(spec, gpu, (128 << 20 if quick else 1 << 30) // PLANE_BYTES), flush=True)
        except Exception as error:
            print(f"| {spec} | failed: {type(error).__name__}: {error} | |", flush=True)
    return failures


def _compared(spec: str, case: Case, cpu: Device, gpu: Cuda) -> list[str]:
    """float16 by way of CuPy, which has no bfloat16 everywhere; bfloat16 by way of torch."""
    cells = []
    for make, dtype in ((_as_cupy, "float16"), (_as_torch, "bfloat16")):
        names = [f"layers.{plane.layer}.{plane.kind}" for plane in case.planes]
        arrays = [np.ascontiguousarray(array.swapaxes(0, 1)).astype(dtype) for array in case.arrays]
        host = dict(zip(names, arrays, strict=True))
        expected = kvzip.compress(host, codec=spec, device=cpu)
        on_gpu = {name: make(gpu.to_device(array.view(np.uint16)), gpu) for name, array in host.items()}
        cells.append("equal" if kvzip.compress(on_gpu, codec=spec, device=gpu) == expected else "**differs**")
        with kvzip.open(expected, device=cpu) as one, kvzip.open(expected, device=gpu) as other:
            numbers = one.key(3, (5, 90))
            out = make(gpu.to_device(np.zeros(numbers.shape, np.uint16)), gpu)
            other.key(3, (5, 90), out=out)
            bits = gpu.to_host(gpu.to_device(out))
            cells.append("equal" if bits.tobytes() == numbers.tobytes() else "**differs**")
    return cells


def _as_cupy(array: Any, gpu: Cuda) -> Any:
    return array.view(np.float16)


def _as_torch(array: Any, gpu: Cuda) -> Any:
    import torch

    gpu.synchronize()
    return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)


def _timed(spec: str, gpu: Cuda, planes: int) -> str:
    batch = batch_of(planes, gpu)
    tensors = {
        f"layers.{i // 2}.{('key', 'value')[i % 2]}": _as_torch(a.swapaxes(0, 1), gpu)
        for i, a in enumerate(batch.arrays)
    }
    out = [gpu.to_device(np.zeros((TOKENS, HEADS, HEAD_DIM), np.uint16)) for _ in range(2)]
    best = [float("inf")] * 2
    for _ in range(2):
        start = time.perf_counter()
        data = kvzip.compress(tensors, codec=spec, device=gpu)
        best[0] = min(best[0], time.perf_counter() - start)
        with kvzip.open(data, device=gpu) as cache:
            start = time.perf_counter()
            for layer in cache.layers:
                cache.key(layer, out=_as_torch(out[0], gpu))
                cache.value(layer, out=_as_torch(out[1], gpu))
            best[1] = min(best[1], time.perf_counter() - start)
    rates = [planes * PLANE_BYTES / seconds / 1e9 for seconds in best]
    return f"| {spec} | {rates[0]:.1f} | {rates[1]:.1f} |"
