"""TurboQuant's codebooks: Lloyd and Max's levels for the coordinates of a random unit vector, as LMCache has them.

LMCache finds them by a coarse solver in floating point that stops early, so that the last digits are its own; a solver
run here could give others on another processor. These are its results, as the bits of float32 (the solver stands in
tests/reference/turboquant.py, which is held against LMCache's own files).
"""

from __future__ import annotations

import math

import numpy as np

# fmt: off
_LEVELS: dict[int, dict[int, tuple[int, ...]]] = {
    3: {
        16: (
            0xbf099f54, 0xbeabed53, 0xbe4171fc, 0xbd7adcfb, 0x3d7adcfb, 0x3e4171fc, 0x3eabed53, 0x3f099f54,
        ),
        32: (
            0xbec2a09f, 0xbe73243d, 0xbe08c955, 0xbd316317, 0x3d316317, 0x3e08c955, 0x3e73243d, 0x3ec2a09f,
        ),
        64: (
            0xbe899f54, 0xbe2bed53, 0xbdc171fc, 0xbcfadcfb, 0x3cfadcfb, 0x3dc171fc, 0x3e2bed53, 0x3e899f54,
        ),
        128: (
            0xbe42a09f, 0xbdf3243d, 0xbd88c955, 0xbcb16317, 0x3cb16317, 0x3d88c955, 0x3df3243d, 0x3e42a09f,
        ),
        256: (
            0xbe099f54, 0xbdabed53, 0xbd4171fc, 0xbc7adcfb, 0x3c7adcfb, 0x3d4171fc, 0x3dabed53, 0x3e099f54,
        ),
        512: (
            0xbdc2a09f, 0xbd73243d, 0xbd08c955, 0xbc316317, 0x3c316317, 0x3d08c955, 0x3d73243d, 0x3dc2a09f,
        ),
    },
    4: {
        16: (
            0xbf2ec76e, 0xbf046170, 0xbecf16c0, 0xbea0cd0c, 0xbe71444a, 0xbe282948, 0xbdc6b9ff, 0xbd03828a,
            0x3d03828a, 0x3dc6b9ff, 0x3e282948, 0x3e71444a, 0x3ea0cd0c, 0x3ecf16c0, 0x3f046170, 0x3f2ec76e,
        ),
        32: (
            0xbef72cc4, 0xbebb36e7, 0xbe926f17, 0xbe63682b, 0xbe2a99f2, 0xbdedd0e1, 0xbd8c8559, 0xbcb9fbae,
            0x3cb9fbae, 0x3d8c8559, 0x3dedd0e1, 0x3e2a99f2, 0x3e63682b, 0x3e926f17, 0x3ebb36e7, 0x3ef72cc4,
        ),
        64: (
            0xbeaec76e, 0xbe846170, 0xbe4f16c0, 0xbe20cd0c, 0xbdf1444a, 0xbda82948, 0xbd46b9ff, 0xbc83828a,
            0x3c83828a, 0x3d46b9ff, 0x3da82948, 0x3df1444a, 0x3e20cd0c, 0x3e4f16c0, 0x3e846170, 0x3eaec76e,
        ),
        128: (
            0xbe772cc4, 0xbe3b36e7, 0xbe126f17, 0xbde3682b, 0xbdaa99f2, 0xbd6dd0e1, 0xbd0c8559, 0xbc39fbae,
            0x3c39fbae, 0x3d0c8559, 0x3d6dd0e1, 0x3daa99f2, 0x3de3682b, 0x3e126f17, 0x3e3b36e7, 0x3e772cc4,
        ),
        256: (
            0xbe2ec76e, 0xbe046170, 0xbdcf16c0, 0xbda0cd0c, 0xbd71444a, 0xbd282948, 0xbcc6b9ff, 0xbc03828a,
            0x3c03828a, 0x3cc6b9ff, 0x3d282948, 0x3d71444a, 0x3da0cd0c, 0x3dcf16c0, 0x3e046170, 0x3e2ec76e,
        ),
        512: (
            0xbdf72cc4, 0xbdbb36e7, 0xbd926f17, 0xbd63682b, 0xbd2a99f2, 0xbcedd0e1, 0xbc8c8559, 0xbbb9fbae,
            0x3bb9fbae, 0x3c8c8559, 0x3cedd0e1, 0x3d2a99f2, 0x3d63682b, 0x3d926f17, 0x3dbb36e7, 0x3df72cc4,
        ),
    },
}
# fmt: on


def codebook(bits: int, head_dim: int) -> np.ndarray:
    """``struct Codebook`` of kernels/turboquant_slots.cu for indices of 3 or 4 bits: uint32 ``[4, 16]``.

    Levels, ascending, and the midpoints between them, as float32; the levels' squares in 2^-24 and what is left in
    2^-44. LMCache knows rows of powers of two only: other sizes take the levels of 128, scaled.
    """
    known = _LEVELS[bits]
    levels = np.array(known.get(head_dim, known[128]), np.uint32).view(np.float32)
    if head_dim not in known:
        levels = (levels * math.sqrt(128 / head_dim)).astype(np.float32)
    squares = np.rint(np.ldexp(levels.astype(np.float64) ** 2, 44)).astype(np.uint64)
    table = np.zeros((4, 16), np.uint32)
    table[0, : len(levels)] = levels.view(np.uint32)
    table[1, : len(levels) - 1] = ((levels[:-1] + levels[1:]) / np.float32(2)).view(np.uint32)
    table[2, : len(levels)] = squares >> 20
    table[3, : len(levels)] = squares & 0xFFFFF
    return table
