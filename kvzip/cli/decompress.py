"""``kvzip decompress``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvzip.cli import options, text
from kvzip.cli.items import check_targets, for_each, remove_source, restored_name
from kvzip.cli.progress import ProgressStyle
from kvzip.cli.verify import verify_input
from kvzip.errors import KvzipError, UsageError

Layers = Annotated[
    str | None, typer.Option("--layers", metavar="A:B", help="Only these layers; reads only what they need.")
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", metavar="A:B", help="Only these tokens; reads only what they need.")
]
Level = Annotated[
    int | None, typer.Option("--level", metavar="N", min=0, help="Which quality of a file that holds several; from 0.")
]
ExpectModel = Annotated[
    str | None, typer.Option("--expect-model", metavar="NAME", help="Fail unless the cache is of this model.")
]
ExpectTokens = Annotated[
    str | None,
    options.file_option("--expect-tokens", about="Fail unless the cache is of these token ids, or their first."),
]
Test = Annotated[bool, typer.Option("-t", "--test", help="Decode, write nothing: as kvzip verify --deep.")]


def decompress(
    files: options.Files = None,
    output: options.Output = None,
    stdout: options.Stdout = False,
    layers: Layers = None,
    tokens: Tokens = None,
    member: options.Member = None,
    level: Level = None,
    profile: options.ProfilePlace = None,
    expect_model: ExpectModel = None,
    expect_tokens: ExpectTokens = None,
    test: Test = False,
    force: options.Force = False,
    keep: options.Keep = False,
    remove: options.Remove = False,
    sync: options.Sync = False,
    threads: options.Threads = None,
    device: options.DeviceName = "auto",
    style: options.Progress = ProgressStyle.AUTO,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Restore KV caches, or a part of them: kv.safetensors.kvz becomes kv.safetensors.

    Names, order, shapes, dtypes and metadata of the tensors are those of the source. A part keeps the names, with
    smaller shapes.

    \b
    Examples:
      kvzip decompress kv.safetensors.kvz
      kvzip decompress kv.safetensors.kvz --layers 0:4 --tokens :256 -o part.safetensors
      kvzip decompress --profile model.kvp kv.safetensors.kvz
      kvzip decompress --expect-model llama-3-8b --expect-tokens ids.json kv.safetensors.kvz
      kvzip decompress < kv.kvz | cmp - kv.safetensors
    """
    job = options.Job.of(quiet, verbose, style, device, threads)
    inputs = options.inputs_of(files)
    cut = {"layers": options.span_of(layers, "--layers"), "tokens": options.span_of(tokens, "--tokens")}
    if remove and (layers or tokens or test or member is not None or level is not None):
        raise UsageError("--rm would remove what a part, or a test, does not restore", code="rm-part")
    others = {
        "-o": output, "-c": stdout or None, "--layers": layers, "--tokens": tokens, "--member": member,
        "--level": level, "--expect-model": expect_model, "--expect-tokens": expect_tokens,
    }  # fmt: skip
    if test and (given := [option for option, value in others.items() if value is not None]):
        raise UsageError(
            f"-t decodes all of a file and writes nothing: leave out {', '.join(given)}", code="test-options"
        )
    if test:
        with options.offer(profile):
            for_each(inputs, lambda name: verify_input(job, name, deep=True), "sound", job.messages)
        return
    target = check_targets(inputs, output, stdout, force=force, keep=keep, remove=remove)

    def work(name: str) -> None:
        from kvzip.api import decompress as run
        from kvzip.identity import read_token_ids

        where = target or restored_name(name)
        expected = None if expect_tokens is None else read_token_ids(expect_tokens)
        begin = time.perf_counter()
        before = Path(name).stat() if remove else None
        with job.progress("decompress", name, lambda: options.restored_size(name, **cut)) as update:
            report = run(
                name, where,
                member=member, level=level, expect_model=expect_model, expect_tokens=expected,
                device=job.device, force=force, sync=sync or remove,
                notice=job.messages.notice, progress=update, **cut,
            )  # fmt: skip
        if before is not None:
            remove_source(name, before, lambda: _read_back(name, where))
        seconds = time.perf_counter() - begin
        job.messages.result(
            f"{text.called(name)}: {text.size(report.original_bytes)} in {text.called(where, out=True)}, "
            f"{seconds:.2f} s",
            verb="decompress",
            input=name,
            output=where,
            original_bytes=report.original_bytes,
            stored_bytes=report.stored_bytes,
            seconds=round(seconds, 6),
        )

    with options.offer(profile):
        for_each(inputs, work, "restored", job.messages)


def _read_back(name: str, target: str) -> None:
    """Raise unless ``target`` holds, bit for bit, what ``name`` decodes to."""
    from kvzip.devices import get_device
    from kvzip.opening import open_stored
    from kvzip.verification import compare, open_restored, same_tensors

    with open_stored(name) as stored, open_restored(target, stored) as restored:
        sound = same_tensors(stored, restored) and not any(
            error.max_abs for error in compare(stored, restored, device=get_device("cpu"))
        )
    if not sound:
        raise KvzipError(f"{target}: does not read back as it was written; {name} is kept", code="read-back")
