"""TurboQuant: rotated vectors, quantized without calibration (Zandieh et al., arXiv:2504.19874), as in LMCache 0.5.6.

``slots`` holds LMCache's own bytes, from which its slots are put together on export (kvzip/lmcache/turboquant.py);
``tuned`` the same fidelity for fewer bits, the default. The formats are normative in docs/format.md.
"""

from kvzip.codecs.turboquant.codec import PRESETS, Preset, TurboQuant

__all__ = ["PRESETS", "Preset", "TurboQuant"]
