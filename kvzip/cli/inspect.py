"""``kvzip inspect``: geometry, codec, bytes and errors of a file, from its header and index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from kvzip.cli import options, text
from kvzip.cli.items import for_each
from kvzip.errors import UsageError

if TYPE_CHECKING:
    from kvzip.cache import Plane
    from kvzip.inspection import Inspection, PlaneError
    from kvzip.layouts import CacheMap

Plot = Annotated[
    str | None, options.file_option("--plot", about="Draw the bytes of a .kvz, layer by layer.", metavar="PNG")
]


def inspect(
    files: options.Files = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with -v each section's place too.")] = False,
    plot: Plot = None,
    force: options.Force = False,
    layout: options.LayoutName = None,
    heads: options.Heads = None,
    head_dim: options.HeadDim = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
) -> None:
    """Show what a .kvz holds, how it is coded and what its bytes are spent on; -v lists every block.

    Of a pipe the header is shown. Of a safetensors file or folder: how compress would map its tensors. Of a profile:
    what it is for, and what it gains.

    \b
    Examples:
      kvzip inspect kv.safetensors.kvz
      kvzip inspect --json kv.safetensors.kvz | jq .members[0].channel_specs
      kvzip inspect kv.safetensors
      kvzip inspect model.kvp
      kvzip inspect --plot bytes.png kv.safetensors.kvz
    """
    messages = options.Job.of(quiet, verbose).messages
    inputs = options.inputs_of(files)
    if plot is not None:
        options.check_plot(plot, inputs, force)

    def show(name: str) -> None:
        from kvzip.cli.inspect_profile import show_profile
        from kvzip.inspection import is_kvz
        from kvzip.profiles.library import is_profile

        with options.open_input(name) as (file, called):
            if file is not None and is_kvz(file, called):
                _show_kvz(file, called, as_json, messages.verbose)
                if plot is not None:
                    _draw(file, called, plot, force)
            elif plot is None and is_profile(name):
                show_profile(name, as_json)
            elif plot is not None:
                raise UsageError(f"{called} is no .kvz: --plot draws what is compressed", code="not-kvz")
            else:
                _show_source(
                    name if file is None else file, called, as_json, messages.verbose, (layout, heads, head_dim)
                )

    for_each(inputs, show, "shown", messages)


def _draw(file: BinaryIO, name: str, plot: str, force: bool) -> None:
    from kvzip.bytes_picture import bytes_picture
    from kvzip.inspection import members_of
    from kvzip.output import create_file

    if not file.seekable():
        raise UsageError("a pipe tells no bytes by layer: save it to a file for --plot", code="pipe")
    member = next(iter(members_of(file, name)))
    title = f"{Path(name).name}: {_sizes(member)}"
    with create_file(plot, force=force, sources=[name]) as sink:
        sink.write(bytes_picture(member, title, Path(plot).suffix))


def _show_kvz(file: BinaryIO, name: str, as_json: bool, verbose: int) -> None:
    from kvzip.inspection import SCHEMA, members_of

    members = members_of(file, name)
    if as_json:
        found = [member.to_json(sections=bool(verbose)) for member in members]
        print(json.dumps({"schema": SCHEMA, "file": name, "format": "kvz", "members": found}))
        return
    for member in members:
        _print(_member_lines(member, name, verbose))


def _show_source(source: str | BinaryIO, name: str, as_json: bool, verbose: int, layout: tuple[Any, ...]) -> None:
    from kvzip.inspection import SCHEMA
    from kvzip.layouts import map_cache
    from kvzip.tensorfile import open_tensors

    with open_tensors(source) as opened:
        cache_map = map_cache(opened, *layout)
        nbytes = sum(entry.size for entry in opened.files)
    if as_json:
        print(json.dumps({"schema": SCHEMA, "file": name, "format": "safetensors", **_map_json(cache_map)}))
    else:
        _print(_source_lines(cache_map, name, nbytes, verbose))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(text.plain(line))


def _member_lines(member: Inspection, name: str, verbose: int) -> Iterable[str]:
    from kvzip.identity import describe

    reader = member.reader
    yield f"{name}{f', member {member.number}' if reader and len(reader.members) > 1 else ''}"
    yield from _fields(
        [
            ("written by", member.header.producer),
            ("layout", member.layout),
            *_geometry(member.planes),
            ("other tensors", _others(member.header.planes)),
            *(("codec", _codec(codec)) for codec in member.codecs()),
            *(
                (f"{kind} channels" if number == 0 else "", f"layers {text.runs(layers)}: {_spec(spec)}")
                for kind, runs in member.channel_specs().items()
                for number, (layers, spec) in enumerate(runs)
            ),
            ("profile inside", member.profile_hash or ""),
            ("belongs to", describe(member.header.identity)),
            ("size", _sizes(member)),
        ]
    )
    if reader is None:
        yield "  the input is a pipe: only its header was read"
        return
    yield ""
    yield _components(member)
    if errors := member.errors():
        yield ""
        yield _errors(errors)
    if verbose:
        yield ""
        yield _blocks(member)


def _fields(rows: Sequence[tuple[str, str]]) -> Iterable[str]:
    for label, value in rows:
        if value:
            yield f"  {label:<16}{value}"


def _geometry(planes: Sequence[Plane]) -> Iterable[tuple[str, str]]:
    """One row for all planes of equal shape: which layers and kinds, and the shape."""
    found: dict[tuple[Any, ...], list[Plane]] = {}
    for plane in planes:
        found.setdefault((plane.tokens, plane.heads, plane.head_dim, plane.dtype), []).append(plane)
    for number, ((tokens, heads, head_dim, dtype), members) in enumerate(found.items()):
        layers = sorted({plane.layer for plane in members})
        kinds = " and ".join(f"{kind}s" for kind in dict.fromkeys(plane.kind for plane in members))
        sequences = len({plane.sequence for plane in members})
        times = f"{sequences} sequences x " if sequences > 1 else ""
        yield (
            "geometry" if number == 0 else "",
            f"{text.count(len(layers), 'layer')} ({text.runs(layers)}), {kinds}: "
            f"{times}{text.count(tokens, 'token')} x {text.count(heads, 'head')} x {head_dim}, {dtype}",
        )


def _others(planes: Iterable[Plane]) -> str:
    sizes = [plane.nbytes for plane in planes if plane.kind == "bytes"]
    return f"{len(sizes)}, {text.size(sum(sizes))}, stored losslessly" if sizes else ""


def _codec(codec: dict[str, Any]) -> str:
    config = " ".join(
        f"{option}={json.dumps(value, separators=(',', ':')) if isinstance(value, dict | list) else value}"
        for option, value in codec["config"].items()
    )
    return f"{codec['name']} {config}".rstrip()


def _spec(spec: dict[str, Any]) -> str:
    counted = {"bins", "bits", "levels"}
    words = (
        f"{value} {name}" if name in counted else f"{name.replace('_', ' ')} {value}" for name, value in spec.items()
    )
    return ", ".join(words) or "as they are"


def _sizes(member: Inspection) -> str:
    original = text.size(member.original_bytes)
    if member.stored_bytes is None:
        return f"{original} uncompressed"
    bits = member.bits_per_element
    return f"{original} -> {text.size(member.stored_bytes)}, ratio {member.ratio:.3f}" + (
        f", {bits:.3f} bits per element" if bits else ""
    )


def _components(member: Inspection) -> str:
    total, elements = member.stored_bytes or 0, member.elements
    rows = [("component", "bytes", "share", "bits/element")]
    for label, count in [*member.components(), ("total", total)]:
        bits = f"{8 * count / elements:.4f}" if elements else "-"
        rows.append((label, f"{count}", f"{count / total:.2%}", bits))
    return text.table(rows, indent="  ")


def _errors(errors: Sequence[PlaneError]) -> str:
    rows = [("recorded error", "mean", "worst", "in layer", "largest difference")]
    for kind in dict.fromkeys(error.plane.kind for error in errors):
        of_kind = [error for error in errors if error.plane.kind == kind]
        worst = max(of_kind, key=lambda error: error.rank)
        mean = sum(error.rank for error in of_kind) / len(of_kind)
        largest = max(float("inf") if error.max_abs is None else error.max_abs for error in of_kind)
        rows.append((kind, text.error(mean), text.error(worst.rank), str(worst.plane.layer), text.error(largest)))
    return text.table(rows, indent="  ")


def _blocks(member: Inspection) -> str:
    assert member.reader is not None
    rows = [("block", "tokens", "codec", "offset", "bytes", "bits/element")]
    for entry in member.reader.index:
        planes = entry.block.planes
        label = text.plane(planes[0], len(planes) - 1)
        elements = entry.block.tokens * sum(plane.channels for plane in planes)
        tokens, codec = f"{entry.block.start}:{entry.block.stop}", member.header.codecs[entry.codec]["name"]
        bits = f"{8 * entry.length / elements:.4f}" if elements else "-"
        rows.append((label, tokens, codec, f"{entry.offset}", f"{entry.length}", bits))
    return text.table(rows, left=3, indent="  ")


def _source_lines(cache_map: CacheMap, name: str, nbytes: int, verbose: int) -> Iterable[str]:
    planes = [plane for plane in cache_map.planes if plane.kind != "bytes"]
    yield name
    yield from _fields(
        [
            ("layout", f"{cache_map.layout}, {text.count(len(cache_map.maps), 'tensor')}"),
            *_geometry(planes),
            ("other tensors", _others(cache_map.planes)),
            ("size", f"{text.size(nbytes)}, not compressed"),
            *(("note", notice) for notice in cache_map.notices),
        ]
    )
    if verbose:
        rows = [("tensor", "axes", "planes")]
        for entry in cache_map.maps:
            first = f"{entry.planes[0]}{f' to {entry.planes[-1]}' if len(entry.planes) > 1 else ''}"
            rows.append((str(entry.tensor), ",".join(entry.axes) or "-", first if entry.axes else "stored losslessly"))
        yield ""
        yield text.table(rows, left=3, indent="  ")


def _map_json(cache_map: CacheMap) -> dict[str, Any]:
    planes = [plane for plane in cache_map.planes if plane.kind != "bytes"]
    return {
        "layout": cache_map.layout,
        "notices": list(cache_map.notices),
        "layer_count": len({plane.layer for plane in planes}),
        "tensors": [
            {
                "name": entry.tensor.label,
                "dtype": entry.tensor.tag,
                "shape": list(entry.tensor.shape),
                "axes": ",".join(entry.axes) or None,
                "planes": [{"layer": plane.layer, "kind": plane.kind} for plane in entry.planes],
            }
            for entry in cache_map.maps
        ],
    }
