"""``kvzip export``."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Annotated, BinaryIO

import typer

from kvzip.cli import options, text
from kvzip.cli.compress import Bins
from kvzip.cli.importing import Format, Preset
from kvzip.cli.items import check_targets, restored_name
from kvzip.cli.progress import ProgressStyle
from kvzip.errors import UsageError

Tokens = Annotated[str | None, typer.Option("--tokens", metavar="A:B", help="Only these tokens.")]
Chunk = Annotated[
    int | None,
    typer.Option("--chunk", metavar="N", min=1, help="A folder of files of N tokens each, as LMCache's chunks (256)."),
]


def export(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A .kvz file; '-' is standard input.")] = "-",
    output: options.Output = None,
    stdout: options.Stdout = False,
    file_format: Format = "cachegen",
    tokens: Tokens = None,
    member: options.Member = None,
    chunk: Chunk = None,
    k_bins: Bins = None,
    v_bins: Bins = None,
    preset: Preset = None,
    force: options.Force = False,
    sync: options.Sync = False,
    threads: options.Threads = None,
    device: options.DeviceName = "auto",
    style: options.Progress = ProgressStyle.AUTO,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Make LMCache's file of a .kvz: kv.kvz becomes kv.cachegen.

    The symbols of a cache with LMCache's bins stay as they are, and so do turboquant's codes; others are quantized a
    second time, and a note says so.

    \b
    Examples:
      kvzip export kv.kvz
      kvzip export kv.kvz --chunk 256 -o chunks
      kvzip export kv.kvz --format fp8-e4m3fn --tokens 0:256 -o kv.fp8
      kvzip export kv.kvz --format turboquant --preset 4bit_nc
    """
    job = options.Job.of(quiet, verbose, style, device, threads)
    (name,) = options.inputs_of([file])
    target = check_targets([name], output, stdout, force=force, keep=False, remove=False)
    job.messages.input = name
    if target is None:
        stem = restored_name(name)
        target = "-" if stem == "-" else f"{stem}.{file_format}"
    if chunk and target == "-":
        raise UsageError("a folder cannot go to standard output: name it with -o", code="folder-target")

    from kvzip.api import open as open_cache
    from kvzip.lmcache.convert import export_cache
    from kvzip.output import create_file, create_folder

    begin, written = time.perf_counter(), 0
    with (
        options.open_input(name) as (file_in, _),
        open_cache(_seekable(file_in, name), member=member, device=job.device) as cache,
    ):
        wanted = options.span_of(tokens, "--tokens")
        length = max((plane.tokens for plane in cache.planes if plane.kind != "bytes"), default=0)

        def files() -> Iterator[tuple[int, bytes]]:
            for start, stop in _cuts(length, wanted, chunk):
                yield start, export_cache(
                    cache, file_format=file_format, tokens=(start, stop), k_bins=k_bins, v_bins=v_bins,
                    preset=preset, device=job.device, notice=job.messages.notice,
                )  # fmt: skip

        if chunk:
            with create_folder(target, force=force, sync=sync, sources=[name]) as folder:
                for start, data in files():
                    written += (folder / f"{start:08d}.{file_format}").write_bytes(data)
        else:
            with create_file(target, force=force, sync=sync, sources=[name]) as sink:
                for _, data in files():
                    written += sink.write(data)
    job.messages.result(
        f"{text.called(name)}: {text.size(written)}, {text.called(target, out=True)}, {file_format}, "
        f"{time.perf_counter() - begin:.2f} s",
        verb="export",
        input=name,
        output=target,
        stored_bytes=written,
        seconds=round(time.perf_counter() - begin, 6),
    )


def _seekable(file: BinaryIO | None, name: str) -> BinaryIO:
    """What can be read out of order: a pipe's bytes are kept."""
    if file is None:
        raise UsageError(f"{name} is a folder, not a .kvz file", code="folder")
    return file if file.seekable() else io.BytesIO(file.read())


def _cuts(tokens: int, wanted: options.Span, chunk: int | None) -> list[tuple[int, int]]:
    """Where the files begin and end."""
    start = wanted.start or 0 if wanted else 0
    stop = tokens if wanted is None or wanted.stop is None else min(wanted.stop, tokens)
    if start >= stop:
        raise UsageError(f"--tokens: there are only {tokens} tokens", code="bad-range")
    step = chunk or stop - start
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]
