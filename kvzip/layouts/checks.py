"""What a careful user would want to know of a map before anything is compressed."""

from __future__ import annotations

from itertools import groupby

from kvzip.cache import Plane
from kvzip.errors import UsageError
from kvzip.layouts.declare import Layout, layers_text
from kvzip.layouts.maps import CacheMap
from kvzip.layouts.slabs import KV_DTYPES, misfit
from kvzip.tensorfile import TensorInfo, TensorSource


def like_kv(source: TensorSource) -> list[TensorInfo]:
    """Tensors that may well be keys or values: floating point of several axes, or bytes of three and more."""
    return [
        tensor
        for tensor in source.tensors
        if tensor.dtype in KV_DTYPES and len(tensor.shape) >= (3 if "int8" in tensor.dtype else 2) and tensor.nbytes
    ]


def check_fit(source: TensorSource, layout: Layout, *, declared: bool) -> None:
    """At least one tensor must fit a layout that the user names, and every one that a ``declared`` pattern names."""
    for tensor in source.tensors if declared else ():
        named = [clause for clause in layout.clauses if clause.pattern != "*" and clause.match(tensor)]
        if named and not layout.clause_of(tensor):
            raise UsageError(
                f"{source.name}: tensor {tensor} does not fit the layout {named[0]}: {misfit(tensor, named[0].axes)}",
                code="layout-shape",
            )
    if layout.clauses and not layout.partial and not layout.fitting(source):
        likely = (like_kv(source) or source.tensors)[:1]
        reasons = "".join(f" ({tensor}: {_why_not(layout, tensor)})" for tensor in likely)
        raise UsageError(f"{source.name}: no tensor fits the layout {layout.name}{reasons}", code="layout-shape")


def check_whole(source: TensorSource, layout: Layout, cache_map: CacheMap) -> None:
    """No layer is missing between others, and each has keys and values (or latents) of as many tokens and heads.

    The widths of keys and values may differ: those of DeepSeek's models do.
    """
    planes = [plane for plane in cache_map.planes if plane.kind != "bytes"]
    overrule = f"pass --layout {layout.name} if this is as it should be"
    present = {plane.layer for plane in planes}
    missing = set(range(min(present), max(present))) - present if planes and max(present) < 10**5 else set()
    if missing and not layout.partial:
        which = "layer {} of {} is" if len(missing) == 1 else "layers {} of {} are"
        told = which.format(layers_text(sorted(missing)), f"{min(present)}-{max(present)}")
        raise UsageError(
            f"{source.name}: {told} missing; {overrule}",
            code="layer-missing",
        )
    owner = {plane.index: tensor_map.tensor for tensor_map in cache_map.maps for plane in tensor_map.planes}
    planes.sort(key=lambda plane: (plane.sequence, plane.layer, plane.kind))
    for _, group in groupby(planes, key=lambda plane: (plane.sequence, plane.layer)):
        problem = _pair_problem(list(group), owner)
        if problem:
            raise UsageError(f"{source.name}: {problem}; {overrule}", code="layer-mismatch")


def _pair_problem(planes: list[Plane], owner: dict[int, TensorInfo]) -> str:
    if planes[0].kind == "latent":
        return ""
    if len(planes) == 1:
        lacks = "value" if planes[0].kind == "key" else "key"
        return f"layer {planes[0].layer} has a {planes[0].kind} ({owner[planes[0].index]}) but no {lacks}"
    key, value = planes
    if (key.tokens, key.heads) == (value.tokens, value.heads):
        return ""
    return (
        f"layer {key.layer} has keys of {key.tokens} tokens x {key.heads} heads ({owner[key.index]}), "
        f"but values of {value.tokens} x {value.heads} ({owner[value.index]})"
    )


def _why_not(layout: Layout, tensor: TensorInfo) -> str:
    matching = [clause for clause in layout.clauses if clause.match(tensor)]
    return misfit(tensor, matching[0].axes) if matching else "its name does not match"
