"""From a source to its map: by the layout that the user names, or by the only one that fits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvzip.errors import UsageError
from kvzip.layouts import lmcache, mla, mlx, paged, stacked, transformers, vllm
from kvzip.layouts.declare import Layout, Split, layers_text, names, parse_clauses
from kvzip.layouts.maps import KV_DTYPES, CacheMap, Role, misfit
from kvzip.tensorfile import TensorInfo, TensorSource

_MODULES = (transformers, stacked, mlx, lmcache, vllm, mla, paged)
LAYOUTS: dict[str, Layout] = {layout.name: layout for module in _MODULES for layout in module.LAYOUTS}
"""Every layout with a name, by its name."""

NONE = Layout("none", "nothing is KV: every tensor passes through losslessly", ())


def find_layout(text: str) -> Layout:
    """The layout of a name, or of a declaration. Raises ``UsageError``."""
    if text in LAYOUTS:
        return LAYOUTS[text]
    if text == NONE.name:
        return NONE
    if "," not in text:
        raise UsageError(
            f"unknown layout {text!r}; known are {', '.join(LAYOUTS)}, none, or declare one, such as 'L,kv,T,H,D'",
            code="layout-unknown",
        )
    return Layout(text, "declared", parse_clauses(text))


def map_cache(
    source: TensorSource, layout: str | None = None, heads: int | None = None, head_dim: int | None = None
) -> CacheMap:
    """Map the tensors of a source to planes.

    Args:
        layout: a name of :data:`LAYOUTS`, ``"none"``, or a declaration such as ``"layers.{L}.{kv}=H,T,D"``; None detects it.
        heads: KV heads, where an axis holds all channels; else the channels count as one head.
        head_dim: channels of a head, in place of ``heads``.

    Raises ``UsageError`` if the layout does not fit, or, in detection, if none or several do, or if layers lack their keys,
    their values or each other: what a careful user would want to know, and may overrule by naming the layout.
    """
    split = Split(heads, head_dim)
    if layout is not None:
        chosen = find_layout(layout)
        _check_declared(source, chosen)
        return _map(source, chosen, split)
    chosen = detect(source, split)
    cache_map = _map(source, chosen, split)
    _check_whole(source, cache_map)
    return cache_map


def detect(source: TensorSource, split: Split) -> Layout:
    """The only layout that fits. Raises ``UsageError`` with the candidates if there are several, or none."""
    fits: dict[str, Layout] = {layout.name: layout for module in _MODULES for layout in module.detect(source)}
    if len(fits) > 1:
        fits = {
            name: la for name, la in fits.items() if not any(split.contradicts(grid) for _, grid in la.fitting(source))
        }
    if len(fits) == 1:
        return next(iter(fits.values()))
    if fits:
        raise UsageError(
            f"{source.name}: several layouts fit {names(_like_kv(source))}; pass one of\n{_listed(fits.values())}",
            code="layout-ambiguous",
        )
    unknown = _like_kv(source)
    if not unknown:
        return NONE
    first = unknown[0]
    possible = [layout for layout in LAYOUTS.values() if _could_be(layout, first)]
    raise UsageError(
        f"{source.name}: no known layout has tensors such as {first}; declare their axes, such as\n{_listed(possible[:6])}"
        "  --layout none   (no KV: store everything losslessly)",
        code="layout-undetected",
    )


def _listed(layouts: object) -> str:
    rows = []
    for layout in layouts:  # type: ignore[attr-defined]
        clause = layout.clauses[0]
        rows.append(f"  --layout {layout.name}   ({','.join(clause.axes)}: {layout.summary})\n")
    return "".join(rows)


def _could_be(layout: Layout, tensor: TensorInfo) -> bool:
    return any(clause.pattern == "*" and not misfit(tensor, clause.axes) for clause in layout.clauses)


def _like_kv(source: TensorSource) -> list[TensorInfo]:
    """Tensors that may well be keys or values: floating point, or bytes of several axes."""
    return [
        tensor
        for tensor in source.tensors
        if tensor.dtype in KV_DTYPES and len(tensor.shape) >= (3 if "int8" in tensor.dtype else 2) and tensor.nbytes
    ]


def _map(source: TensorSource, layout: Layout, split: Split) -> CacheMap:
    roles, notices = layout.roles(source, split)
    roles = _number_sequences(source, roles)
    mapped = {id(tensor) for tensor, role in zip(source.tensors, roles, strict=True) if role}
    left = [tensor for tensor in _like_kv(source) if id(tensor) not in mapped]
    if left and layout is not NONE and not isinstance(layout, type(mlx.MLX)):
        notices.append(f"no part of the layout {layout.name}, stored losslessly: {names(left)}")
    if not mapped:
        notices.append(f"{source.name} holds no keys and values that the layout knows: everything is stored losslessly")
    flat = [tensor for tensor, role in zip(source.tensors, roles, strict=True) if role and _one_head(role)]
    if flat and not (split.heads or split.head_dim):
        notices.append(
            f"the heads of {names(flat)} are not known: its channels count as one head; pass --heads to split them"
        )
    return CacheMap.build(layout.name, source.tensors, roles, notices)


def _one_head(role: Role) -> bool:
    return role.axes[-1] in ("C", "2C") and role.heads == 1


def _number_sequences(source: TensorSource, roles: Sequence[Role | None]) -> list[Role | None]:
    """Give files that each hold a whole cache (LMCache's chunks) a sequence of their own; anything else twice is an error."""
    pairs = [(tensor, role) for tensor, role in zip(source.tensors, roles, strict=True) if role]
    whole = len({tensor.file for tensor, _ in pairs}) == len(pairs) > 1 and all("L" in role.axes for _, role in pairs)
    numbers = {tensor.file: number for number, (tensor, _) in enumerate(pairs)} if whole else {}
    seen: dict[tuple[int, str | None, int], TensorInfo] = {}
    for tensor, role in pairs:
        key = (role.layer, role.kind, numbers.get(tensor.file, 0))
        if key in seen:
            raise UsageError(
                f"{source.name}: {seen[key].label} and {tensor.label} both hold {role.kind or 'keys and values'} of layer "
                f"{role.layer}; a source holds one cache, so point at one of several, or declare a layout that tells them apart",
                code="layout-twice",
            )
        seen[key] = tensor
    return [
        role and Role(role.axes, role.layer, role.kind, role.heads, numbers.get(tensor.file, 0) * _batch(tensor, role))
        for tensor, role in zip(source.tensors, roles, strict=True)
    ]


def _batch(tensor: TensorInfo, role: Role) -> int:
    return tensor.shape[role.axes.index("B")] if "B" in role.axes else 1


def _check_declared(source: TensorSource, layout: Layout) -> None:
    """A tensor that a declared pattern names must fit; so must at least one tensor of the source."""
    for tensor in source.tensors:
        named = [clause for clause in layout.clauses if clause.pattern != "*" and clause.match(tensor)]
        if named and layout.summary == "declared" and not layout.clause_of(tensor):
            reason = misfit(tensor, named[0].axes)
            raise UsageError(
                f"{source.name}: tensor {tensor} does not fit the layout {named[0]}: {reason}", code="layout-shape"
            )
    if layout.clauses and not layout.fitting(source) and layout is not mlx.MLX:
        likely = (_like_kv(source) or source.tensors)[:1]
        reasons = "; ".join(f"{tensor}: {_why_not(layout, tensor)}" for tensor in likely)
        raise UsageError(
            f"{source.name}: no tensor fits the layout {layout.name}{f' ({reasons})' if reasons else ''}",
            code="layout-shape",
        )


def _why_not(layout: Layout, tensor: TensorInfo) -> str:
    matching = [clause for clause in layout.clauses if clause.match(tensor)]
    return misfit(tensor, matching[0].axes) if matching else "its name does not match"


def _check_whole(source: TensorSource, cache_map: CacheMap) -> None:
    """In a detected cache every layer has keys and values of one shape, and no layer is missing between others."""
    planes = [plane for plane in cache_map.planes if plane.kind != "bytes"]
    layers = sorted({plane.layer for plane in planes})
    owner = {plane.index: tensor_map.tensor for tensor_map in cache_map.maps for plane in tensor_map.planes}
    missing = sorted(set(range(layers[0], layers[-1] + 1)) - set(layers)) if layers and layers[-1] < 10**6 else []
    overrule = f"pass --layout {cache_map.layout} if this is as it should be"
    if missing and cache_map.layout != mlx.MLX.name:
        raise UsageError(
            f"{source.name}: layers {layers_text(missing)} are missing between {layers[0]} and {layers[-1]}; {overrule}",
            code="layer-missing",
        )
    ordered = sorted(planes, key=lambda plane: (plane.sequence, plane.layer, plane.kind))
    for (_, layer), group in groupby(ordered, key=lambda plane: (plane.sequence, plane.layer)):
        pair = list(group)
        if pair[0].kind == "latent":
            continue
        if len(pair) == 1:
            lacks = "value" if pair[0].kind == "key" else "key"
            raise UsageError(
                f"{source.name}: layer {layer} has a {pair[0].kind} ({owner[pair[0].index]}) but no {lacks}; {overrule}",
                code="layer-incomplete",
            )
        key, value = pair
        if (key.tokens, key.heads) != (value.tokens, value.heads):
            raise UsageError(
                f"{source.name}: layer {layer} has keys of {key.tokens} tokens x {key.heads} heads ({owner[key.index]}) but values "
                f"of {value.tokens} x {value.heads} ({owner[value.index]}); {overrule}",
                code="layer-mismatch",
            )
