"""kvtc: transform coding of KV caches, in plain numpy, as docs/kvtc.md describes it.

A block is a run of tokens of one plane (identity basis) or of the keys and values of a few layers (trained basis). Keys
are un-rotated. What is left is scaled by powers of two in 1/256 octaves: a layer's keys by the geometric mean of their
channels' deviations, a token's values by their rms. A basis, if there is one, is applied; then every number is rounded
to a multiple of one step. Each column of integers, a channel or a coefficient, is coded with a discretized normal
distribution that its moments choose.

Shapes: ``T`` tokens, ``C`` channels of a plane, ``n`` numbers of a token in all planes of a block, ``r`` coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from kvzip.coding.normal import CDF, CDF_BITS, CDF_STEPS

OCTAVE = 256
"""Scales and steps are ``2 ** (index / OCTAVE)``."""

KEY_STEP = -221
"""What a unit of keys is to a unit of values: 0.55, in 1/256 octaves."""

DEVIATIONS = 64
MEANS = 16
"""Tables of a family: deviations, 12 an octave, times positions of the mean inside a symbol."""

ALPHABETS = (8, 16, 32)
"""Symbols of a family. The outermost two are escapes: 8 raw bits tell how far beyond the value lies."""

CONSTANT = 255
"""The scale code of a column that never changes; codes from DEVIATIONS on have raw low bits."""

ESCAPE_BITS = 8
SCALE_BITS, SCALE = 12, 1 << 12


# --------------------------------------------------------------------------------------------------------------- scales


@cache
def powers() -> np.ndarray:
    """``2 ** (i / 256)``, i = 0..255, by square roots and products alone: IEEE 754 fixes every bit."""
    root = [np.float64(2)]
    for _ in range(8):
        root.append(np.sqrt(root[-1]))
    table = np.ones(OCTAVE)
    for i in range(OCTAVE):
        for bit in range(8):
            if i >> bit & 1:
                table[i] *= root[8 - bit]
    return table


def power(index: np.ndarray | int) -> np.ndarray:
    """``2 ** (index / 256)`` in float32."""
    index = np.asarray(index, np.int64)
    return np.ldexp(powers()[index % OCTAVE], (index // OCTAVE).astype(np.int32)).astype(np.float32)


def log2_index(x: np.ndarray) -> np.ndarray:
    """``floor(256 * log2 x)`` of positive float32 numbers."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return (exponent.astype(np.int64) - 1) * OCTAVE + np.searchsorted(powers(), mantissa * 2, side="right") - 1


def value_exponents(v: np.ndarray) -> np.ndarray:
    """The rms of each token of a value plane ``[T, C]`` in 1/256 octaves, to the nearest quarter octave."""
    mean_square = np.square(v.astype(np.float64)).mean(axis=1)
    return (log2_index(np.maximum(mean_square, 2.0**-60)) // 2 + 32) // 64 * 64


def key_exponent(k: np.ndarray) -> int:
    """The geometric mean of the channels' deviations in un-rotated keys ``[T, C]``, in 1/256 octaves.

    Channels that do not vary have no say. If none varies the scale is 1/256 of the largest magnitude.
    """
    variance = k.astype(np.float64).var(axis=0)
    live = variance[variance > 2.0**-60]
    if live.size:
        return int(log2_index(live).sum() // (2 * live.size))
    return int(log2_index(max(float(np.abs(k).max(initial=0)), 2.0**-60))) - 8 * OCTAVE


# ------------------------------------------------------------------------------------------------------- coder's tables


@cache
def deviations() -> np.ndarray:
    """Standard deviations of the family in 1/65536 of a symbol: 0.1 to 3.8, 12 an octave."""
    top = [round(3.8 * 65536 * 2 ** ((i - 11) / 12)) for i in range(12)]
    return np.array([top[i % 12] >> (5 - i // 12) for i in range(8, 72)], np.int64)


@cache
def masses(alphabet: int) -> np.ndarray:
    """Probability of each symbol in 2^-30: ``[64 deviations, 16 means, alphabet]``.

    Mean j stands at ``alphabet / 2 - 1 + j / 16``; the outermost symbols take the tails.
    """
    mean = (alphabet // 2 - 1) * MEANS + np.arange(MEANS, dtype=np.int64)[None, :, None]
    edge = np.arange(alphabet - 1, dtype=np.int64)[None, None, :]
    # The upper edge of a symbol, in deviations from the mean, in 1/65536 of a step of the committed table.
    z = ((2 * edge + 1) * MEANS - 2 * mean) * (CDF_STEPS << 32) // (2 * MEANS * deviations()[:, None, None])
    table, limit = np.array(CDF, np.int64), (len(CDF) - 1) << 16
    magnitude = np.minimum(np.abs(z), limit - 1)
    step, part = magnitude >> 16, magnitude & 0xFFFF
    upper = table[step] + ((table[step + 1] - table[step]) * part >> 16)
    below = np.where(z < 0, (1 << CDF_BITS) - upper, upper)
    return np.diff(below, axis=2, prepend=0, append=1 << CDF_BITS)


@cache
def frequencies(alphabet: int) -> np.ndarray:
    """Frequencies out of 4096, each at least 1; what rounding leaves goes to the likeliest symbol."""
    frequency = (masses(alphabet) * (SCALE - alphabet) >> CDF_BITS) + 1
    rest = SCALE - frequency.sum(axis=2, keepdims=True)
    likeliest = frequency.argmax(axis=2)[..., None]
    np.put_along_axis(frequency, likeliest, np.take_along_axis(frequency, likeliest, 2) + rest, 2)
    return frequency


@cache
def costs(alphabet: int) -> np.ndarray:
    """What each symbol costs in 1/256 bit, escape bits included."""
    cost = SCALE_BITS * 256 - log2_index(frequencies(alphabet))
    cost[..., [0, -1]] += ESCAPE_BITS * 256
    return cost


@cache
def variance_thresholds() -> np.ndarray:
    """Variances of symbols between neighbouring deviations ``[63]``: the geometric means of what each gives, mean 0."""
    variance = (masses(32)[:, 0] * (np.arange(32) - 15) ** 2).sum(axis=1) / (1 << CDF_BITS)
    return np.sqrt(variance[:-1] * variance[1:])


@dataclass(slots=True)
class Columns:
    """How columns of integers are coded: ``scales`` (codes 0..255) and ``means`` (1/16 symbol, or the constant itself)
    per column, ``alphabets`` per 32 columns.
    """

    scales: np.ndarray
    means: np.ndarray
    alphabets: np.ndarray

    @property
    def deviation(self) -> np.ndarray:
        return np.where(self.scales < DEVIATIONS, self.scales, 52 + (self.scales - DEVIATIONS) % 12)

    @property
    def low_bits(self) -> np.ndarray:
        return np.where(self.scales < DEVIATIONS, 0, (self.scales - DEVIATIONS) // 12 + 1)


def choose(q: np.ndarray) -> Columns:
    """Parameters for columns ``q`` ``[T, columns]`` of integers.

    From the moments, then the cheapest of nine neighbours (deviation and mean moved by -1, 0, 1) for each alphabet,
    then the cheapest alphabet for each 32 columns.
    """
    count = q.shape[1]
    mean, variance = q.mean(axis=0), q.var(axis=0)
    low_bits = np.zeros(count, np.int64)
    while (wide := variance / 4.0**low_bits >= 3.8**2).any():
        low_bits += wide
    reduced = variance / 4.0**low_bits
    deviation = np.searchsorted(variance_thresholds(), reduced, side="right")
    center = np.floor(mean / 2.0**low_bits * MEANS - (1 - 2.0**-low_bits) * MEANS / 2 + 0.5).astype(np.int64)
    symbols = q >> low_bits

    scales, means = np.empty(count, np.int64), np.empty(count, np.int64)
    alphabets = np.empty(-(-count // 32), np.int64)
    for group in range(len(alphabets)):
        lanes = slice(group * 32, min(group * 32 + 32, count))
        options = []
        for alphabet in ALPHABETS:
            best = _cheapest(symbols[:, lanes], deviation[lanes], center[lanes], low_bits[lanes], alphabet)
            options.append((best[0].sum(), alphabet, best[1], best[2]))
        _, alphabets[group], scales[lanes], means[lanes] = min(options, key=lambda option: option[0])
    constant = (q == q[:1]).all(axis=0)
    scales = np.where(low_bits > 0, DEVIATIONS + (low_bits - 1) * 12 + scales - 52, scales)
    return Columns(np.where(constant, CONSTANT, scales), np.where(constant, q[0], means), alphabets)


def _cheapest(
    symbols: np.ndarray, deviation: np.ndarray, center: np.ndarray, low_bits: np.ndarray, alphabet: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cost in 1/256 bit, deviation and mean of the best of nine for each column; of equals the first."""
    lanes = np.arange(len(deviation))
    best = (np.full(len(deviation), np.iinfo(np.int64).max), deviation, center)
    for d in (-1, 0, 1):
        # A column with raw low bits has one of the twelve largest deviations: its code has room for no other.
        candidate = np.clip(deviation + d, np.where(low_bits > 0, 52, 0), DEVIATIONS - 1)
        for mean in (center - 1, center, center + 1):
            coded = np.clip(symbols - window(mean, alphabet), 0, alphabet - 1)
            count = np.bincount((coded + lanes * alphabet).ravel(), minlength=len(lanes) * alphabet)
            cost = (count.reshape(-1, alphabet) * costs(alphabet)[candidate, mean & 15]).sum(axis=1)
            better, new = cost < best[0], (cost, candidate, mean)
            best = tuple(np.where(better, mine, old) for mine, old in zip(new, best, strict=True))
    return best


def window(means: np.ndarray, alphabet: int) -> np.ndarray:
    """The value that symbol 0 stands for."""
    return (means >> 4) - (alphabet // 2 - 1)


def stream_bits(q: np.ndarray, columns: Columns) -> np.ndarray:
    """What each column of ``q`` costs with these tables: float64 ``[columns]``. Raises if an escape is out of reach."""
    alphabet = np.repeat(columns.alphabets, 32)[: q.shape[1]]
    symbols, live = q >> columns.low_bits, columns.scales != CONSTANT
    total = np.zeros(q.shape[1])
    for size in ALPHABETS:
        pick = live & (alphabet == size)
        means, deviation = columns.means[pick], columns.deviation[pick]
        distance = symbols[:, pick] - window(means, size)
        if distance.size and (distance.min() <= -(1 << ESCAPE_BITS) or distance.max() - size + 1 >= 1 << ESCAPE_BITS):
            raise AssertionError("a value lies farther from the mean than its deviation allows")
        bits = SCALE_BITS - np.log2(frequencies(size)[deviation, means & 15])
        coded = np.clip(distance, 0, size - 1)
        escapes = ((coded == 0) | (coded == size - 1)).sum(axis=0)
        total[pick] = bits[np.arange(len(bits)), coded].sum(axis=0) + ESCAPE_BITS * escapes
    return total + columns.low_bits * live * len(q)


def table_bits(columns: Columns) -> int:
    """A word of head per 32 columns, 8 bits of scale code a lane, and means in as many bits as the widest needs."""
    total = 0
    for group in range(len(columns.alphabets)):
        means = columns.means[group * 32 : group * 32 + 32]
        width = max(int(m if m >= 0 else ~m).bit_length() for m in means) + 1
        total += 32 + 32 * (8 + width)
    return total


def token_bits(exponents: np.ndarray) -> int:
    """Value exponents ``[T]`` in tiles of 32: a word of head, then quarter octaves above the tile's smallest."""
    total = 0
    for start in range(0, len(exponents), 32):
        tile = exponents[start : start + 32] // 64
        total += 32 + 32 * int(tile.max() - tile.min()).bit_length()
    return total


# ----------------------------------------------------------------------------------------------------------------- RoPE


def rotate(
    x: np.ndarray, frequencies: np.ndarray, start: int = 0, *, inverse: bool = False, interleaved: bool = False
) -> np.ndarray:
    """RoPE (Su et al., arXiv:2104.09864) on ``[T, H, D]``.

    Pairs of the first ``2 * len(frequencies)`` channels of a head turn by ``position * frequency``.
    """
    rotary = 2 * len(frequencies)
    first = slice(0, rotary, 2) if interleaved else slice(0, rotary // 2)
    second = slice(1, rotary, 2) if interleaved else slice(rotary // 2, rotary)
    angle = (np.arange(len(x)) + float(start))[:, None, None] * np.asarray(frequencies, np.float64)
    cos = np.cos(angle).astype(np.float32)
    sin = np.sin(-angle if inverse else angle).astype(np.float32)
    out = x.astype(np.float32)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


# --------------------------------------------------------------------------------------------------------------- blocks


@dataclass(slots=True)
class Basis:
    """What a profile knows about the ``2 * layers`` planes of a group, keys first in each layer.

    ``key_exponents`` int ``[layers]`` in 1/256 octaves, ``mean`` ``[n]``, ``vectors`` ``[r, n]`` of falling
    ``deviations`` ``[r]``.
    """

    key_exponents: np.ndarray
    mean: np.ndarray
    vectors: np.ndarray
    deviations: np.ndarray


@dataclass(slots=True)
class Block:
    """Integers ``q`` ``[coded tokens, columns]`` with their coder's parameters, exponents of each plane and token
    (``[planes, T]``, the step not in them), and the tokens kept exact.
    """

    q: np.ndarray
    columns: Columns
    exponents: np.ndarray
    keys: np.ndarray
    exact: np.ndarray
    channels: int

    def bits(self, riders: bool = True) -> dict[str, float]:
        """Bits by purpose. A lane's start state carries 16 bits of an exact token's value; only two-byte types ride."""
        lanes = -(-self.q.shape[1] // 32) * 32
        values = int(self.exact.sum()) * self.channels
        carried = min(lanes, values) if riders else 0
        return {
            "stream": float(stream_bits(self.q, self.columns).sum()),
            "tables": table_bits(self.columns),
            "tokens": sum(token_bits(e) for e, key in zip(self.exponents, self.keys, strict=True) if not key)
            + 32 * int(self.keys.sum()),
            "states": lanes // 32 * 32 * 33 - 16 * carried,
            "exact": 16 * values,
        }


def exact_tokens(planes: list[np.ndarray], sinks: int) -> np.ndarray:
    """The first ``sinks`` tokens, and those with a number that is none: bool ``[T]``."""
    exact = np.arange(len(planes[0])) < sinks
    for plane in planes:
        exact |= ~np.isfinite(plane.astype(np.float32)).all(axis=1)
    return exact


def encode(planes: list[np.ndarray], keys: list[bool], step: int, *, sinks: int = 1, basis: Basis | None = None,
           cut: float = 0.3) -> Block:  # fmt: skip
    """Code ``planes`` ``[T, C]`` (keys un-rotated) with a step of ``2 ** (step / 256)``.

    Without a basis each number is its own coefficient. With one, coefficients whose deviation in training is below
    ``cut`` steps are left out.
    """
    exact = exact_tokens(planes, sinks)
    exponents, normal = [], []
    layer_exponents = iter(basis.key_exponents if basis else [])
    for plane, key in zip(planes, keys, strict=True):
        x = np.where(exact[:, None], 0, plane.astype(np.float32))
        if key:
            own = int(next(layer_exponents)) if basis else key_exponent(x[~exact])
            exponent = np.full(len(x), own + KEY_STEP)
        else:
            exponent = value_exponents(x)
        exponents.append(exponent)
        normal.append(x * power(-exponent)[:, None])
    z = np.concatenate(normal, axis=1)[~exact]
    if basis:
        rank = int((basis.deviations > cut * power(step)).sum())
        z = (z - basis.mean) @ basis.vectors[:rank].T
    q = np.rint(z * power(-step)).astype(np.int64)
    return Block(q, choose(q), np.array(exponents), np.array(keys), exact, sum(plane.shape[1] for plane in planes))


def decode(block: Block, step: int, widths: list[int], *, basis: Basis | None = None) -> list[np.ndarray]:
    """The planes, float32 ``[T, C]`` of ``widths`` channels; exact tokens are NaN."""
    z = block.q.astype(np.float32) * power(step)
    if basis:
        z = z @ basis.vectors[: z.shape[1]] + basis.mean
    whole = np.full((len(block.exact), sum(widths)), np.nan, np.float32)
    whole[~block.exact] = z
    parts = np.split(whole, np.cumsum(widths)[:-1], axis=1)
    return [part * power(e)[:, None] for part, e in zip(parts, block.exponents, strict=True)]
