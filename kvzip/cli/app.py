"""The verbs, put together."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Annotated

import typer

from kvzip._version import __version__
from kvzip.cli.failures import EXIT_CODES

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

VERBS = {  # verb: module, function, summary
    "compress": ("compress", "compress", "Make a cache smaller: FILE becomes FILE.kvz."),
    "decompress": ("decompress", "decompress", "Restore a cache, or a part of it."),
    "inspect": ("inspect", "inspect", "Show what a file holds and where its bytes go."),
    "verify": ("verify", "verify", "Check files without writing anything."),
    "train": ("train", "train", "Learn a profile of a model from its caches."),
    "repair": ("repair", "repair", "Save what is intact of a damaged file."),
    "bench": ("bench", "bench", "Measure codecs on a cache: size, speed, errors."),
    "import": ("importing", "import_", "Make a .kvz of LMCache's files."),
    "export": ("exporting", "export", "Make LMCache's file of a .kvz."),
}


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvzip {__version__}")
        raise typer.Exit


def kvzip(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def application(verbs: Iterable[str] = VERBS) -> typer.Typer:
    """The command line with these verbs: what a run does not use need not be loaded."""
    app = typer.Typer(
        # Without rich: plain help, and twice as fast.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(invoke_without_command=True, help=EXAMPLES, epilog=EXIT_CODES)(kvzip)
    for verb in verbs:
        module, function, summary = VERBS[verb]
        run = getattr(importlib.import_module(f"kvzip.cli.{module}"), function)
        app.command(verb, short_help=summary, epilog=EXIT_CODES)(run)
    return app
