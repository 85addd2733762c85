"""How fast: each kernel beside a device-to-device copy of the same run, then whole encodes and decodes."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
import numpy as np

import kvzip
from kvzip.cache import Plane, blocks_of
from kvzip.codecs.base import Batch, Codec, Encoded, Sections
from kvzip.devices.base import Array
from kvzip.devices.cuda import Cuda
from tools import gpu_table
from tools.gpu_check.caches import RANDOM_PROFILE, codec_for, profile_for
from tools.gpu_check.check import Check, until

PLANES, TOKENS, HEADS, HEAD_DIM = 64, 1024, 8, 128
"""32 layers; tokens at the least."""

MIB = 1 << 20
SIZES, QUICK_SIZES = (16, 128, 512), (128,)
COPY = WHOLE = 1024
RUNS = 7

DEFAULTS = ("cachegen", "kvtc", "turboquant", "kivi:residual=32", "int8", "int4", "fp8", "lossless", "raw")

KERNELS = [  # specs with what is coded: the types if not bfloat16, and kinds apart where kernels differ by them; what
    # gpu_table predicts of a kernel is for the first
    *(f"lossless of {dtype}" for dtype in ("bfloat16", "float32", "float8_e4m3fn", "bytes")),
    *("cachegen", "cachegen:level=1", "cachegen:level=9", "cachegen:levels=3", "cachegen:coder=range"),
    *("fp8", "fp8:dtype=float8_e5m2", "fp8:scale=head", "fp8:scale=token"),
    *("int4", "int8", "int4:tuned=true", "int8:tuned=true"),
    *(
        f"{spec} of {kind}"
        for spec, kind in product(("kivi", "kivi:bits=2", "kivi:bits=2,tuned=true"), ("keys", "values"))
    ),
    *(
        f"turboquant:preset={preset} of {kind}"
        for preset, kind in product(
            ("3bit_nc", "k8v4", "4bit_nc,tuned=false", "3bit_nc,tuned=false", "k8v4,tuned=false"), ("keys", "values")
        )
    ),
    *("kvtc of keys", "kvtc of values", "kvtc:rope=theta=1e4 of keys", f"kvtc:{RANDOM_PROFILE}"),
]


class Stopwatch:
    """Puts every launch of a device between two events from now on."""

    def __init__(self, gpu: Cuda) -> None:
        self._gpu, self._launch = gpu, gpu.launch
        self._launches: list[tuple[str, Any, Any]] = []
        gpu.launch = self.launch  # type: ignore[method-assign]

    def launch(self, kernel: str, warps: int, *arguments: Any) -> None:
        with self._gpu.activate():
            begin, end = self._gpu.xp.cuda.Event(), self._gpu.xp.cuda.Event()
            begin.record()
            self._launch(kernel, warps, *arguments)
            end.record()
        self._launches.append((kernel, begin, end))

    def times(self) -> dict[str, float]:
        """Seconds by kernel since the last call."""
        self._gpu.synchronize()
        found: dict[str, float] = defaultdict(float)
        for kernel, begin, end in self._launches:
            found[kernel] += self._gpu.xp.cuda.get_elapsed_time(begin, end) / 1e3
        self._launches.clear()
        return found


@dataclass
class Cache:
    """Planes, and the array ``[tokens, heads, head_dim]`` of each, head-major, by its plane's index."""

    planes: list[Plane]
    arrays: dict[int, Array]

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def batch(self, codec: Codec) -> Batch:
        blocks = [block for group in codec.groups(self.planes) for block in blocks_of(tuple(group))]
        return Batch(blocks, [self.arrays[p.index][block.start : block.stop] for block in blocks for p in block.planes])

    def blank(self, gpu: Cuda) -> Cache:
        """As much room, to decode to."""
        with gpu.activate():
            return self.alike(gpu.xp.empty_like(array.swapaxes(0, 1)) for array in self.arrays.values())

    def alike(self, stored: Iterable[Array]) -> Cache:
        """The same planes of other arrays, these as they lie in memory: ``[heads, tokens, head_dim]``."""
        return Cache(self.planes, {i: array.swapaxes(0, 1) for i, array in zip(self.arrays, stored, strict=True)})


def cache_on(gpu: Cuda, nbytes: int, what: str = "bfloat16", first: int = 0, planes: int = PLANES) -> Cache:
    """A cache on the GPU, or some of its planes from number ``first`` on: normal numbers, the same in each plane.

    Args:
        nbytes: of all planes together; where they are few, there are fewer planes, not shorter ones.
        what: ``bfloat16`` and the like, ``keys`` or ``values`` alone, or ``bytes`` of which some are frequent.
    """
    dtype = what if what.startswith("float") else "bfloat16"
    planes = max(1, min(planes, nbytes // (TOKENS * HEADS * HEAD_DIM * np.dtype(dtype).itemsize)))
    tokens = nbytes // (planes * HEADS * HEAD_DIM * np.dtype(dtype).itemsize)
    rng = np.random.default_rng(first)
    deviations = np.exp(rng.standard_normal((HEADS, 1, HEAD_DIM)) / 2)
    one = (rng.standard_normal((HEADS, tokens, HEAD_DIM), np.float32) * deviations).astype(dtype)
    kinds = {"keys": ("key",), "values": ("value",), "bytes": ("bytes",)}.get(what, ("key", "value"))
    if what == "bytes":
        one, dtype = rng.geometric(0.1, one.nbytes).astype(np.uint8).reshape(1, -1, 1), "uint8"
    heads, tokens, head_dim = one.shape
    numbers = range(first, first + planes)
    found = [Plane(i, i // len(kinds), kinds[i % len(kinds)], tokens, heads, head_dim, dtype) for i in numbers]
    with gpu.activate():
        source = gpu.to_device(one)
        memory = gpu.xp.empty((planes, *source.shape), source.dtype)
        memory[...] = source
    return Cache(found, {i: array.swapaxes(0, 1) for i, array in zip(numbers, memory, strict=True)})


# ------------------------------------------------------------------------------------------- kernels


def kernels(check: Check) -> None:
    """Every kernel by batch size: GB/s of cache, and of what the codec must read and write at least."""
    gpu = check.gpu
    copy = copy_rate(gpu, COPY * MIB)
    print(f"A device-to-device copy, in the same process: {copy:.0f} GB/s, read and written.\n", flush=True)
    check.heads("codec", "#batch, MiB", "kernel", "#ms", "#best", "#GB/s of cache", "#predicted", "#% of copy")
    stopwatch, predicted = Stopwatch(gpu), gpu_table.predicted()
    # The size of the predictions first, for all: others as far as there is time.
    sizes = sorted(QUICK_SIZES if check.quick else SIZES, key=lambda size: size * MIB != gpu_table.BATCH)
    items = [f"{item} @ {size}" for size in sizes for item in KERNELS]

    def rows(item: str, end: float) -> int:
        name, _, size = item.partition(" @ ")
        spec, _, what = name.partition(" of ")
        cache = cache_on(gpu, int(size) * MIB, what)
        runs, coded = _runs(spec, cache, gpu, stopwatch, end)
        for kernel, found in runs.items():
            seconds = statistics.median(found)
            rate = predicted.pop(kernel, None) if int(size) * MIB == gpu_table.BATCH else None
            cells = [f"{seconds * 1e3:.3f}", f"{min(found) * 1e3:.3f}", f"{cache.nbytes / seconds / 1e9:.0f}"]
            cells += [f"{rate:.0f}" if rate else "", f"{(cache.nbytes + coded) / seconds / 1e7 / copy:.0f}"]
            print(f"| {name} | {size} | {kernel} | {' | '.join(cells)} |", flush=True)
        return 0

    check.each(items, rows)


def _runs(spec: str, cache: Cache, gpu: Cuda, stopwatch: Stopwatch, end: float) -> tuple[dict[str, list[float]], int]:
    """Seconds of every kernel of a codec, run after run, and how many bytes the cache becomes."""
    codec = _codec(spec, cache.planes)
    batch, target = cache.batch(codec), cache.blank(gpu).batch(codec)
    sections = as_read(codec.encode(batch, gpu), gpu)
    codec.decode(target, sections, gpu)
    stopwatch.times()
    runs: dict[str, list[float]] = defaultdict(list)
    for _ in until(end, RUNS):
        codec.encode(batch, gpu)
        codec.decode(target, sections, gpu)
        for kernel, seconds in stopwatch.times().items():
            runs[kernel].append(seconds)
    return runs, _nbytes(sections)


def _codec(spec: str, planes: list[Plane]) -> Codec:
    # Layers that turboquant leaves to other codecs would be counted as its own.
    alone = ",skip_first_layers=0,skip_last_layers=0" if spec.startswith("turboquant:") else ""
    codec = codec_for(spec + alone, planes)
    assert codec is not None, f"{spec} takes nothing of {planes[0]}"
    return codec


def copy_rate(gpu: Cuda, nbytes: int) -> float:
    """GB/s of a device-to-device copy, bytes read and written counted: the median of some."""
    found = []
    with gpu.activate():
        source, target = gpu.xp.empty(nbytes, np.uint8), gpu.xp.empty(nbytes, np.uint8)
        source.fill(7)
        for _ in range(RUNS + 1):
            begin, end = gpu.xp.cuda.Event(), gpu.xp.cuda.Event()
            begin.record()
            gpu.xp.copyto(target, source)
            end.record()
            end.synchronize()
            found.append(gpu.xp.cuda.get_elapsed_time(begin, end) / 1e3)
    return 2 * nbytes / statistics.median(found[1:]) / 1e9


# ------------------------------------------------------------------------------------------- whole caches


def whole(check: Check) -> None:
    """A gigabyte: encoded and decoded in batches of the device's size, on the GPU alone, from and to host memory by
    the codec, and by the whole of kvzip; the best of a few.
    """
    ways = ("encode", "decode", "encode from host", "decode to host", "compress", "decompress")
    check.heads("codec", "#ratio", *(f"#{way}, GB/s" for way in ways))
    gpu = check.gpu
    nbytes = (WHOLE // 4 if check.quick else WHOLE) * MIB
    count = max(1, nbytes // gpu.batch_bytes)
    pieces = [cache_on(gpu, nbytes // count, first=i * (PLANES // count), planes=PLANES // count) for i in range(count)]
    hosts = [[gpu.to_host(array.swapaxes(0, 1)) for array in piece.arrays.values()] for piece in pieces]
    planes = [plane for piece in pieces for plane in piece.planes]
    arrays = [array for host in hosts for array in host]
    tensors = {f"layers.{p.layer}.{p.kind}": array.view(p.dtype) for p, array in zip(planes, arrays, strict=True)}

    def row(spec: str, end: float) -> int:
        codec = _codec(spec, planes)
        seconds: dict[str, list[float]] = defaultdict(list)

        def clock(way: str, work: Callable[..., Any], *lists: list[Any]) -> list[Any]:
            gpu.synchronize()
            start = time.perf_counter()
            results = [work(codec, *each, gpu) for each in zip(*lists, strict=True)]
            gpu.synchronize()
            seconds[way].append(time.perf_counter() - start)
            return results

        for _ in until(end, 3):
            encoded = clock("encode", _encode, pieces)
            clock("decode", _decode, pieces, [as_read(each, gpu) for each in encoded])
            files = clock("encode from host", _encode_host, pieces, hosts)
            clock("decode to host", _decode_host, pieces, files)
        ratio = sum(piece.nbytes for piece in pieces) / sum(map(_nbytes, files))
        with profile_for(spec, planes):
            for _ in until(end, 2):
                (data,) = clock("compress", _compress, [tensors])
                clock("decompress", _decompress, [data])
        rates = [f"{sum(plane.nbytes for plane in planes) / min(seconds[way]) / 1e9:.1f}" for way in ways]
        print(f"| {spec} | {ratio:.2f} | {' | '.join(rates)} |", flush=True)
        return 0

    check.each([*DEFAULTS, f"kvtc:{RANDOM_PROFILE}"], row)


def _encode(codec: Codec, piece: Cache, gpu: Cuda) -> list[Encoded]:
    return codec.encode(piece.batch(codec), gpu)


def _decode(codec: Codec, piece: Cache, sections: list[Sections], gpu: Cuda) -> None:
    codec.decode(piece.blank(gpu).batch(codec), sections, gpu)


def _encode_host(codec: Codec, piece: Cache, host: list[np.ndarray], gpu: Cuda) -> list[Sections]:
    return to_host(codec.encode(piece.alike(map(gpu.to_device, host)).batch(codec), gpu), gpu)


def _decode_host(codec: Codec, piece: Cache, sections: list[Sections], gpu: Cuda) -> None:
    target = piece.blank(gpu)
    codec.decode(target.batch(codec), to_device(sections, gpu), gpu)
    gpu.to_host_all([array.swapaxes(0, 1) for array in target.arrays.values()])


def _compress(codec: Codec, tensors: dict[str, np.ndarray], gpu: Cuda) -> bytes:
    return kvzip.compress(tensors, codec=codec, device=gpu)


def _decompress(codec: Codec, data: bytes, gpu: Cuda) -> None:
    kvzip.decompress(data, device=gpu)


def to_host(encoded: list[Encoded], gpu: Cuda) -> list[Sections]:
    flat = iter(gpu.to_host_all([section for each in encoded for section in each.sections.values()]))
    return [{tag: next(flat) for tag in each.sections} for each in encoded]


def to_device(sections: list[Sections], gpu: Cuda) -> list[Sections]:
    flat = iter(gpu.to_device_all([section for each in sections for section in each.values()]))
    return [{tag: next(flat) for tag in each} for each in sections]


def as_read(encoded: list[Encoded], gpu: Cuda) -> list[Sections]:
    """Sections as decoders get them of a reader: on the GPU, with what they may read behind the last one."""
    return to_device(to_host(encoded, gpu), gpu)


def _nbytes(sections: list[Sections]) -> int:
    return sum(section.nbytes for each in sections for section in each.values())
