"""``kvzip compress``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvzip.cli import options, text
from kvzip.cli.errors import FailAbove, judge, layer_table
from kvzip.cli.items import check_targets, compressed_name, for_each, remove_source
from kvzip.cli.messages import Messages
from kvzip.cli.progress import ProgressStyle
from kvzip.errors import UsageError

if TYPE_CHECKING:
    from kvzip.pipeline import Report

Codec = Annotated[
    str,
    typer.Option(
        "--codec",
        metavar="NAME[:OPT=VAL,...]",
        help="cachegen, kvtc, turboquant, kivi, fp8, int8, int4, lossless or raw; help: shows their options.",
    ),
]
KCodec = Annotated[str | None, typer.Option("--k-codec", metavar="NAME[:...]", help="For keys, in place of --codec.")]
VCodec = Annotated[str | None, typer.Option("--v-codec", metavar="NAME[:...]", help="For values, in place of --codec.")]
LayerCodec = Annotated[
    str | None,
    typer.Option("--layer-codec", metavar="LAYERS:NAME,...", help="For some layers, as in 0-1:raw,2-:kivi:bits=2."),
]
Level = Annotated[
    int | None, typer.Option("--level", metavar="1..9", help="Finer steps or more bins; 5 is the codec's default.")
]
Bins = Annotated[str | None, typer.Option(metavar="LAYERS:BINS,...", help="Bins by layer, as in 0-9:32,10-:16.")]
Sinks = Annotated[
    int | None,
    typer.Option("--sinks", metavar="N", min=0, help="First tokens to keep exact; 0 for a chunk from the middle."),
]
Coder = Annotated[
    str | None, typer.Option("--coder", metavar="CODER", help="Of cachegen: rans, or range as LMCache has it.")
]
BlockTokens = Annotated[
    int, typer.Option("--block-tokens", metavar="N", min=1, help="Tokens in a block, the unit of random access.")
]

Step = Annotated[float | None, typer.Option("--step", metavar="S", help="Of kvtc: the step itself; 1.358 at level 5.")]
Bits = Annotated[
    float | None, typer.Option("--bits", metavar="B", help="Of kvtc: so many bits a number, within 1 %; searched for.")
]
MaxError = Annotated[
    float | None,
    typer.Option("--max-error", metavar="X", help="Of kvtc: no layer's relative error above; searched for."),
]
RopeText = Annotated[
    str | None, typer.Option("--rope", metavar="TEXT", help="Of kvtc: the keys' rotation: theta=1e6, none, auto.")
]
ModelConfig = Annotated[
    str | None,
    options.file_option("--model-config", about="Of kvtc: the model's config.json has the rotation."),
]
ProfileFile = Annotated[
    str | None, options.file_option("--profile", about="Of kvtc: a profile (kvzip train), or its hash.")
]
Embed = Annotated[bool, typer.Option("--embed-profile", help="Put the profile into the file, which then stands alone.")]
Effort = Annotated[
    int | None,
    typer.Option("--effort", metavar="1..9", help="Of kvtc: larger bases, slower, less error."),
]

OWNERS = {
    "k_bins": "cachegen", "v_bins": "cachegen", "coder": "cachegen",
    "step": "kvtc", "bits": "kvtc", "max_error": "kvtc", "rope": "kvtc", "profile": "kvtc", "effort": "kvtc",
}  # fmt: skip
"""Whose options they are."""

Model = Annotated[str | None, typer.Option("--model", metavar="NAME", help="Record which model the cache is of.")]
TokenIds = Annotated[
    str | None,
    options.file_option("--token-ids", about="Record of which tokens: text, .npy or .safetensors; @NAME: a tensor."),
]
ShowErrors = Annotated[bool, typer.Option("--report", help="Show the errors of every layer.")]


def compress(
    files: options.Files = None,
    output: options.Output = None,
    stdout: options.Stdout = False,
    codec: Codec = "cachegen",
    k_codec: KCodec = None,
    v_codec: VCodec = None,
    layer_codec: LayerCodec = None,
    level: Level = None,
    k_bins: Bins = None,
    v_bins: Bins = None,
    sinks: Sinks = None,
    coder: Coder = None,
    step: Step = None,
    bits: Bits = None,
    max_error: MaxError = None,
    rope: RopeText = None,
    model_config: ModelConfig = None,
    profile: ProfileFile = None,
    embed_profile: Embed = False,
    effort: Effort = None,
    block_tokens: BlockTokens = 1024,
    layout: options.LayoutName = None,
    heads: options.Heads = None,
    head_dim: options.HeadDim = None,
    shape: options.Shape = None,
    dtype: options.Dtype = None,
    model: Model = None,
    token_ids: TokenIds = None,
    force: options.Force = False,
    keep: options.Keep = False,
    remove: options.Remove = False,
    show_errors: ShowErrors = False,
    fail_above: FailAbove = None,
    sync: options.Sync = False,
    threads: options.Threads = None,
    device: options.DeviceName = "auto",
    style: options.Progress = ProgressStyle.AUTO,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Compress KV caches: kv.safetensors becomes kv.safetensors.kvz.

    \b
    Examples:
      kvzip compress kv.safetensors
      kvzip compress kv.safetensors --codec fp8:scale=head -o small.kvz
      kvzip compress kv.safetensors --level 7 --sinks 4
      kvzip compress kv.safetensors --k-codec int8 --v-codec kivi:bits=2 --layer-codec 0-1:lossless
      kvzip compress kv.safetensors --codec kvtc --bits 2
      kvzip compress kv.safetensors --codec kvtc --profile model.kvp --embed-profile
      kvzip compress kv.safetensors --report --fail-above 0.3
      kvzip compress cache.safetensors --layout L,kv,T,H,D
      kvzip compress chunk.data --shape 2,32,256,1024 --layout kv,L,T,C --heads 8
      kvzip compress kv.safetensors --model llama-3-8b --token-ids ids.json
      cat kv.safetensors | kvzip compress --codec raw > kv.kvz
    """
    job = options.Job.of(quiet, verbose, style, device, threads)
    if codec == "help":
        print(_codec_table())
        return
    inputs = options.inputs_of(files)
    target = check_targets(inputs, output, stdout, force=force, keep=keep, remove=remove)
    given = {
        "level": level, "k_bins": k_bins, "v_bins": v_bins, "sinks": sinks, "coder": coder,
        "step": step, "bits": bits, "max_error": max_error, "rope": _rope(rope, model_config), "profile": profile,
        "effort": effort,
    }  # fmt: skip
    codec_options = {name: value for name, value in given.items() if value is not None}
    apart = {"keys": k_codec, "values": v_codec, "layers": layer_codec}
    _check_options(codec, codec_options, [spec for spec in (k_codec, v_codec) if spec is not None])
    given_apart = [f"{which} {spec}" for which, spec in apart.items() if spec is not None]

    codec_name = codec.partition(":")[0].strip()

    def work(name: str) -> None:
        from kvzip.api import compress as run
        from kvzip.codecs import codec_class

        where = target or compressed_name(name)
        begin = time.perf_counter()
        before = Path(name).stat() if remove else None
        with (
            job.progress("compress", name, lambda: _size(name)) as update,
            options.raw_or_named(name, shape, dtype) as source,
        ):
            report = run(
                source, where,
                codec=codec, k_codec=k_codec, v_codec=v_codec, layer_codec=layer_codec,
                layout=layout, heads=heads, head_dim=head_dim, device=job.device,
                block_tokens=block_tokens, embed_profile=embed_profile,
                identity=_identity(name, model, token_ids, job.messages.notice),
                force=force, sync=sync or remove, notice=job.messages.notice, progress=update, **codec_options,
            )  # fmt: skip
        used = [codec] if codec_class(codec_name).name in report.codecs else []
        # Of a cache that no codec takes, or without keys and values, all is kept as it is.
        label = ", ".join([*used, *given_apart]) or "lossless"
        _tell(job.messages, name, where, label, report, time.perf_counter() - begin, show_errors)
        judge(text.called(name), report.errors, fail_above)
        if before is not None:
            remove_source(name, before, lambda: _read_back(where))

    with options.offer(profile):
        for_each(inputs, work, "compressed", job.messages)


def _check_options(codec: str, given: dict[str, Any], apart: Sequence[str]) -> None:
    """Refuse an option out of range, one that ``--codec`` gives already, and one of another codec, with whose it is.

    ``apart`` are the codecs of keys or values alone.
    """
    from kvzip.codecs import codec_class, parse_spec
    from kvzip.codecs.options import options_of

    for option in ("level", "effort"):
        if not 1 <= given.get(option, 1) <= 9:
            raise UsageError(f"--{option} must be 1 to 9, got {given[option]}", code="codec-option")
    name, written = parse_spec(codec)
    taken = options_of(codec_class(name))
    for option in given:
        flag, owner = f"--{option.replace('_', '-')}", OWNERS.get(option)
        if option in written:
            raise UsageError(f"{flag} and --codec {codec} both tell {option}: leave one out", code="codec-option")
        if owner and option not in taken and not taken.others:
            there = [spec for spec in apart if parse_spec(spec)[0] == owner]
            where = f"write it there, as in {there[0]}{',' if ':' in there[0] else ':'}{option}=..." if there else ""
            raise UsageError(
                f"{flag} belongs to --codec {owner}, and --codec is {name}{f'; {where}' if where else ''}",
                code="codec-option",
            )


def _codec_table() -> str:
    """Every codec that is installed, and its options with their defaults."""
    from kvzip.codecs import available_codecs, codec_class
    from kvzip.codecs.options import options_of

    rows = []
    for name in available_codecs():
        cls = codec_class(name)
        taken = [option for option in options_of(cls).values() if option.name not in cls.found]
        rows.append((name, " ".join(map(str, taken)) or "-" if cls.name == name else f"another name of {cls.name}"))
    return f"--codec NAME:OPTION=VALUE,...; docs/cli.md tells what they mean\n{text.table(rows, left=2, indent='  ')}"


def _rope(rope: str | None, model_config: str | None) -> Any:
    """The keys' rotation as the codec takes it; None if nothing is told."""
    if model_config is None:
        return rope
    from kvzip.profiles.ropes import read_config

    if rope is not None:
        raise UsageError("--rope and --model-config both tell the keys' rotation: leave one out", code="two-ropes")
    return read_config(model_config).to_json()


def _identity(
    name: str, model: str | None, token_ids: str | None, notice: Callable[[str], None]
) -> Callable[[int], dict[str, Any]]:
    """What the header records of a cache of so many tokens; ``@NAME`` is a tensor of the cache itself."""
    from kvzip.identity import fitted, identify, read_token_ids, token_ids_of
    from kvzip.tensorfile import open_tensors

    if token_ids is None:
        return lambda _: identify(model)
    if not token_ids.startswith("@"):
        ids = read_token_ids(token_ids)
        return lambda tokens: identify(model, fitted(ids, tokens, notice))
    if name == "-":
        raise UsageError("--token-ids @NAME needs a file: of a pipe the tensor has passed by then", code="token-ids")
    with open_tensors(name) as source:
        ids = token_ids_of(source, token_ids[1:])
    return lambda tokens: identify(model, fitted(ids, tokens, notice))


def _size(name: str) -> int | None:
    return Path(name).stat().st_size if Path(name).is_file() else None


def _read_back(target: str) -> None:
    from kvzip.devices import get_device
    from kvzip.verification import verify_members

    with Path(target).open("rb") as file:
        verify_members(file, target, device=get_device("cpu"))


def _tell(
    messages: Messages, name: str, target: str, codec: str, report: Report, seconds: float, show_errors: bool
) -> None:
    from kvzip.quality import to_json, worst

    original, stored = text.size(report.original_bytes), text.size(report.stored_bytes)
    found = worst(report.errors)
    told = ", ".join(f"{kind} {text.error(e.relative)} (layer {e.plane.layer})" for kind, e in found.items())
    messages.result(
        f"{text.called(name)}: {report.stored_bytes / report.original_bytes:.2%} ({original} -> {stored}, "
        f"{text.called(target, out=True)}), {codec}, {seconds:.2f} s{f', worst error: {told}' if told else ''}",
        verb="compress",
        input=name,
        output=target,
        codec=codec,
        original_bytes=report.original_bytes,
        stored_bytes=report.stored_bytes,
        seconds=round(seconds, 6),
        worst_errors=[to_json(error) for error in found.values()],
        **({"errors": [to_json(error) for error in report.errors]} if show_errors else {}),
    )
    if show_errors and not messages.as_json:
        table = layer_table(report.errors) if report.errors else "  nothing was lost"
        messages.result(f"relative errors |x - y| / |x|, as recorded by the codec:\n{table}")
