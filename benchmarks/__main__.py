"""Measure kvzip beside its peers: python -m benchmarks [CACHE.safetensors ...] [--megabytes 1000]

Prints markdown. Caches given are weighed beside the sample; a large one is made in a temporary folder.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from pathlib import Path

from benchmarks import codecs, files
from benchmarks.inputs import SAMPLE
from benchmarks.report import show
from kvzip import __version__
from kvzip.devices.cpu import available_cores
from kvzip.devices.levels import processor_name


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("caches", nargs="*", type=Path, help="real caches with layers.{i}.key/.value, [H, T, D]")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the large cache (default 1000)")
    options = parser.parse_args()
    print(f"kvzip {__version__}, Python {platform.python_version()}, {available_cores()} cores, {processor_name()}")
    for cache in [SAMPLE, *options.caches]:
        show(f"Size: {cache.name}", codecs.sizes(cache))
    show("Speed of the codecs, in process, medians", codecs.speeds(SAMPLE))
    with tempfile.TemporaryDirectory(prefix="kvzip-bench-") as folder:
        show("File to file, all cores, medians", files.large(Path(folder), options.megabytes))
        show("Start-up", files.start_up(Path(folder)))


if __name__ == "__main__":
    main()
