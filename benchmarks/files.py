"""File to file, by the commands: kvzip beside zstd and cp on a large cache, with peak memory; start-up times."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import measure
from benchmarks.inputs import SAMPLE, write_large_cache
from benchmarks.report import Row

KVZIP = [sys.executable, "-m", "kvzip"]


def large(folder: Path, megabytes: int) -> Iterator[Row]:
    """Compress and decompress a large cache; every file is in the page cache, as the peers' are."""
    cache, packed, restored = (folder / name for name in ("large.safetensors", "large.kvz", "restored.safetensors"))
    write_large_cache(cache, megabytes)
    size = cache.stat().st_size / 1e9
    device = ["--device", "cpu"]
    compress = measure.command([*KVZIP, "compress", "-q", "-f", str(cache), "-o", str(packed), *device], target=packed)
    decompress = measure.command(
        [*KVZIP, "decompress", "-q", "-f", str(packed), "-o", str(restored), *device], target=restored
    )
    copied = folder / "copy.safetensors"
    copy = measure.command(["cp", str(restored), str(copied)], target=copied)
    copied.unlink()
    ratio = cache.stat().st_size / packed.stat().st_size
    yield Row(f"kvzip compress, {size:.2f} GB", f"{compress.seconds:.2f} s, ratio {ratio:.2f}", None)
    yield Row("  peak memory", f"{compress.peak_megabytes:.0f} MB", "under 400")
    yield Row("kvzip decompress", f"{decompress.seconds:.2f} s", None)
    yield Row("  peak memory", f"{decompress.peak_megabytes:.0f} MB", "under 400")
    yield Row("  against cp of the restored file", f"{decompress.seconds / copy.seconds:.2f}", "at most 2")
    restored.unlink()
    if zstd := shutil.which("zstd"):
        yield from _beside_zstd(zstd, cache, folder, compress, decompress)


def _beside_zstd(zstd: str, cache: Path, folder: Path, compress: measure.Run, decompress: measure.Run) -> Iterator[Row]:
    packed, restored = folder / "large.zst", folder / "restored.safetensors"
    pack = measure.command([zstd, "-3", "-T0", "-q", "-f", str(cache), "-o", str(packed)], target=packed)
    unpack = measure.command([zstd, "-d", "-q", "-f", str(packed), "-o", str(restored)], target=restored)
    ratio = cache.stat().st_size / packed.stat().st_size
    yield Row("zstd -3 -T0", f"{pack.seconds:.2f} s, ratio {ratio:.2f}", None)
    yield Row("zstd -d", f"{unpack.seconds:.2f} s", None)
    yield Row("  kvzip compress against zstd -3 -T0", f"{compress.seconds / pack.seconds:.2f}", "at most 0.5")
    yield Row("  kvzip decompress against zstd -d", f"{decompress.seconds / unpack.seconds:.2f}", "at most 0.7")


def start_up(folder: Path) -> Iterator[Row]:
    packed = folder / "sample.kvz"
    measure.command([*KVZIP, "compress", "-q", "-f", str(SAMPLE), "-o", str(packed), "--device", "cpu"], runs=1)
    for arguments in (["--version"], ["--help"], ["inspect", str(packed)]):
        run = measure.command([*KVZIP, *arguments], runs=7)
        yield Row(f"kvzip {arguments[0]}", f"{run.seconds:.3f} s", "under 0.25")
