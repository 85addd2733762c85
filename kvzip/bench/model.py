"""Model quality: a language model goes on from the original cache, and from what a codec made of it.

Needs the extra ``eval``; see :mod:`kvzip.evaluation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvzip.bench.attention import COUNT, Queries, share_queries
from kvzip.bench.sample import Sample
from kvzip.cache import Plane
from kvzip.errors import UsageError
from kvzip.evaluation import LanguageModel, Quality, compare

PREFIX = 1024
"""Tokens of a text that become the cache."""

POSITIONS = 384
"""Tokens after the cache on which predictions are compared, at most; and :data:`LEAST` at least."""
LEAST = 16

CONFIDENCE = 1.96
"""Standard errors to either side that hold 95 % of a normal distribution."""


class Continuation:
    """The predictions of a model for the tokens after a cache, to compare others with.

    Args:
        ids: int64, the tokens of the cache and those that follow it.
        positions: how many of those that follow are used, at most.

    Raises:
        UsageError: too few tokens follow, or the cache is not of this model's shape.
    """

    def __init__(self, model: LanguageModel, sample: Sample, ids: np.ndarray, positions: int = POSITIONS) -> None:
        self.model = model
        self._ids = ids[sample.tokens : sample.tokens + positions + 1]
        if len(self._ids) < LEAST + 1:
            raise UsageError(
                f"{max(0, len(ids) - sample.tokens)} tokens are known after the {sample.tokens} of the cache; at least "
                f"{LEAST + 1} are needed to measure what the model makes of them",
                code="too-few-tokens",
            )
        self._original = model.log_probabilities(_named(sample, sample.arrays), self._ids[:-1])

    def judge(self, sample: Sample, restored: Sequence[np.ndarray]) -> Quality:
        """What the model predicts from restored arrays, in the order of ``sample.arrays``."""
        predicted = self.model.log_probabilities(_named(sample, restored), self._ids[:-1])
        return compare(self._original, predicted, self._ids[1:])

    def queries(self, sample: Sample, count: int = COUNT) -> Queries:
        """The model's own queries at the first tokens after the cache."""
        named = self.model.queries(_named(sample, sample.arrays), self._ids[:count])
        return share_queries(named, sample, f"of the model {self.model.name}")


def sample_of_text(model: LanguageModel, path: str | Path, prefix: int = PREFIX) -> tuple[Sample, np.ndarray]:
    """The bfloat16 cache of the first tokens of a text, and all token ids of cache and continuation.

    Raises ``UsageError`` if the text is too short for both.
    """
    ids = model.tokenize(Path(path).read_text(errors="replace"))[: prefix + POSITIONS + 1]
    tokens = min(prefix, len(ids) - LEAST - 1)
    if tokens < 2:
        raise UsageError(f"{path}: {len(ids)} tokens; at least {LEAST + 3} are needed", code="too-few-tokens")
    planes: list[Plane] = []
    arrays: list[np.ndarray] = []
    for name, tensor in model.prefill(ids[:tokens]).items():
        _, layer, kind = name.split(".")
        array = np.ascontiguousarray(tensor.numpy().astype(ml_dtypes.bfloat16))
        heads, _, head_dim = array.shape
        planes.append(
            Plane(
                len(planes), int(layer), "key" if kind == "key" else "value", tokens, heads, head_dim, array.dtype.name
            )
        )
        arrays.append(array.transpose(1, 0, 2))
    buffers = tuple(array.transpose(1, 0, 2).reshape(-1).view(np.uint8) for array in arrays)
    return Sample(tuple(planes), tuple(arrays), buffers), ids


def _named(sample: Sample, arrays: Sequence[np.ndarray]) -> dict[str, Any]:
    """Arrays by the names that models know, ``[heads, tokens, head_dim]``."""
    if any(plane.sequence for plane in sample.planes):
        raise UsageError("the cache holds several sequences; a model can only continue one", code="model-mismatch")
    return {
        f"layers.{plane.layer}.{plane.kind}": array.transpose(1, 0, 2)
        for plane, array in zip(sample.planes, arrays, strict=True)
    }
