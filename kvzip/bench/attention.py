"""What errors of keys and values do to attention: its logits and its output, for queries real or drawn.

Errors of keys hardly tell what they do: an error that is the same for all tokens moves all logits of a query alike, and
the softmax does not see it. So logits are compared with their mean over the tokens removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvzip.bench.sample import Sample
from kvzip.cache import Plane
from kvzip.errors import UsageError
from kvzip.tensorfile import open_tensors

COUNT = 16
"""Queries drawn per KV head."""

LOGIT_SPREAD = 2.5
"""Standard deviation over the tokens of a drawn query's logits, nats: what SmolLM2's own queries have (2.5 to 2.8)."""

PRODUCT = 1 << 17
"""Multiplications in one product of matrices; OpenBLAS keeps up to twice as many on one thread."""

QUERY_NAME = re.compile(r"layers\.(\d{1,6})\.query")

Place = tuple[int, int]
"""Layer and sequence."""


@dataclass(frozen=True)
class Queries:
    """Queries by layer and sequence, float64 ``[kv_heads, queries, head_dim]``, and a word on where they come from."""

    source: str
    arrays: Mapping[Place, np.ndarray]


@dataclass(frozen=True, slots=True)
class AttentionErrors:
    """Of one layer: ``|x - y| / |x|`` over all queries and heads, of the logits (mean over the tokens removed) and of
    the attention output; ``output`` is 0 where the cache has no values.
    """

    layer: int
    sequence: int
    logits: float
    output: float


def draw_queries(sample: Sample, count: int = COUNT, seed: int = 0) -> Queries:
    """Normally distributed queries with the covariance of each head's keys, scaled to :data:`LOGIT_SPREAD`.

    Equal caches give equal queries. Their mean is zero, not the keys': that would make errors that grow with a key's
    offset, as those of fp8, weigh twice what they do to SmolLM2's own queries.
    """
    rng = np.random.default_rng(seed)
    arrays: dict[Place, np.ndarray] = {}
    for place, key, _ in _pairs(sample):
        heads = []
        for head in range(key.heads):
            keys = _finite(sample.arrays[key.index][:, head])
            centred = keys - keys.mean(axis=0)
            # Mixing the keys themselves needs no square root of their covariance, and takes any number of them.
            queries = _mixed(rng.standard_normal((count, len(keys))), centred) / np.sqrt(len(keys))
            spread = _logits(queries, centred).std(axis=1, keepdims=True)
            heads.append(queries * (LOGIT_SPREAD / np.where(spread > 0, spread, LOGIT_SPREAD)))
        arrays[place] = np.stack(heads)
    return Queries("drawn to match the keys' covariance", arrays)


def read_queries(path: str | Path, sample: Sample) -> Queries:
    """Real queries from a safetensors file: ``layers.{i}.query``, ``[query_heads, queries, head_dim]``, after RoPE.

    Query heads are split evenly over the KV heads, in order, as in grouped-query attention. Raises ``UsageError`` for
    a layer that is missing or of another shape.
    """
    with open_tensors(path) as source:
        named = {}
        for tensor in source.tensors:
            if QUERY_NAME.fullmatch(tensor.name):
                data = np.empty(tensor.nbytes, np.uint8)
                source.read_into(tensor.file, tensor.offset, data)
                named[tensor.name] = data.view(tensor.dtype).reshape(tensor.shape)
    return share_queries(named, sample, f"from {path}")


def share_queries(named: Mapping[str, np.ndarray], sample: Sample, source: str) -> Queries:
    """Queries by name, as :func:`read_queries` finds them in a file, given to the KV heads of a sample."""
    arrays: dict[Place, np.ndarray] = {}
    for (layer, sequence), key, _ in _pairs(sample):
        name = f"layers.{layer}.query"
        if name not in named:
            raise UsageError(f"queries {source}: no {name}, and the cache has a layer {layer}", code="no-queries")
        found = named[name]
        if found.ndim != 3 or not found.size or found.shape[0] % key.heads or found.shape[2] != key.head_dim:
            raise UsageError(
                f"queries {source}: {name} is {list(found.shape)}; expected [query heads, queries, {key.head_dim}] "
                f"with a multiple of {key.heads} heads",
                code="query-shape",
            )
        arrays[layer, sequence] = found.astype(np.float64).reshape(key.heads, -1, key.head_dim)
    return Queries(source, arrays)


def attention_errors(sample: Sample, restored: Sequence[np.ndarray], queries: Queries) -> list[AttentionErrors]:
    """The errors of every layer, in double precision; every query sees all tokens.

    Args:
        restored: arrays ``[tokens, heads, head_dim]`` in the order of ``sample.arrays``.
    """
    found = []
    for (layer, sequence), key, value in _pairs(sample):
        sums = np.zeros(4)
        for head, head_queries in enumerate(queries.arrays[layer, sequence]):
            keys, values = (
                [arrays[plane.index][:, head] for arrays in (sample.arrays, restored)] if plane else []
                for plane in (key, value)
            )
            sums += _head_sums(head_queries, keys, values)
        found.append(AttentionErrors(layer, sequence, _relative(*sums[:2]), _relative(*sums[2:])))
    return found


def _pairs(sample: Sample) -> Iterator[tuple[Place, Plane, Plane | None]]:
    """What queries meet and what they fetch, by layer and sequence. A latent counts as both, whole."""
    planes = {(plane.layer, plane.sequence, plane.kind): plane for plane in sample.planes}
    for (layer, sequence, kind), plane in planes.items():
        if kind == "latent":
            yield (layer, sequence), plane, plane
        elif kind == "key":
            value = planes.get((layer, sequence, "value"))
            fits = value is not None and (value.tokens, value.heads) == (plane.tokens, plane.heads)
            yield (layer, sequence), plane, value if fits else None


def _head_sums(
    queries: np.ndarray, keys: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> tuple[float, float, float, float]:
    """Squared error and energy of the logits, then of the output, of one head; original first in each pair.

    Without values the output is none, and so is its error.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        logits = [_logits(queries, key) for key in keys]
        centred = [each - each.mean(axis=1, keepdims=True) for each in logits]
        outputs = [_mixed(_softmax(each), value) for each, value in zip(centred, values, strict=False)]
        return (*_error_and_energy(*centred), *(_error_and_energy(*outputs) if outputs else (0.0, 0.0)))


def _logits(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """``[queries, tokens]`` of ``[queries, head_dim]`` and ``[tokens, head_dim]``."""
    parts = [queries @ keys[piece].astype(np.float64).T for piece in _pieces(queries, keys)]
    return np.asarray(np.concatenate(parts, axis=1) / np.sqrt(queries.shape[1]))


def _mixed(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``[queries, head_dim]``: the sums of ``values`` ``[tokens, head_dim]``, each with the weights of a query."""
    total = np.zeros((len(weights), values.shape[1]))
    for piece in _pieces(weights, values):
        total += weights[:, piece] @ values[piece].astype(np.float64)
    return total


def _pieces(queries: np.ndarray, tokens: np.ndarray) -> Iterator[slice]:
    """Runs of tokens that make small products of matrices: for larger ones BLAS wakes threads, which wait in loops."""
    step = max(1, PRODUCT // (len(queries) * tokens.shape[1]))
    yield from (slice(start, start + step) for start in range(0, len(tokens), step))


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _error_and_energy(original: np.ndarray, restored: np.ndarray) -> tuple[float, float]:
    return float(np.square(restored - original).sum()), float(np.square(original).sum())


def _relative(squared_error: float, energy: float) -> float:
    """As for planes; what is not finite counts as infinite."""
    error = np.sqrt(squared_error / energy) if energy else np.sqrt(squared_error)
    return float(error) if np.isfinite(error) else float("inf")


def _finite(array: np.ndarray) -> np.ndarray:
    keys = array.astype(np.float64)
    return np.where(np.isfinite(keys), keys, 0.0)
