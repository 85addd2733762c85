"""``kvzip train``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvzip.cli import options, text
from kvzip.cli.items import one_by_one
from kvzip.cli.messages import Messages
from kvzip.cli.progress import ProgressStyle
from kvzip.errors import UsageError

if TYPE_CHECKING:
    from kvzip.profiles.files import CacheFile
    from kvzip.profiles.profile import Profile
    from kvzip.profiles.ropes import Ropes

SCHEMA = "kvzip-train/1"

Caches = Annotated[list[str], typer.Argument(metavar="CACHE", help="Caches of one model: safetensors or .kvz.")]
Target = Annotated[str, options.file_option("-o", "--output", about="Write the profile here: model.kvp.")]
ModelConfig = Annotated[
    str | None, options.file_option("--model-config", about="The model's config.json tells the keys' rotation.")
]
RopeText = Annotated[
    str, typer.Option("--rope", metavar="TEXT", help="The keys' rotation, as in theta=1e6; none; auto: found in them.")
]
Group = Annotated[
    int, typer.Option("--group", metavar="N", min=1, help="Layers that share a basis: more is smaller and slower.")
]
Rank = Annotated[int | None, typer.Option("--rank", metavar="R", min=1, help="Coefficients a group at the most.")]
Step = Annotated[
    float | None,
    typer.Option("--step", metavar="S", help="The finest step to serve; coarser ones make small profiles."),
]
BasisType = Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="Of the basis: int8, or bfloat16.")]
State = Annotated[
    str | None, options.file_option("--state", about="Keep what is done here, and go on from it.", metavar="FOLDER")
]
Sinks = Annotated[int, typer.Option("--sinks", metavar="N", min=0, help="First tokens of a cache not to learn from.")]


def train(
    caches: Caches,
    output: Target,
    model_config: ModelConfig = None,
    rope: RopeText = "auto",
    group: Group = 5,
    rank: Rank = None,
    step: Step = None,
    basis_type: BasisType = "int8",
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Record which model it is for.")] = "",
    state: State = None,
    sinks: Sinks = 1,
    layout: options.LayoutName = None,
    heads: options.Heads = None,
    head_dim: options.HeadDim = None,
    force: options.Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a report as JSON.")] = False,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="Of torch: cpu, cuda, cuda:N.")] = "cpu",
    style: options.Progress = ProgressStyle.AUTO,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Learn a profile of a model from some of its caches: codec kvtc makes its other caches far smaller with it.

    A few caches of a thousand tokens do; texts like those to come are best. Every fifth is held out to estimate the
    gain, then learned from, too. Needs torch.

    \b
    Examples:
      kvzip train caches/*.safetensors -o model.kvp --model-config config.json
      kvzip train caches/*.kvz -o model.kvp --rope theta=1e6 --group 4 --state half-done
      kvzip compress kv.safetensors --codec kvtc --profile model.kvp
      kvzip inspect model.kvp
    """
    job = options.Job.of(quiet, verbose, style)
    given = {"group": group, "step": step, "rank": rank, "dtype": basis_type, "sinks": sinks, "device": device}

    from kvzip.output import check_target, create_file
    from kvzip.profiles import train as training
    from kvzip.profiles.files import open_caches

    check_target(Path(output), force=force, sources=caches)
    begin = time.perf_counter()
    settings = _settings({name: value for name, value in given.items() if value is not None})
    sources = [
        source
        for name in one_by_one(caches, job.messages)
        for source in open_caches(name, layout, heads, head_dim, job.messages.notice)
    ]
    ropes = _ropes(rope, model_config, sources, job.messages)
    total = sum(source.nbytes for source in sources)
    with job.progress("train", output, lambda: total) as update:
        pieces = _Pieces(update, total)
        profile = training.train(
            sources, ropes, settings, model=model, state=Path(state) if state else None, progress=pieces.tell
        )
        pieces.tell(1, 1)
    with create_file(output, force=force, sources=caches) as sink:
        sink.write(profile.to_bytes())
    _report(job.messages, output, profile, time.perf_counter() - begin, as_json)


def _settings(given: dict[str, Any]) -> Any:
    from kvzip.profiles.scales import step_index
    from kvzip.profiles.train import Options, check_device

    if given["dtype"] not in ("int8", "bfloat16"):
        raise UsageError(f"--dtype {given['dtype']}: the basis is int8 or bfloat16", code="train-options")
    if "step" in given:
        if not 2.0**-12 <= given["step"] <= 2.0**12:
            raise UsageError(f"--step {given['step']}: must be between 2^-12 and 2^12", code="train-options")
        given["step"] = step_index(given["step"])
    check_device(given["device"])
    return Options(**given)


def _ropes(rope: str, model_config: str | None, sources: Sequence[CacheFile], messages: Messages) -> Ropes:
    """The rotation that is told, or that the first cache shows."""
    from kvzip.profiles.detect import detect
    from kvzip.profiles.files import Keys
    from kvzip.profiles.ropes import Ropes, read_config
    from kvzip.profiles.summary import rotation

    if model_config is not None:
        if rope != "auto":
            raise UsageError("--rope and --model-config both tell the keys' rotation: leave one out", code="two-ropes")
        return read_config(model_config)
    if rope != "auto":
        return Ropes.parse(rope)
    found = detect(Keys(sources[0]))
    if found is None:
        messages.notice(f"{sources[0].name}: no rotation stands out in the keys, they are taken as they are (--rope)")
        return Ropes()
    messages.notice(
        f"{sources[0].name}: keys are rotated ({rotation(found.rope)}): undone, they take {found.gain:.2f} bits less"
    )
    return Ropes((found.rope,))


class _Pieces:
    """Pieces of training, told as bytes."""

    def __init__(self, update: Any, total: int) -> None:
        self._update, self._total, self._told = update, total, 0

    def tell(self, done: int, pieces: int, what: str = "") -> None:
        now = self._total * done // pieces
        self._update(now - self._told)
        self._told = now


def _report(messages: Messages, output: str, profile: Profile, seconds: float, as_json: bool) -> None:
    from kvzip.profiles.library import short
    from kvzip.profiles.summary import data, gain, summary

    nbytes = Path(output).stat().st_size
    fields = {"verb": "train", "output": output, "bytes": nbytes, "seconds": round(seconds, 3), **summary(profile)}
    if as_json:
        print(json.dumps({"schema": SCHEMA, **fields}))
        return
    messages.result(
        f"{output}: {short(profile.hash)}, {text.size(nbytes)}, {len(profile.groups)} groups of layers, learned from "
        f"{data(profile)} in {seconds:.1f} s; {gain(profile)}",
        **fields,
    )
