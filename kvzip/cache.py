"""The vocabulary of a KV cache: planes, blocks, and the geometry that names them.

A *plane* is one layer's keys, one layer's values or one layer's MLA latents: ``[tokens, heads, head_dim]``. A *block*
is a run of tokens of one plane, or of a few neighbouring planes for codecs that span layers: what one frame holds and
what can be read back alone. Tensors that are no KV travel as planes of kind ``"bytes"``: ``[n_bytes, 1, 1]`` of uint8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
import numpy as np

Kind = Literal["key", "value", "latent", "bytes"]

BLOCK_TOKENS = 1024
"""Tokens in a full block: the unit of statistics and of random access."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer's keys or values: ``tokens x heads x head_dim`` numbers of ``dtype`` (a numpy or ml_dtypes name).

    ``index`` is the plane's position in its cache, in file order; ``sequence`` tells apart the items of a batched file.
    """

    index: int
    layer: int
    kind: Kind
    tokens: int
    heads: int
    head_dim: int
    dtype: str
    sequence: int = 0

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return self.tokens * self.channels * self.itemsize

    def __str__(self) -> str:
        return f"layer {self.layer} {self.kind}"


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens ``start:stop`` of ``planes``: one plane, or a group of planes of equal token count."""

    planes: tuple[Plane, ...]
    start: int
    stop: int

    @property
    def plane(self) -> Plane:
        """The only plane of a single-plane block."""
        (plane,) = self.planes
        return plane

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return sum(self.tokens * plane.channels * plane.itemsize for plane in self.planes)


def blocks_of(planes: tuple[Plane, ...], block_tokens: int = BLOCK_TOKENS) -> Iterator[Block]:
    """The blocks that cover a group of planes, oldest tokens first."""
    tokens = planes[0].tokens
    for start in range(0, tokens, block_tokens):
        yield Block(planes, start, min(start + block_tokens, tokens))
