"""From a source to its map: by the layout that the user names, or by the only one that fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvzip.errors import UsageError
from kvzip.layouts import lmcache, mla, mlx, paged, stacked, transformers, vllm
from kvzip.layouts.checks import check_fit, check_whole, like_kv
from kvzip.layouts.declare import Layout, Split, names, parse_clauses
from kvzip.layouts.maps import CacheMap
from kvzip.layouts.slabs import Role, misfit
from kvzip.tensorfile import TensorInfo, TensorSource

_MODULES = (transformers, stacked, mlx, lmcache, vllm, mla, paged)
NONE = Layout("none", "nothing is KV: every tensor passes through losslessly", ())
LAYOUTS: dict[str, Layout] = {layout.name: layout for module in _MODULES for layout in module.LAYOUTS} | {"none": NONE}
"""Every layout with a name, by its name."""


def find_layout(text: str) -> Layout:
    """The layout of a name, or of a declaration. Raises ``UsageError``."""
    if text in LAYOUTS:
        return LAYOUTS[text]
    if "," not in text:
        raise UsageError(
            f"unknown layout {text!r}; known are {', '.join(LAYOUTS)}; or declare one, such as 'L,kv,T,H,D'",
            code="layout-unknown",
        )
    return Layout(text, "declared", parse_clauses(text))


def map_cache(
    source: TensorSource, layout: str | None = None, heads: int | None = None, head_dim: int | None = None
) -> CacheMap:
    """Map the tensors of a source to planes.

    Args:
        layout: a name of :data:`LAYOUTS` or a declaration such as ``"layers.{L}.{kv}=H,T,D"``; None detects it.
        heads: KV heads, where an axis holds all channels; else the channels count as one head.
        head_dim: channels of a head, in place of ``heads``.

    Raises ``UsageError`` if the layout does not fit, or, in detection, if none or several do, or if layers lack their
    keys, their values or each other: what a careful user would want to know, and may overrule by naming the layout.
    """
    split = Split(heads, head_dim)
    if layout is not None:
        chosen = find_layout(layout)
        check_fit(source, chosen, declared=layout not in LAYOUTS)
        return _map(source, chosen, split)
    chosen = _detect(source, split)
    cache_map = _map(source, chosen, split)
    check_whole(source, chosen, cache_map)
    return cache_map


def _detect(source: TensorSource, split: Split) -> Layout:
    """The only layout that fits. Raises ``UsageError`` with the candidates if there are several, or none."""
    fits: list[Layout] = [layout for module in _MODULES for layout in module.detect(source)]
    if len(fits) > 1:
        fits = [la for la in fits if not any(split.contradicts(grid) for _, grid in la.fitting(source))] or fits
    if len(fits) == 1:
        return fits[0]
    unknown = like_kv(source)
    if fits:
        raise UsageError(
            f"{source.name}: several layouts fit {names(unknown)}; pass one of\n{_listed(fits)}",
            code="layout-ambiguous",
        )
    if not unknown:
        return NONE
    possible = [layout for layout in LAYOUTS.values() if _could_be(layout, unknown[0])]
    raise UsageError(
        f"{source.name}: no known layout has tensors such as {unknown[0]}; declare their axes, "
        f"--layout 'L,kv,T,H,D' for example, or pass one of\n{_listed([*possible, NONE])}",
        code="layout-undetected",
    )


def _listed(layouts: Iterable[Layout]) -> str:
    rows = [(layout.name, ",".join(layout.clauses[0].axes) if layout.clauses else "", layout) for layout in layouts]
    return "\n".join(f"  --layout {name}   {axes + ': ' if axes else ''}{la.summary}" for name, axes, la in rows)


def _could_be(layout: Layout, tensor: TensorInfo) -> bool:
    return any(clause.pattern == "*" and not misfit(tensor, clause.axes) for clause in layout.clauses)


def _map(source: TensorSource, layout: Layout, split: Split) -> CacheMap:
    roles, notices = layout.roles(source, split)
    roles = _number_sequences(source, roles)
    pairs = list(zip(source.tensors, roles, strict=True))
    kv_like = {tensor.label for tensor in like_kv(source)}
    left = [tensor for tensor, role in pairs if role is None and tensor.label in kv_like]
    if left and layout is not NONE and not layout.partial:
        notices.append(f"no part of the layout {layout.name}, stored losslessly: {names(left)}")
    if not any(roles):
        notices.append(f"{source.name}: no keys and values found, everything is stored losslessly")
    flat = [tensor for tensor, role in pairs if role and role.axes[-1] in ("C", "2C") and role.heads == 1]
    if flat and split == Split():
        notices.append(f"the channels of {names(flat)} count as one head; pass --heads to split them")
    return CacheMap.build(layout.name, source.tensors, roles, notices)


def _number_sequences(source: TensorSource, roles: Sequence[Role | None]) -> list[Role | None]:
    """Give files that each hold a whole cache (LMCache's chunks) a sequence each; anything else twice is an error."""
    pairs = [(tensor, role) for tensor, role in zip(source.tensors, roles, strict=True) if role]
    whole = len({tensor.file for tensor, _ in pairs}) == len(pairs) > 1 and all("L" in role.axes for _, role in pairs)
    numbers = {tensor.file: number for number, (tensor, _) in enumerate(pairs)} if whole else {}
    seen: dict[tuple[int, str | None, int], TensorInfo] = {}
    for tensor, role in pairs:
        key = (role.layer, role.kind, numbers.get(tensor.file, 0))
        if key in seen:
            raise UsageError(
                f"{source.name}: {seen[key].label} and {tensor.label} both hold {role.kind or 'keys and values'} of "
                f"layer {role.layer}; point at one cache of several, or declare a layout that tells them apart",
                code="layout-twice",
            )
        seen[key] = tensor
    return [
        role and replace(role, sequence=numbers.get(tensor.file, 0) * _batch(tensor, role))
        for tensor, role in zip(source.tensors, roles, strict=True)
    ]


def _batch(tensor: TensorInfo, role: Role) -> int:
    return tensor.shape[role.axes.index("B")] if "B" in role.axes else 1
