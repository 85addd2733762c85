"""The verbs, put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from kvzip._version import __version__
from kvzip.cli.bench import bench
from kvzip.cli.compress import compress
from kvzip.cli.decompress import decompress
from kvzip.cli.exporting import export
from kvzip.cli.failures import EXIT_CODES
from kvzip.cli.importing import import_
from kvzip.cli.inspect import inspect
from kvzip.cli.repair import repair
from kvzip.cli.train import train
from kvzip.cli.verify import verify

EXAMPLES = """\
zstd for KV caches: compresses, inspects, verifies and restores the KV cache of a transformer.

\b
Examples:
  kvzip compress kv.safetensors              writes kv.safetensors.kvz
  kvzip inspect kv.safetensors.kvz           geometry, bytes and errors
  kvzip decompress kv.safetensors.kvz -o restored.safetensors
  kvzip decompress kv.safetensors.kvz --layers 0:4 --tokens 0:256 -o part.safetensors
  kvzip verify --against kv.safetensors kv.safetensors.kvz
  kvzip repair broken.safetensors.kvz        saves what is intact
  kvzip train caches/*.safetensors -o model.kvp
  cat kv.safetensors | kvzip compress | ssh host 'kvzip decompress > kv.safetensors'
"""

app = typer.Typer(
    # Without rich: plain help, and twice as fast.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvzip {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True, help=EXAMPLES, epilog=EXIT_CODES)
def kvzip(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


VERBS: dict[Callable[..., None], str] = {
    compress: "Make a cache smaller: FILE becomes FILE.kvz.",
    decompress: "Restore a cache, or a part of it.",
    inspect: "Show what a file holds and where its bytes go.",
    verify: "Check files without writing anything.",
    train: "Learn a profile of a model from its caches.",
    repair: "Save what is intact of a damaged file.",
    bench: "Measure codecs on a cache: size, speed, errors.",
    import_: "Make a .kvz of LMCache's files.",
    export: "Make LMCache's file of a .kvz.",
}
for verb, summary in VERBS.items():
    app.command(verb.__name__.rstrip("_"), short_help=summary, epilog=EXIT_CODES)(verb)
