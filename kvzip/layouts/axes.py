"""The axes of a tensor, as a declaration spells them: ``L,kv,T,H,D``.

====== ========================================================================
L      layers
kv     keys, then values (size 2)
B      sequences of a batch
T      tokens
N, b   tokens in blocks: number of blocks, tokens of a block
H      KV heads
D      channels of a head
C      channels of all heads, H * D
2D, 2C keys and values side by side in the last axis
A      an MLA latent: no keys and values, one vector a token
1      an axis of size one
====== ========================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from kvzip.errors import UsageError

Axes = tuple[str, ...]

AXES = ("L", "kv", "B", "T", "N", "b", "H", "D", "C", "2D", "2C", "A", "1")
PLANE_AXES = ("L", "kv", "B", "1")
CHANNEL_AXES = ("D", "C", "2D", "2C", "A")


def parse_axes(text: str) -> Axes:
    """The axes of a declaration such as ``"L,kv,T,H,D"``. Raises ``UsageError`` for what describes no cache."""
    axes = tuple(word.strip() for word in text.split(","))
    unknown = [word for word in axes if word not in AXES]
    if unknown:
        raise UsageError(
            f"layout {text!r}: unknown axis {unknown[0]!r}; known are {', '.join(AXES)}", code="layout-axes"
        )
    problem = _problem(axes)
    if problem:
        raise UsageError(f"layout {text!r} {problem}", code="layout-axes")
    return axes


def _problem(axes: Axes) -> str:
    counts = {axis: axes.count(axis) for axis in AXES}
    if any(count > 1 for axis, count in counts.items() if axis != "1"):
        return "names an axis twice"
    if (counts["T"], counts["N"], counts["b"]) not in ((1, 0, 0), (0, 1, 1)):
        return "needs one token axis T, or the two axes N and b of token blocks"
    channels = [axis for axis in axes if axis in CHANNEL_AXES]
    if len(channels) != 1:
        return f"needs exactly one of the axes {', '.join(CHANNEL_AXES)}"
    if channels[0] not in ("D", "2D") and counts["H"]:
        return f"has heads in {channels[0]} already: H does not go with it"
    if counts["kv"] and channels[0] in ("2D", "2C", "A"):
        return f"says kv twice: {channels[0]} holds no separate keys and values"
    return ""


@dataclass(frozen=True)
class Grid:
    """The sizes of a tensor's axes, and what follows from them.

    A *body* is what remains when the leading L, kv, B and 1 are taken off: each of their combinations (an *outer
    index*) is one contiguous piece of the tensor. In the body, adjacent N and b count as one T.
    """

    axes: Axes
    shape: tuple[int, ...]

    def size(self, axis: str) -> int:
        """The size of an axis, 1 if it is absent."""
        return self.shape[self.axes.index(axis)] if axis in self.axes else 1

    @property
    def tokens(self) -> int:
        return self.size("T") * self.size("N") * self.size("b")

    @cached_property
    def channel_axis(self) -> str:
        return next(axis for axis in self.axes if axis in CHANNEL_AXES)

    @property
    def channels(self) -> int:
        """Channels of one plane."""
        width = self.size(self.channel_axis) * self.size("H")
        return width // 2 if self.fused else width

    @cached_property
    def fused(self) -> bool:
        """Whether keys and values share the channel axis."""
        return self.channel_axis in ("2D", "2C")

    @property
    def kinds(self) -> int:
        """2 if the tensor holds keys and values, 1 if one of them."""
        return 2 if self.fused else self.size("kv")

    @property
    def plane_count(self) -> int:
        """Planes of the whole tensor."""
        return self.size("L") * self.size("B") * self.kinds

    @cached_property
    def lead(self) -> int:
        """How many axes come before the body."""
        return next(number for number, axis in enumerate(self.axes) if axis not in PLANE_AXES)

    @cached_property
    def outers(self) -> int:
        return prod(self.shape[: self.lead])

    @cached_property
    def body(self) -> tuple[tuple[str, int], ...]:
        """Axes and sizes of the body, outermost first."""
        pairs = list(zip(self.axes[self.lead :], self.shape[self.lead :], strict=True))
        names = [axis for axis, _ in pairs]
        if "N" in names and names.index("b") == names.index("N") + 1:
            at = names.index("N")
            pairs[at : at + 2] = [("T", pairs[at][1] * pairs[at + 1][1])]
        return tuple(pairs)

    @cached_property
    def unit(self) -> int:
        """Tokens that cannot be told apart by cutting the body's token axis: 1, or those of a block."""
        return self.size("b") if any(axis == "N" for axis, _ in self.body) else 1

    @cached_property
    def affine(self) -> bool:
        """Whether a plane's view is affine in tokens and heads, with contiguous channels."""
        return self.unit == 1 and all(axis != "N" for axis, _ in self.body) and self.axes[-1] in CHANNEL_AXES

    def misfit(self) -> str:
        """Why the axes cannot be those of the shape, or ``""``."""
        if len(self.axes) != len(self.shape):
            return f"{','.join(self.axes)} has {len(self.axes)} axes, the tensor {len(self.shape)}"
        if "kv" in self.axes and self.size("kv") != 2:
            return f"axis kv must have size 2, not {self.size('kv')}"
        if any(axis == "1" and size != 1 for axis, size in zip(self.axes, self.shape, strict=True)):
            return "an axis declared as 1 has another size"
        if self.fused and self.size(self.channel_axis) % 2:
            return f"axis {self.channel_axis} must be even, not {self.size(self.channel_axis)}"
        return ""


def spell(axes: Iterable[str]) -> str:
    """The declaration of some axes."""
    return ",".join(axes)
