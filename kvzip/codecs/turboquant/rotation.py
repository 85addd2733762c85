"""The rotation of TurboQuant: random signs, then orthonormal Hadamard transforms (kernels/rotation.h)."""

from __future__ import annotations

import math

import numpy as np

from kvzip.devices.base import Array, Device

LANES = 32
MAX_HEAD_DIM = 256
"""The longest row that kernels take: 8 registers of 32 lanes."""


def signs(layer: int, head_dim: int) -> np.ndarray:
    """LMCache's: ``2 * torch.randint(0, 2, (head_dim,), generator) - 1``, seeded with 42 + 1337 * layer; float32.

    torch's CPU generator is the Mersenne Twister, of which randint takes the lowest bit of each output; numpy's
    RandomState is the same generator, and frozen.
    """
    generator = np.random.RandomState((42 + 1337 * layer) % (1 << 32))
    bits = generator.randint(0, 1 << 32, head_dim, dtype=np.uint32) & 1
    return bits.astype(np.float32) * 2 - 1


def scales(head_dim: int) -> np.ndarray:
    """What makes each number's Hadamard block orthonormal: ``1 / sqrt(block size)``, float32 ``[head_dim]``.

    A row is cut into the powers of two that make up its length, largest first: 80 is rotated as 64 and 16.
    """
    sizes = [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]
    return np.concatenate([np.full(size, 1 / math.sqrt(size), np.float32) for size in sizes])


def rotation(layer: int, head_dim: int, device: Device) -> Array:
    """Signs and scales on the device: float32 ``[2, head_dim padded to lanes]``, 0 in the padding."""

    def make() -> np.ndarray:
        table = np.zeros((2, -(-head_dim // LANES) * LANES), np.float32)
        table[:, :head_dim] = signs(layer, head_dim), scales(head_dim)
        return table

    return device.constant(("rotation", layer, head_dim), make)
