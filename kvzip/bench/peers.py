"""General compressors beside the codecs, where they are installed: on the same bytes, in the file's order."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from kvzip.bench.measuring import SECONDS
from kvzip.bench.rows import Row
from kvzip.bench.sample import Sample
from kvzip.bench.timing import timed
from kvzip.devices.base import Device
from kvzip.errors import KvzipError

SLOW_BYTES = 8 << 20
"""The largest sample on which what codes a few MB/s is measured."""

ZIPNN_DTYPES = ("bfloat16", "float16", "float32")


class Peer(NamedTuple):
    """A compressor of bytes.

    ``compress`` takes what ``prepare`` makes of the host's bytes, ``decompress`` what ``compress`` gave and the
    original size; ``size`` tells the bytes of what ``compress`` gave, ``restore`` makes host bytes of the result.
    """

    name: str
    version: str
    compress: Callable[[Any], Any]
    decompress: Callable[[Any, int], Any]
    prepare: Callable[[np.ndarray], Any] = bytes
    size: Callable[[Any], int] = len
    restore: Callable[[Any], Any] = bytes


def installed_peers(sample: Sample, device: Device, quick: bool = False) -> tuple[list[Peer], list[str]]:
    """The peers that are here and can take the sample, and the names of those that are not installed.

    Args:
        device: its threads are theirs, too; nvCOMP needs a GPU.
        quick: each at its usual level only.
    """
    threads = int(getattr(device, "threads", 0)) or 1
    found: list[Peer] = []
    missing: list[str] = []
    for name, peers in {
        "zstd": _zstd(threads, [3] if quick or sample.nbytes > SLOW_BYTES else [3, 19]),
        "lz4": _lz4(),
        "ZipNN": _zipnn(threads, sample),
        "nvCOMP": _nvcomp(device),
    }.items():
        found += peers or []
        if peers is None:
            missing.append(name)
    return found, missing


def measure_peer(sample: Sample, peer: Peer, seconds: float = SECONDS) -> Row:
    """Weigh and time a peer on the bytes of a sample. Raises ``KvzipError`` if it does not restore them."""
    raw = np.concatenate(sample.buffers)
    data = peer.prepare(raw)
    packed, encode = timed(lambda: peer.compress(data), seconds)
    restored, decode = timed(lambda: peer.decompress(packed, raw.nbytes), seconds)
    if not np.array_equal(np.frombuffer(peer.restore(restored), np.uint8), raw):
        raise KvzipError(f"{peer.name} {peer.version} did not restore the bytes that it was given", code="peer-broken")
    return Row(peer.name, sample, peer.size(packed), encode, decode, version=peer.version)


def copying(sample: Sample, device: Device, seconds: float = SECONDS) -> Row:
    """A copy of the same bytes within the device's memory: the limit that no codec can be expected to pass by far."""
    with device.activate():
        # On the CPU a codec reads memory that was read before and writes memory that was written before; so here.
        source = [device.to_device(buffer) for buffer in sample.buffers]
        target = [device.xp.empty_like(array) for array in source]

        def copy() -> None:
            for to, array in zip(target, source, strict=True):
                to[...] = array
            device.to_host(target[-1][:1])  # waits

        _, timing = timed(copy, seconds)
    return Row("copy", sample, sample.nbytes, timing, timing)


def _zstd(threads: int, levels: list[int]) -> list[Peer] | None:
    if module := _module("zstandard"):
        return [
            Peer(
                f"zstd -{level}",
                f"zstandard {version('zstandard')}",
                module.ZstdCompressor(level=level, threads=threads).compress,
                lambda packed, size: module.ZstdDecompressor().decompress(packed, max_output_size=size),
            )
            for level in levels
        ]
    if program := shutil.which("zstd"):
        return [_command(f"zstd -{level}", program, f"-{level}", f"-T{threads}") for level in levels]
    return None


def _lz4() -> list[Peer] | None:
    if module := _module("lz4.frame"):
        return [Peer("lz4", f"lz4 {version('lz4')}", module.compress, lambda packed, size: module.decompress(packed))]
    if program := shutil.which("lz4"):
        return [_command("lz4", program)]
    return None


def _command(name: str, program: str, *options: str) -> Peer:
    """A peer that is a program: pipes and its start-up are in its times."""

    def run(*arguments: str) -> Callable[[bytes], bytes]:
        return lambda data: (
            subprocess.run([program, *arguments, "-c"], input=data, capture_output=True, check=True).stdout
        )

    decompress = run("-d")
    return Peer(f"{name} (command)", program, run(*options), lambda packed, _: decompress(packed))


def _zipnn(threads: int, sample: Sample) -> list[Peer] | None:
    module = _module("zipnn")
    if module is None:
        return None
    dtypes = {plane.dtype for plane in sample.planes}
    if len(dtypes) > 1 or not dtypes <= set(ZIPNN_DTYPES):
        return []
    zipnn = module.ZipNN(bytearray_dtype=dtypes.pop(), threads=threads)
    # It changes the buffer that it compresses: each run has its own.
    return [
        Peer(
            "ZipNN",
            f"zipnn {version('zipnn')}",
            lambda data: zipnn.compress(bytearray(data)),
            lambda packed, _: zipnn.decompress(packed),
        )
    ]


def _nvcomp(device: Device) -> list[Peer] | None:
    if device.xp is np:
        return []
    module = _module("nvidia.nvcomp")
    if module is None:
        return None

    def peer(algorithm: str) -> Peer:
        codec = module.Codec(algorithm=algorithm)

        def wait(array: Any) -> Any:
            device.xp.cuda.runtime.deviceSynchronize()
            return array

        return Peer(
            f"nvCOMP {algorithm}",
            f"nvcomp {module.__version__}",
            lambda data: wait(codec.encode(data)),
            lambda packed, _: wait(codec.decode(packed)),
            prepare=lambda raw: module.as_array(device.xp.asarray(raw)),
            size=lambda packed: int(packed.buffer_size),
            restore=lambda restored: device.xp.asnumpy(device.xp.asarray(restored)).tobytes(),
        )

    return [peer(algorithm) for algorithm in ("ANS", "Zstd", "LZ4")]


def _module(name: str) -> Any:
    """A module if it is installed and can be loaded, else None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
