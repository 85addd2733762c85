"""TurboQuant as LMCache 0.5.6 stores it: rotated Lloyd-Max keys, uniform values, one slot per token and head.

Source: "TurboQuant" (arXiv 2504.19874), and the published behaviour of LMCache's ``turboquant`` serde; the random signs
come from the Mersenne Twister of Matsumoto and Nishimura (ACM TOMACS 1998) as torch's CPU generator runs it.

Shapes: ``T`` tokens, ``H`` heads, ``D`` channels of a head (a power of two); caches are ``[2, L, T, H * D]``, K first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tests.reference import fp8


@dataclass(frozen=True)
class Preset:
    """Bits of a key index (8: an fp8 cast in place of an index) and of a value index."""

    key_bits: int
    value_bits: int


PRESETS = {
    "turboquant_k8v4": Preset(8, 4),
    "turboquant_4bit_nc": Preset(4, 4),
    "turboquant_k3v4_nc": Preset(3, 4),
    "turboquant_3bit_nc": Preset(3, 3),
}


def mersenne_twister(seed: int, count: int) -> np.ndarray:
    """The first ``count`` 32-bit outputs of MT19937 started from one 32-bit ``seed``."""
    state = [seed & 0xFFFFFFFF]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ state[-1] >> 30) + i) & 0xFFFFFFFF)
    out: list[int] = []
    while len(out) < count:
        for i in range(624):
            joined = state[i] & 0x80000000 | state[(i + 1) % 624] & 0x7FFFFFFF
            state[i] = state[(i + 397) % 624] ^ joined >> 1 ^ (0x9908B0DF if joined & 1 else 0)
        for word in state:
            word ^= word >> 11
            word ^= word << 7 & 0x9D2C5680
            word ^= word << 15 & 0xEFC60000
            out.append(word ^ word >> 18)
    return np.array(out[:count], np.uint32)


def signs(layer: int, head_dim: int) -> np.ndarray:
    """``2 * torch.randint(0, 2, (D,)) - 1`` with the generator seeded for ``layer``: float32 ``[D]``."""
    return (2.0 * (mersenne_twister(42 + 1337 * layer, head_dim) & 1) - 1).astype(np.float32)


def hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix over ``sqrt(size)``, float32: symmetric and its own inverse."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / math.sqrt(size)).astype(np.float32)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The matrix product rounded once, to float32: the order of float32 sums differs between processors."""
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)


def codebook(bits: int, head_dim: int) -> np.ndarray:
    """The ``2**bits`` levels, float32, ascending, of Lloyd and Max for N(0, 1/D) by LMCache's coarse solver.

    Its start, its trapezoid rule and its end decide the last digits, so they are part of the format.
    """
    sigma = 1 / math.sqrt(head_dim)
    reach = 3.5 * sigma
    levels = -reach + 2 * reach * (np.arange(1 << bits) + 0.5) / (1 << bits)
    for _ in range(200):
        edges = np.concatenate([[-3 * reach], (levels[:-1] + levels[1:]) / 2, [3 * reach]])
        moved = np.empty_like(levels)
        for i in range(len(levels)):
            x = np.linspace(edges[i], edges[i + 1], 201)
            density = np.exp(-(x**2) / (2 * sigma**2))
            moved[i] = np.trapezoid(x * density, x) / np.trapezoid(density, x)
        converged = np.abs(moved - levels).max() < 1e-10
        levels = moved
        if converged:
            break
    return levels.astype(np.float32)


def pack(indices: np.ndarray, bits: int) -> np.ndarray:
    """Indices ``[..., D]`` as a bit stream a row, least significant bit first: uint8 ``[..., ceil(D * bits / 8)]``."""
    stream = (indices[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(stream.reshape(*indices.shape[:-1], -1), axis=-1, bitorder="little")


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first ``count`` indices of each row of :func:`pack`'s result, uint8."""
    stream = np.unpackbits(packed, axis=-1, count=count * bits, bitorder="little")
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return (stream.reshape(*packed.shape[:-1], count, bits) * weights).sum(axis=-1, dtype=np.uint8)


def encode_keys(k: np.ndarray, layer: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices uint8 ``[..., D]`` and norms float16 ``[..., 1]`` of keys ``[..., D]``."""
    k = k.astype(np.float32)
    norm = np.sqrt((k.astype(np.float64) ** 2).sum(axis=-1, keepdims=True)).astype(np.float32)
    rotated = _product(k / (norm + np.float32(1e-8)) * signs(layer, k.shape[-1]), hadamard(k.shape[-1]))
    levels = codebook(bits, k.shape[-1])
    midpoints = (levels[:-1] + levels[1:]) / 2
    return (rotated[..., None] >= midpoints).sum(axis=-1, dtype=np.uint8), norm.astype(np.float16)


def decode_keys(indices: np.ndarray, norms: np.ndarray, layer: int, bits: int) -> np.ndarray:
    """Keys float16 ``[..., D]``; norm correction first makes every code vector a unit vector."""
    head_dim = indices.shape[-1]
    code = codebook(bits, head_dim)[indices]
    energy = (code.astype(np.float64) ** 2).sum(axis=-1, keepdims=True)
    code = code / np.sqrt(energy + 1e-16).astype(np.float32)
    scaled = (code * norms.astype(np.float32)).astype(np.float16)
    rotation = signs(layer, head_dim)[:, None] * hadamard(head_dim)
    return _product(scaled, rotation.T).astype(np.float16)


def encode_values(v: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices uint8 ``[..., D]``, scale and zero float16 ``[..., 1]``: a uniform grid over each row's range."""
    v = v.astype(np.float32)
    top = (1 << bits) - 1
    zero = v.min(axis=-1, keepdims=True)
    scale = np.maximum((v.max(axis=-1, keepdims=True) - zero) / np.float32(top), np.float32(1e-8))
    indices = np.clip(np.trunc((v - zero) / scale + np.float32(0.5)), 0, top).astype(np.uint8)
    return indices, scale.astype(np.float16), zero.astype(np.float16)


def decode_values(indices: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """Values float16 ``[..., D]``."""
    return (indices.astype(np.float32) * scale.astype(np.float32) + zero.astype(np.float32)).astype(np.float16)


def slot_bytes(preset: Preset, head_dim: int) -> int:
    """Bytes of one token and head: K's payload, V's payload, padding to an even number."""
    keys = head_dim if preset.key_bits == 8 else -(-head_dim * preset.key_bits // 8) + 2
    size = keys + -(-head_dim * preset.value_bits // 8) + 4
    return size + size % 2


def encode_slots(k: np.ndarray, v: np.ndarray, layer: int, preset: Preset) -> np.ndarray:
    """The slots uint8 ``[..., slot]`` of keys and values ``[..., D]``."""
    if preset.key_bits == 8:
        parts = [fp8.encode(k, "float8_e4m3fn")]
    else:
        indices, norms = encode_keys(k, layer, preset.key_bits)
        parts = [pack(indices, preset.key_bits), norms.view(np.uint8)]
    indices, scale, zero = encode_values(v, preset.value_bits)
    parts += [pack(indices, preset.value_bits), scale.view(np.uint8), zero.view(np.uint8)]
    used = np.concatenate(parts, axis=-1)
    slots = np.zeros((*k.shape[:-1], slot_bytes(preset, k.shape[-1])), np.uint8)
    slots[..., : used.shape[-1]] = used
    return slots


def decode_slots(slots: np.ndarray, layer: int, preset: Preset, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values float16 ``[..., D]``."""

    def split(size: int) -> np.ndarray:
        nonlocal slots
        part, slots = np.ascontiguousarray(slots[..., :size]), slots[..., size:]
        return part

    if preset.key_bits == 8:
        keys = fp8.decode(split(head_dim), "float8_e4m3fn").astype(np.float16)
    else:
        indices = unpack(split(-(-head_dim * preset.key_bits // 8)), preset.key_bits, head_dim)
        keys = decode_keys(indices, split(2).view(np.float16), layer, preset.key_bits)
    indices = unpack(split(-(-head_dim * preset.value_bits // 8)), preset.value_bits, head_dim)
    scale, zero = split(2).view(np.float16), split(2).view(np.float16)
    return keys, decode_values(indices, scale, zero)


def encode(
    kv: np.ndarray, preset: Preset, head_dim: int, *, block_size: int = 16, first: int = 2, last: int = 2
) -> bytes:
    """The whole object of a cache ``[2, L, T, H * D]``: raw first layers, slots, raw last layers.

    Slots go in blocks of ``block_size`` tokens; those past ``T`` are zero (LMCache leaves them unwritten).
    """
    _, layers, tokens, width = kv.shape
    blocks = -(-tokens // block_size)
    slots = np.zeros(
        (layers - first - last, blocks * block_size, width // head_dim, slot_bytes(preset, head_dim)), np.uint8
    )
    heads = kv.reshape(2, layers, tokens, -1, head_dim)
    for i in range(len(slots)):
        slots[i, :tokens] = encode_slots(heads[0, first + i], heads[1, first + i], first + i, preset)
    return kv[:, :first].tobytes() + slots.tobytes() + kv[:, layers - last :].tobytes()


def decode(
    data: bytes,
    shape: tuple[int, ...],
    dtype: np.dtype,
    preset: Preset,
    head_dim: int,
    *,
    block_size: int = 16,
    first: int = 2,
    last: int = 2,
) -> np.ndarray:
    """The inverse of :func:`encode`: ``[2, L, T, H * D]`` of ``dtype``."""
    _, layers, tokens, width = shape
    heads, slot = width // head_dim, slot_bytes(preset, head_dim)
    layer_bytes = 2 * tokens * width * dtype.itemsize
    kv = np.empty(shape, dtype)
    head, tail = first * layer_bytes, len(data) - last * layer_bytes
    kv[:, :first] = np.frombuffer(data[:head], dtype).reshape(2, first, tokens, width)
    kv[:, layers - last :] = np.frombuffer(data[tail:], dtype).reshape(2, last, tokens, width)
    slots = np.frombuffer(data[head:tail], np.uint8).reshape(layers - first - last, -1, heads, slot)
    assert slots.shape[1] == -(-tokens // block_size) * block_size
    for i in range(len(slots)):
        for which, restored in enumerate(decode_slots(slots[i, :tokens], first + i, preset, head_dim)):
            kv[which, first + i] = restored.reshape(tokens, width).astype(dtype)
    return kv
