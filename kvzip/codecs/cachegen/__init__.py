"""CacheGen: LMCache's quantization, bit for bit, with a choice of entropy coders behind it.

A token's channels are divided by the largest magnitude among them and rounded to ``bins - 1`` symbols (Liu et al.,
SIGCOMM 2024, arXiv:2310.07240, as LMCache 0.5.6 does it): the symbols are LMCache's own. ``tokens`` holds what belongs
to tokens, ``rans`` and ``range`` are the coders. The formats are normative in docs/format.md.
"""

from kvzip.codecs.cachegen.codec import CODERS, CacheGen

__all__ = ["CODERS", "CacheGen"]
