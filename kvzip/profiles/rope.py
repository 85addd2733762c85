"""Rotary position embedding as files and configurations describe it (Su et al., arXiv:2104.09864).

Keys are cached after the rotation. Undone, they compress far better: a channel keeps its mean and spread. The angles
are part of the format, so all of it is made of decimal arithmetic and of operations that IEEE 754 fixes: the same on
every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from decimal import Context, Decimal
from typing import Any, Self

import numpy as np

from kvzip.errors import UsageError

_CONTEXT = Context(prec=40)
_PI = Decimal("3.14159265358979323846264338327950288419717")


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a context is stretched: transformers' ``rope_scaling``, whose names the fields keep.

    ``kind`` is ``linear``, ``dynamic``, ``llama3``, ``yarn`` or ``longrope``. ``original`` is the number of positions
    that the model was first trained for, ``short`` and ``long`` are longrope's factors per frequency.
    """

    kind: str
    factor: float = 1.0
    original: int = 8192
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise UsageError(f"RoPE scaling {self.kind!r}: known are {', '.join(self.KINDS)}", code="rope-scaling")
        if not (math.isfinite(self.factor) and self.factor > 0 and self.original > 0):
            raise UsageError(
                f"RoPE scaling {self.kind}: factor and original length must be positive", code="rope-scaling"
            )
        if self.kind == "llama3" and not self.low < self.high:
            raise UsageError(
                "RoPE scaling llama3: the low frequency factor must be below the high", code="rope-scaling"
            )


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of one layer's keys.

    Args:
        theta: base of the frequencies.
        rotary: channels of a head that turn; None for all that remain from ``offset`` on.
        offset: first of them (MLA latents turn their last 64).
        interleaved: pairs are neighbours (2i, 2i + 1), not half a rotary width apart.
        scaling: how the context was stretched.
        start: position of the first token, for a chunk from the middle of a prompt.

    Raises:
        UsageError: numbers that describe no rotation.
    """

    theta: float
    rotary: int | None = None
    offset: int = 0
    interleaved: bool = False
    scaling: Scaling | None = None
    start: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise UsageError(f"RoPE theta must be a number above 1, got {self.theta}", code="rope-theta")
        if self.offset < 0 or self.start < 0 or (self.rotary is not None and (self.rotary < 2 or self.rotary % 2)):
            raise UsageError(
                f"RoPE: rotary width {self.rotary}, offset {self.offset}, start {self.start}: the width must be even, "
                "nothing negative",
                code="rope-shape",
            )

    def width(self, head_dim: int) -> int:
        """Channels that turn in heads of ``head_dim``; raises ``UsageError`` where they do not fit."""
        width = self.rotary if self.rotary is not None else (head_dim - self.offset) // 2 * 2
        if width < 2 or self.offset + width > head_dim:
            raise UsageError(
                f"RoPE turns channels {self.offset} to {self.offset + width}, but heads have {head_dim}: "
                "give the rotary width that the model has",
                code="rope-shape",
            )
        return width

    def pairs(self, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Channels of a head that turn together: two int arrays ``[rotary / 2]``."""
        width = self.width(head_dim)
        if self.interleaved:
            first = np.arange(self.offset, self.offset + width, 2)
            return first, first + 1
        first = np.arange(self.offset, self.offset + width // 2)
        return first, first + width // 2

    def frequencies(self, head_dim: int, tokens: int = 0) -> np.ndarray:
        """Radians a position, float64 ``[rotary / 2]``. ``tokens``, of the whole prompt, matter to dynamic scalings."""
        width = self.width(head_dim)
        theta = Decimal(self.theta)
        scaling = self.scaling
        if scaling and scaling.kind == "dynamic" and tokens > scaling.original:
            stretch = Decimal(scaling.factor) * tokens / scaling.original - (Decimal(scaling.factor) - 1)
            theta *= _CONTEXT.power(stretch, Decimal(width) / (width - 2)) if width > 2 else stretch
        log_theta = _CONTEXT.ln(theta)
        plain = [_CONTEXT.exp(-log_theta * 2 * i / width) for i in range(width // 2)]
        if scaling is None or scaling.kind == "dynamic":
            return np.array([float(f) for f in plain])
        return np.array([float(f) for f in _stretched(plain, scaling, log_theta, width, tokens)])

    def to_json(self) -> dict[str, Any]:
        """What differs from the defaults; :meth:`from_json` takes it back."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if self.scaling is not None:
            default = Scaling(self.scaling.kind)
            own = {key: value for key, value in asdict(self.scaling).items() if value != getattr(default, key)}
            values["scaling"] = {"kind": self.scaling.kind, **own}
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Raises ``UsageError`` for unknown or missing names."""
        try:
            scaling = values.get("scaling")
            if scaling is not None:
                lists = {key: tuple(map(float, scaling[key])) for key in ("short", "long") if key in scaling}
                scaling = Scaling(**{**scaling, **lists})
            return cls(**{**values, "scaling": scaling})
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"RoPE description {dict(values)}: {error}", code="rope-description") from error


def _stretched(plain: list[Decimal], scaling: Scaling, log_theta: Decimal, width: int, tokens: int) -> list[Decimal]:
    factor = Decimal(scaling.factor)
    if scaling.kind == "linear":
        return [f / factor for f in plain]
    if scaling.kind == "longrope":
        factors = scaling.long if tokens > scaling.original else scaling.short
        if len(factors) != len(plain):
            raise UsageError(
                f"RoPE scaling longrope has {len(factors)} factors, the keys have {len(plain)} frequencies",
                code="rope-scaling",
            )
        return [f / Decimal(own) for f, own in zip(plain, factors, strict=True)]
    if scaling.kind == "llama3":
        low, high = Decimal(scaling.low), Decimal(scaling.high)
        turns = [scaling.original * f / (2 * _PI) for f in plain]
        shares = [min(max((turn - low) / (high - low), Decimal(0)), Decimal(1)) for turn in turns]
    else:
        # yarn (Peng et al., arXiv:2309.00071): a ramp over the indexes of the frequencies between two numbers of turns.
        def index(turns: float) -> Decimal:
            return width * _CONTEXT.ln(scaling.original / (Decimal(turns) * 2 * _PI)) / (2 * log_theta)

        first, last = index(scaling.fast), index(scaling.slow)
        if scaling.truncate:
            first, last = Decimal(math.floor(first)), Decimal(math.ceil(last))
        first, last = max(first, Decimal(0)), min(last, Decimal(width - 1))
        span = last - first if last != first else Decimal("0.001")
        shares = [1 - min(max((i - first) / span, Decimal(0)), Decimal(1)) for i in range(len(plain))]
    return [f * share + f / factor * (1 - share) for f, share in zip(plain, shares, strict=True)]


# pi / 2 in two parts: the first has 33 bits, so that its product with a whole number below 2^20 is exact.
_HALF_PI_HIGH = 1.5707963267341256
_HALF_PI_LOW = 6.077100506506192e-11
_SIN = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(8)]
_COS = [(-1.0) ** k / math.factorial(2 * k) for k in range(9)]


def cos_sin(frequencies: np.ndarray, start: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of ``position * frequency``: float32 ``[tokens, n]`` each.

    By Taylor series on [-pi/4, pi/4] in float64, sums and products only: the functions of libraries differ in bits.
    """
    angle = (np.arange(tokens, dtype=np.float64) + start)[:, None] * frequencies
    quarter = np.rint(angle * (2 / math.pi))
    x = (angle - quarter * _HALF_PI_HIGH) - quarter * _HALF_PI_LOW
    square = x * x
    sin, cos = x * _horner(square, _SIN), _horner(square, _COS)
    turn = quarter.astype(np.int64) & 3
    odd = (turn & 1).astype(bool)
    sin, cos = np.where(odd, cos, sin), np.where(odd, sin, cos)
    cos = np.where((turn == 1) | (turn == 2), -cos, cos)
    sin = np.where(turn >= 2, -sin, sin)
    return cos.astype(np.float32), sin.astype(np.float32)


def _horner(x: np.ndarray, coefficients: list[float]) -> np.ndarray:
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def rotate(keys: np.ndarray, rope: Rope, *, inverse: bool = False, tokens: int = 0, first: int = 0) -> np.ndarray:
    """Turn keys ``[T, heads, head_dim]``, or back; float32. ``first`` is the index of the first token in its cache."""
    out = keys.astype(np.float32)
    a, b = rope.pairs(keys.shape[-1])
    frequencies = rope.frequencies(keys.shape[-1], tokens or len(keys))
    cos, sin = (table[:, None, :] for table in cos_sin(frequencies, rope.start + first, len(keys)))
    x, y = out[..., a], out[..., b]
    if inverse:
        sin = -sin
    out[..., a] = x * cos - y * sin
    out[..., b] = y * cos + x * sin
    return out
