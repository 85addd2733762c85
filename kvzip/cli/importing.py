"""``kvzip import``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvzip.cli import options, text
from kvzip.cli.compress import Bins, BlockTokens, Coder
from kvzip.cli.items import check_targets, compressed_name, one_by_one
from kvzip.cli.progress import ProgressStyle
from kvzip.errors import UsageError

if TYPE_CHECKING:
    from kvzip.lmcache.fp8 import Geometry

Format = Annotated[
    str, typer.Option("--format", metavar="FORMAT", help="cachegen, fp8-e4m3fn, fp8-e5m2 or turboquant.")
]
Shape = Annotated[
    str | None, typer.Option("--shape", metavar="LAYERS,TOKENS,HEADS,DIM", help="Of fp8 and turboquant files.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="DTYPE", help="What the numbers of such a file were before; bfloat16 if not given."
    ),
]
Preset = Annotated[
    str | None,
    typer.Option("--preset", metavar="PRESET", help="Of turboquant, as in 4bit_nc or 4bit_nc,skip_first_layers=0."),
]


def import_(
    files: options.Files = None,
    output: options.Output = None,
    stdout: options.Stdout = False,
    file_format: Format = "cachegen",
    shape: Shape = None,
    dtype: Dtype = None,
    k_bins: Bins = None,
    v_bins: Bins = None,
    coder: Coder = None,
    preset: Preset = None,
    block_tokens: BlockTokens = 1024,
    force: options.Force = False,
    sync: options.Sync = False,
    threads: options.Threads = None,
    device: options.DeviceName = "auto",
    style: options.Progress = ProgressStyle.AUTO,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Make one .kvz of LMCache's files: CacheGen blobs, or the raw bytes of its fp8 and turboquant serdes.

    Several files are chunks of one cache, in the order of their tokens. The numbers stay those that LMCache decodes. A
    blob is a pickle: it is read, never run.

    \b
    Examples:
      kvzip import chunk.bin -o kv.kvz
      kvzip import chunk-0.bin chunk-1.bin chunk-2.bin -o kv.kvz
      kvzip import --format fp8-e4m3fn --shape 32,256,8,128 kv.fp8
      kvzip import --format turboquant --preset 4bit_nc --shape 32,256,8,128 kv.turboquant
    """
    job = options.Job.of(quiet, verbose, style, device, threads)
    inputs = options.inputs_of(files)
    if len(inputs) > 1 and output is None and not stdout:
        raise UsageError("name the target of several chunks with -o", code="no-target")
    target = check_targets(inputs[:1], output, stdout, force=force, keep=False, remove=False) or compressed_name(
        inputs[0]
    )

    from kvzip.lmcache.convert import import_files
    from kvzip.output import create_file

    begin = time.perf_counter()
    contents = [
        (text.called(name), _read(name, file_format == "cachegen")) for name in one_by_one(inputs, job.messages)
    ]
    sources = [name for name in inputs if name != "-"]
    with create_file(target, force=force, sync=sync, sources=sources) as sink:
        report = import_files(
            contents, sink,
            file_format=file_format, geometry=_geometry(shape, dtype), k_bins=k_bins, v_bins=v_bins,
            coder=coder, preset=preset, device=job.device, block_tokens=block_tokens,
            notice=job.messages.notice,
        )  # fmt: skip
    read = sum(len(data) for _, data in contents)
    job.messages.result(
        f"{', '.join(text.called(name) for name in inputs)}: {report.stored_bytes / read:.2%} ({text.size(read)} -> "
        f"{text.size(report.stored_bytes)}, {text.called(target, out=True)}), {time.perf_counter() - begin:.2f} s",
        verb="import",
        input=inputs if len(inputs) > 1 else inputs[0],
        output=target,
        original_bytes=read,
        stored_bytes=report.stored_bytes,
        seconds=round(time.perf_counter() - begin, 6),
    )


def _read(name: str, pickled: bool) -> bytes:
    """A file's bytes. Raises ``UsageError`` for one of another kind, as far as that can be told."""
    from kvzip.kinds import foreign

    with options.open_input(name) as (file, called):
        if file is None:
            raise UsageError(f"{called} is a folder: name the files in it, in the order of their tokens", code="folder")
        if pickled and (what := foreign(file.peek(16)[:16], "pickle")):
            raise UsageError(f"{called} {what}", code="lmcache-format")
        return file.read()


def _geometry(shape: str | None, dtype: str | None) -> Geometry | None:
    from kvzip.lmcache.fp8 import Geometry

    if shape is None:
        if dtype is not None:
            raise UsageError("--dtype goes with --shape, of fp8 and turboquant files", code="no-shape")
        return None
    try:
        layers, tokens, heads, head_dim = map(int, shape.split(","))
    except ValueError:
        raise UsageError(f"--shape {shape!r}: expected LAYERS,TOKENS,HEADS,DIM", code="bad-shape") from None
    return Geometry(layers, tokens, heads, head_dim, dtype or "bfloat16")
