"""How fast: each kernel beside a device-to-device copy of the same run, then whole encodes and decodes."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from kvzip.cache import Block, Plane
from kvzip.codecs import get_codec
from kvzip.codecs.base import Batch, Codec, Encoded
from kvzip.devices.cuda import Cuda
from tools.gpu_check.caches import codec_specs

TOKENS, HEADS, HEAD_DIM = 1024, 8, 128
PLANE_BYTES = TOKENS * HEADS * HEAD_DIM * 2
EXTRA = ["fp8:scale=token", "cachegen:level=1", "cachegen:level=9"]


class Stopwatch(Cuda):
    """The cuda device with every launch between two events."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.launches: list[tuple[str, Any, Any]] = []

    def launch(self, kernel: str, warps: int, *arguments: Any) -> None:
        with self.activate():
            begin, end = self.xp.cuda.Event(), self.xp.cuda.Event()
            begin.record()
            super().launch(kernel, warps, *arguments)
            end.record()
        self.launches.append((kernel, begin, end))

    def times(self) -> dict[str, float]:
        """Milliseconds by kernel since the last call."""
        self.synchronize()
        found: dict[str, float] = defaultdict(float)
        for kernel, begin, end in self.launches:
            found[kernel] += self.xp.cuda.get_elapsed_time(begin, end)
        self.launches.clear()
        return found


def specs() -> list[str]:
    """Every codec with its defaults, and what else is worth a row."""
    return [spec for spec in codec_specs() if ":" not in spec or spec in EXTRA]


def batch_of(planes: int, gpu: Cuda, seed: int = 0) -> Batch:
    """Blocks of ``TOKENS`` tokens of as many planes of one cache, head-major, on the GPU."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((HEADS, TOKENS, HEAD_DIM), np.float32) * np.exp(
        rng.standard_normal((HEADS, 1, HEAD_DIM)) / 2
    )
    bits = x.astype(np.float32).view(np.uint32) >> 16
    with gpu.activate():
        one = gpu.to_device(bits.astype(np.uint16))
        memory = gpu.xp.empty((planes, *one.shape), np.uint16)
        for plane in memory:
            plane[...] = one
    kinds = ("key", "value")
    found = [Plane(i, i // 2, kinds[i % 2], TOKENS, HEADS, HEAD_DIM, "bfloat16") for i in range(planes)]
    return Batch([Block((plane,), 0, TOKENS) for plane in found], [plane.swapaxes(0, 1) for plane in memory])


def copy_rate(gpu: Cuda, nbytes: int = 1 << 30) -> float:
    """GB/s of a device-to-device copy, bytes read and written counted."""
    with gpu.activate():
        source, target = gpu.xp.empty(nbytes, np.uint8), gpu.xp.empty(nbytes, np.uint8)
        source.fill(7)
        stream = gpu.xp.cuda.get_current_stream()
        seconds = timed(gpu, lambda: target.data.copy_from_device_async(source.data, nbytes, stream))
    return 2 * nbytes / seconds / 1e9


def timed(gpu: Cuda, work: Callable[[], object], repeats: int = 9) -> float:
    """Median seconds on the GPU, after one run to warm up."""
    work()
    found = []
    for _ in range(repeats):
        begin, end = gpu.xp.cuda.Event(), gpu.xp.cuda.Event()
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(gpu.xp.cuda.get_elapsed_time(begin, end) / 1e3)
    return statistics.median(found)


def kernels(gpu: Stopwatch, quick: bool) -> None:
    """Every kernel of every codec by batch size: GB/s of cache, and of what the codec must read and write at least."""
    copy = copy_rate(gpu)
    print(f"Device-to-device copy: {copy:.0f} GB/s, read and written.\n")
    print("| codec | batch MB | kernel | ms | GB/s of cache | % of copy |\n|---|--:|---|--:|--:|--:|")
    sizes = (16, 256) if quick else (16, 64, 256, 1024)
    for spec in specs():
        for megabytes in sizes:
            try:
                _kernel_rows(gpu, spec, megabytes, copy)
            except Exception as error:
                print(f"| {spec} | {megabytes} | failed: {type(error).__name__}: {error} | | | |", flush=True)


def _kernel_rows(gpu: Stopwatch, spec: str, megabytes: int, copy: float) -> None:
    batch = batch_of(max(1, (megabytes << 20) // PLANE_BYTES), gpu)
    cache = len(batch.blocks) * PLANE_BYTES
    codec = get_codec(spec).bind([block.plane for block in batch.blocks])
    runs: dict[str, list[float]] = defaultdict(list)
    encoded = codec.encode(batch, gpu)
    coded = _nbytes(encoded)
    for run in range(6):
        codec.encode(batch, gpu)
        codec.decode(batch, [each.sections for each in encoded], gpu)
        for kernel, milliseconds in gpu.times().items():
            if run:
                runs[kernel].append(milliseconds)
    for kernel, found in runs.items():
        seconds = statistics.median(found) / 1e3
        moved = (cache + coded) / seconds / 1e9
        print(
            f"| {spec} | {megabytes} | {kernel} | {seconds * 1e3:.3f} | {cache / seconds / 1e9:.0f} "
            f"| {100 * moved / copy:.0f} |",
            flush=True,
        )


def whole(gpu: Cuda, quick: bool) -> None:
    """Encode and decode 1 GB in batches of the device's size, on the GPU alone and from and to host memory."""
    print("| codec | ratio | encode GB/s | decode GB/s | encode with copies | decode with copies |")
    print("|---|--:|--:|--:|--:|--:|")
    planes = (256 << 20 if quick else 1 << 30) // PLANE_BYTES
    per_batch = max(1, gpu.batch_bytes // PLANE_BYTES)
    for spec in specs():
        try:
            print(_whole_row(gpu, spec, planes, per_batch), flush=True)
        except Exception as error:
            print(f"| {spec} | failed: {type(error).__name__}: {error} | | | | |", flush=True)


def _whole_row(gpu: Cuda, spec: str, planes: int, per_batch: int) -> str:
    batches = [batch_of(per_batch, gpu, seed) for seed in range(max(1, planes // per_batch))]
    cache = sum(len(batch.blocks) for batch in batches) * PLANE_BYTES
    codec = get_codec(spec).bind([block.plane for batch in batches for block in batch.blocks])
    hosts = [[gpu.to_host(array.swapaxes(0, 1)) for array in batch.arrays] for batch in batches]
    seconds: dict[str, list[float]] = defaultdict(list)

    def clock(name: str, work: Callable[..., Any], *lists: list[Any]) -> list[Any]:
        gpu.synchronize()
        start = time.perf_counter()
        results = [work(codec, *each, gpu) for each in zip(*lists, strict=True)]
        gpu.synchronize()
        seconds[name].append(time.perf_counter() - start)
        return results

    for _ in range(3):
        encoded = clock("encode", _encode, batches)
        clock("decode", _decode, batches, encoded)
        files = clock("encode with copies", _encode_host, batches, hosts)
        clock("decode with copies", _decode_host, batches, files)
    ratio = cache / sum(map(_nbytes, encoded))
    rates = [cache / min(found) / 1e9 for found in seconds.values()]
    return f"| {spec} | {ratio:.2f} | " + " | ".join(f"{rate:.1f}" for rate in rates) + " |"


def _encode(codec: Codec, batch: Batch, gpu: Cuda) -> list[Encoded]:
    return codec.encode(batch, gpu)


def _decode(codec: Codec, batch: Batch, encoded: list[Encoded], gpu: Cuda) -> None:
    codec.decode(batch, [each.sections for each in encoded], gpu)


def _encode_host(codec: Codec, batch: Batch, arrays: list[np.ndarray], gpu: Cuda) -> list[dict[str, np.ndarray]]:
    uploaded = [gpu.to_device(array).swapaxes(0, 1) for array in arrays]
    encoded = codec.encode(Batch(batch.blocks, uploaded), gpu)
    flat = iter(gpu.to_host_all([section for each in encoded for section in each.sections.values()]))
    return [{tag: next(flat) for tag in each.sections} for each in encoded]


def _decode_host(codec: Codec, batch: Batch, files: list[dict[str, np.ndarray]], gpu: Cuda) -> None:
    flat = iter(gpu.to_device_all([section for sections in files for section in sections.values()]))
    sections = [{tag: next(flat) for tag in each} for each in files]
    target = batch_like(batch, gpu)
    codec.decode(target, sections, gpu)
    gpu.to_host_all([array.swapaxes(0, 1) for array in target.arrays])


def batch_like(batch: Batch, gpu: Cuda) -> Batch:
    with gpu.activate():
        memory = gpu.xp.empty((len(batch.blocks), HEADS, TOKENS, HEAD_DIM), np.uint16)
    return Batch(batch.blocks, [plane.swapaxes(0, 1) for plane in memory])


def _nbytes(encoded: list[Encoded]) -> int:
    return sum(section.nbytes for each in encoded for section in each.sections.values())
