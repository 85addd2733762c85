"""``kvzip verify``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvzip.cli import options, text
from kvzip.cli.errors import FailAbove, judge
from kvzip.cli.items import for_each
from kvzip.cli.messages import Messages
from kvzip.cli.progress import ProgressStyle
from kvzip.errors import UsageError

if TYPE_CHECKING:
    from kvzip.pipeline import PlaneErrors
    from kvzip.tensorfile import TensorSource

Deep = Annotated[bool, typer.Option("--deep", help="Decode everything, too.")]
Against = Annotated[
    str | None,
    options.file_option(
        "--against", about="Report the errors against this safetensors file, or raw bytes.", metavar="REF"
    ),
]


def verify(
    files: options.Files = None,
    deep: Deep = False,
    against: Against = None,
    fail_above: FailAbove = None,
    layout: options.LayoutName = None,
    heads: options.Heads = None,
    head_dim: options.HeadDim = None,
    shape: options.Shape = None,
    dtype: options.Dtype = None,
    member: options.Member = None,
    profile: options.ProfilePlace = None,
    threads: options.Threads = None,
    device: options.DeviceName = "auto",
    style: options.Progress = ProgressStyle.AUTO,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Check the structure and every checksum of .kvz files, without writing anything.

    The layout options describe the reference, where it differs from the file that was compressed; of raw bytes --shape
    and --dtype do. --member tells which of several caches in a file the reference is of.

    \b
    Examples:
      kvzip verify *.kvz
      kvzip verify --deep kv.safetensors.kvz
      kvzip verify --against kv.safetensors --fail-above 0.1 kv.safetensors.kvz
      kvzip verify --against chunk.data --shape 2,32,256,1024 chunk.data.kvz
    """
    job = options.Job.of(quiet, verbose, style, device, threads)
    inputs = options.inputs_of(files)
    of_reference = {
        "--fail-above": fail_above, "--member": member,
        "--layout": layout, "--heads": heads, "--head-dim": head_dim, "--shape": shape, "--dtype": dtype,
    }  # fmt: skip
    given = [option for option, value in of_reference.items() if value is not None]
    if given and against is None:
        raise UsageError(f"{', '.join(given)}: only with --against REF, to measure the errors", code="no-reference")

    if against is not None:
        for name in inputs:
            _check_rereadable(name)

    def work(name: str) -> None:
        verify_input(job, name, deep)
        if against is not None:
            with options.raw_or_named(against, shape, dtype) as reference:
                errors = _compare(
                    job, name, reference, member, {"layout": layout, "heads": heads, "head_dim": head_dim}
                )
            _tell_errors(job.messages, name, against, errors)
            judge(name, errors, fail_above)

    with options.offer(profile):
        for_each(inputs, work, "sound", job.messages)


def _check_rereadable(name: str) -> None:
    """Refuse a pipe: the file is checked first, then decoded, and a pipe has passed by then."""
    if (name == "-" and not sys.stdin.seekable()) or Path(name).is_fifo():
        raise UsageError(
            f"{text.called(name)} is a pipe, and --against reads it twice: save it to a file first", code="pipe"
        )


def verify_input(job: options.Job, name: str, deep: bool) -> None:
    """Check one input and say so. Raises what is wrong with it."""
    from kvzip.verification import verify_members

    begin = time.perf_counter()
    with (
        options.open_input(name) as (file, called),
        job.progress("verify", name, lambda: options.restored_size(name)) as update,
    ):
        if file is None:
            raise UsageError(f"{name} is a folder; expected a .kvz file", code="not-a-file")
        reports = verify_members(
            file, called, device=job.device if deep else None, notice=job.messages.notice, progress=update
        )
    seconds = time.perf_counter() - begin
    stored, blocks = sum(report.stored_bytes for report in reports), sum(report.blocks for report in reports)
    job.messages.result(
        f"{called}: {text.size(stored)}, {text.count(blocks, 'block')}, "
        f"{'all decoded' if deep else 'checksums right'}, {seconds:.2f} s",
        verb="verify",
        input=name,
        deep=deep,
        members=len(reports),
        blocks=blocks,
        stored_bytes=stored,
        seconds=round(seconds, 6),
    )


def _compare(
    job: options.Job, name: str, against: str | TensorSource, member: int | None, layout: dict[str, Any]
) -> list[PlaneErrors]:
    from kvzip.opening import open_source, open_stored
    from kvzip.verification import compare

    with (
        open_stored(name, member) as stored,
        open_source(against) as reference,
        job.progress("compare", name, lambda: sum(entry.size for entry in reference.files)) as update,
    ):
        return compare(stored, reference, device=job.device, notice=job.messages.notice, progress=update, **layout)


def _tell_errors(messages: Messages, name: str, against: str, errors: Sequence[PlaneErrors]) -> None:
    from kvzip.quality import to_json, worst

    ordered = sorted(errors, key=lambda error: (error.plane.sequence, error.plane.layer, error.plane.kind))
    shown = ordered if messages.verbose else worst(errors).values()
    rows = [("plane", "relative error", "largest difference")]
    rows += [(text.plane(error.plane), text.error(error.relative), text.error(error.max_abs)) for error in shown]
    which = "each plane" if messages.verbose else "the worst plane of each kind"
    messages.answer(
        f"{name} against {against}, {which}:\n{text.table(rows, indent='  ')}",
        verb="compare",
        input=name,
        against=against,
        errors=[to_json(error) for error in ordered],
    )
