"""Layouts as declarations: which names, along which axes.

A declaration is ``PATTERN=AXES``, several of them joined by ``;``, or just ``AXES`` for tensors of any name::

    L,kv,T,H,D
    layers.{L}.{kv}=H,T,D
    cache_k_{L}=T,H,D;cache_v_{L}=T,H,D

In a pattern ``*`` stands for anything, ``{L}`` for the layer's number, ``{kv}`` for the usual words for keys and
values (k, key, keys, key_cache, key_states and the like) and ``{a|b}`` for the words a and b in their place. In a
folder a pattern may also match path and name together: ``*layers.{L}.*/kv_cache``. Of several clauses that match a
name, the first whose axes fit the tensor counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from kvzip.cache import Kind
from kvzip.errors import UsageError
from kvzip.layouts.axes import Axes, Grid, parse_axes, spell
from kvzip.layouts.slabs import Role, misfit
from kvzip.tensorfile import TensorInfo, TensorSource

_FIELD = re.compile(r"\*|\{L\}|\{kv\}|\{[^{}|]+\|[^{}|]+\}")
_WORDS = {
    "*": ".*",
    "{L}": r"(?P<layer>\d{1,9})",
    "{kv}": r"(?:(?P<key>[kK](?:eys?)?(?:_cache|_states?)?)|(?P<value>[vV](?:alues?)?(?:_cache|_states?)?))",
}
_LAYER_IN_NAME = re.compile(r"(?:layers?|blocks?)[._/-]?(\d{1,9})")
_KEY_IN_NAME = re.compile(r"(?<![a-z])k(?:eys?)?(?![a-z])")
_VALUE_IN_NAME = re.compile(r"(?<![a-z])v(?:alues?)?(?![a-z])")


@dataclass(frozen=True)
class Clause:
    """Tensors whose name matches ``pattern`` have ``axes``."""

    pattern: str
    axes: Axes

    def match(self, tensor: TensorInfo) -> re.Match[str] | None:
        return _match(self.pattern, tensor.label) or _match(self.pattern, tensor.name)

    def __str__(self) -> str:
        return spell(self.axes) if self.pattern == "*" else f"{self.pattern}={spell(self.axes)}"


@lru_cache
def _regex(pattern: str) -> re.Pattern[str]:
    parts, position = [], 0
    for found in _FIELD.finditer(pattern):
        parts.append(re.escape(pattern[position : found.start()]))
        parts.append(_WORDS.get(found[0]) or _words(found[0]))
        position = found.end()
    parts.append(re.escape(pattern[position:]))
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error as error:
        raise UsageError(f"layout pattern {pattern!r}: a field appears twice", code="layout-pattern") from error


@lru_cache(1 << 14)  # many clauses share a pattern, and every layout is tried on every name
def _match(pattern: str, name: str) -> re.Match[str] | None:
    return _regex(pattern).fullmatch(name)


def _words(field: str) -> str:
    key, value = field[1:-1].split("|")
    return f"(?:(?P<key>{re.escape(key)})|(?P<value>{re.escape(value)}))"


@dataclass(frozen=True)
class Layout:
    """A layout: a name, one line on whose it is, and its clauses."""

    name: str
    summary: str
    clauses: tuple[Clause, ...]
    partial: ClassVar[bool] = False
    """Whether the file itself tells which layers are no KV, so that their absence is no surprise."""

    @classmethod
    def of(cls, name: str, summary: str, *declarations: str) -> Layout:
        return cls(name, summary, tuple(clause for text in declarations for clause in parse_clauses(text)))

    def __str__(self) -> str:
        return ";".join(map(str, self.clauses))

    def clause_of(self, tensor: TensorInfo) -> Clause | None:
        """The first clause that matches the tensor's name and fits its shape and dtype."""
        return next((c for c in self.clauses if c.match(tensor) and not misfit(tensor, c.axes)), None)

    def fitting(self, source: TensorSource) -> list[tuple[TensorInfo, Grid]]:
        """The tensors that the layout takes as keys and values, with their axes."""
        found = [(tensor, self.clause_of(tensor)) for tensor in source.tensors]
        return [(tensor, Grid(clause.axes, tensor.shape)) for tensor, clause in found if clause]

    def roles(self, source: TensorSource, split: Split) -> tuple[list[Role | None], list[str]]:
        """The role of every tensor of the source (None: it passes through), and notices."""
        return [self._role(tensor, split) for tensor in source.tensors], []

    def _role(self, tensor: TensorInfo, split: Split) -> Role | None:
        clause = self.clause_of(tensor)
        if clause is None:
            return None
        found = clause.match(tensor)
        assert found is not None
        words = found.groupdict()
        grid = Grid(clause.axes, tensor.shape)
        layer = 0 if "L" in clause.axes else int(words.get("layer") or _layer_in(tensor))
        kind: Kind | None = None
        if grid.channel_axis == "A":
            kind = "latent"
        elif grid.kinds == 1:
            kind = "key" if words.get("key") else "value" if words.get("value") else _kind_in(tensor)
        return Role(clause.axes, layer, kind, split.heads_of(tensor, grid))


@dataclass(frozen=True, slots=True)
class Split:
    """What the user says of the heads, or of the channels of one: it splits C axes and checks H and D axes."""

    heads: int | None = None
    head_dim: int | None = None

    def __str__(self) -> str:
        """As the user says it."""
        given = {"--heads": self.heads, "--head-dim": self.head_dim}
        return " ".join(f"{option} {number}" for option, number in given.items() if number is not None)

    def contradicts(self, grid: Grid) -> bool:
        width = grid.size("D") * grid.size("2D") // (2 if grid.channel_axis == "2D" else 1)
        return "H" in grid.axes and (self.heads not in (None, grid.size("H")) or self.head_dim not in (None, width))

    def heads_of(self, tensor: TensorInfo, grid: Grid) -> int:
        """Heads of a tensor without an H axis. Raises ``UsageError`` where the user's numbers do not fit."""
        if self.contradicts(grid):
            raise UsageError(
                f"tensor {tensor}: the layout {spell(grid.axes)} has {grid.size('H')} heads, not {self}",
                code="layout-heads",
            )
        if grid.channel_axis not in ("C", "2C"):
            return 1
        heads = self.heads or grid.channels // (self.head_dim or grid.channels)
        if grid.channels != heads * (self.head_dim or grid.channels // max(heads, 1)):
            raise UsageError(
                f"tensor {tensor}: {grid.channels} channels are not {self}",
                code="layout-heads",
            )
        return heads


def parse_clauses(text: str) -> tuple[Clause, ...]:
    """The clauses of a declaration. Raises ``UsageError``."""
    clauses = []
    for part in text.split(";"):
        pattern, equals, axes = part.strip().rpartition("=")
        clauses.append(Clause(pattern if equals else "*", parse_axes(axes)))
    return tuple(clauses)


def names(tensors: Iterable[TensorInfo], limit: int = 3) -> str:
    """The first few tensors of a message."""
    labels = [tensor.label for tensor in tensors]
    more = f" and {len(labels) - limit} more" if len(labels) > limit else ""
    return ", ".join(labels[:limit]) + more


def layers_text(layers: Sequence[int]) -> str:
    """``3, 5-9, 11``."""
    present = set(layers)
    starts = sorted(layer for layer in present if layer - 1 not in present)
    stops = sorted(layer for layer in present if layer + 1 not in present)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True))


def _layer_in(tensor: TensorInfo) -> int:
    found = _LAYER_IN_NAME.findall(tensor.label) or re.findall(r"\d{1,9}", tensor.name) or ["0"]
    return int(found[-1])


def _kind_in(tensor: TensorInfo) -> Kind:
    name = tensor.name.lower()
    is_key, is_value = bool(_KEY_IN_NAME.search(name)), bool(_VALUE_IN_NAME.search(name))
    if is_key == is_value:
        raise UsageError(
            f"tensor {tensor}: its name does not say whether it holds keys or values; declare a pattern, "
            "such as 'layers.{L}.{kv}=H,T,D', or with your own words, 'layers.{L}.{ks|vs}=H,T,D'",
            code="layout-kind",
        )
    return "key" if is_key else "value"
