"""``kvzip repair``."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, cast

import typer

from kvzip.cli import options, text
from kvzip.cli.items import SUFFIX, check_targets, for_each
from kvzip.cli.messages import Messages
from kvzip.cli.progress import ProgressStyle
from kvzip.errors import CorruptError

if TYPE_CHECKING:
    from kvzip.cache import Plane
    from kvzip.repair import Repair

WholeLayers = Annotated[
    bool, typer.Option("--whole-layers", help="Keep layers that lack nothing, in place of the tokens that all have.")
]

SHOWN = 8
"""Lines about damage before the rest is counted."""


def repair(
    files: options.Files = None,
    output: options.Output = None,
    stdout: options.Stdout = False,
    whole_layers: WholeLayers = False,
    force: options.Force = False,
    sync: options.Sync = False,
    style: options.Progress = ProgressStyle.AUTO,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Save what is intact of a truncated or damaged .kvz as a sound one: kv.kvz becomes kv.repaired.kvz.

    Kept are the first tokens, up to where any layer lacks some: a prefix of a KV cache is valid on its own. If not even
    the first block is there in every layer, the longest run of whole layers is kept. The exit code is 0 if nothing is
    missing, 3 otherwise.

    \b
    Examples:
      kvzip repair broken.safetensors.kvz
      kvzip repair broken.kvz --whole-layers -o layers.kvz
    """
    messages = options.Job.of(quiet, verbose, style).messages
    inputs = options.inputs_of(files)
    target = check_targets(inputs, output, stdout, force=force, keep=False, remove=False)

    def work(name: str) -> None:
        from kvzip.output import create_file
        from kvzip.repair import repair as run

        where = target or _target(name)
        source: Any = sys.stdin.buffer if name == "-" else name
        with create_file(where, force=force, sync=sync, sources=[] if name == "-" else [name]) as sink:
            repairs = run(source, cast(BinaryIO, sink), whole_layers=whole_layers)
        for number, found in enumerate(repairs):
            tell = _tell if found.lost is None else _tell_lost
            tell(messages, text.called(name) + (f", member {number}" if len(repairs) > 1 else ""), where, found)
        if not all(found.complete for found in repairs):
            raise CorruptError(
                f"{text.called(name)}: a part of it is lost; {text.called(where, out=True)} holds the rest",
                code="repaired-part",
            )

    for_each(inputs, work, "repaired", messages)


def _target(name: str) -> str:
    return "-" if name == "-" else f"{name.removesuffix(SUFFIX)}.repaired{SUFFIX}"


def _tell(messages: Messages, name: str, target: str, found: Repair) -> None:
    from kvzip.repair import share

    lost, left = share(found, found.missing), share(found, found.left_out)
    lines = [f"damaged: {line}" for line in found.damage]
    lines += [f"missing: {line}" for line in _ranges(found.missing)]
    lines += [f"left out, though intact: {line}" for line in _ranges(found.left_out)]
    lines += [f"lost: tensor {tensor[:100]}" for tensor in found.tensors]
    shown = (
        lines if messages.verbose or len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more (-v)"]
    )
    if found.left_out:
        shown.append(_reason(found))
    tokens = "all tokens" if found.tokens is None else f"the first {found.tokens} tokens"
    layers = f" of layers {text.runs(found.layers)}" if found.layers else ""
    shares = f"{1 - lost - left:.1%} of the cache; {lost:.1%} is missing" if found.missing else "nothing is missing"
    also = f", {left:.1%} is intact but left out" if found.left_out else ""
    messages.result(
        "\n  ".join([f"{name}: {tokens}{layers} saved in {text.called(target, out=True)}, {shares}{also}", *shown]),
        verb="repair",
        input=name,
        output=target,
        complete=found.complete,
        tokens=found.tokens,
        layers=found.layers,
        lost_tensors=found.tensors,
        damage=found.damage,
        missing=_json(found.missing),
        left_out=_json(found.left_out),
    )


def _tell_lost(messages: Messages, name: str, target: str, found: Repair) -> None:
    """Of a cache beside others that were saved."""
    messages.result(
        f"{name}: nothing of it is saved: {found.lost}",
        verb="repair",
        input=name,
        output=target,
        complete=False,
        tokens=0,
        layers=[],
        lost_tensors=[],
        damage=found.damage,
        missing=_json(found.missing),
        left_out=[],
    )


def _reason(found: Repair) -> str:
    """Why something intact was not saved."""
    if found.tokens is not None:
        return (
            f"the first {found.tokens} tokens are what all layers have, and a prefix is of use on its own; "
            "--whole-layers keeps the longest run of whole layers instead"
        )
    return "a file's layers and their tokens have no gaps: the longest run of whole layers is kept"


def _ranges(ranges: Iterable[tuple[Plane, int, int]]) -> list[str]:
    """``layers 3-9,25-29 key, value, tokens 0:128``: token ranges, those of equal tokens and kinds in one line."""
    kinds: defaultdict[tuple[int, int, int], set[str]] = defaultdict(set)
    for plane, start, stop in ranges:
        kinds[-1 if plane.kind == "bytes" else plane.layer, start, stop].add(plane.kind)
    layers: defaultdict[tuple[int, int, str], list[int]] = defaultdict(list)
    for (layer, start, stop), found in kinds.items():
        layers[start, stop, ", ".join(sorted(found))].append(layer)
    return [
        f"other tensors, bytes {start}:{stop}"
        if kind == "bytes"
        else f"layer{'s' * (len(numbers) > 1)} {text.runs(numbers)} {kind}, tokens {start}:{stop}"
        for (start, stop, kind), numbers in layers.items()
    ]


def _json(ranges: Iterable[tuple[Plane, int, int]]) -> list[dict[str, Any]]:
    return [{"layer": plane.layer, "kind": plane.kind, "start": start, "stop": stop} for plane, start, stop in ranges]
