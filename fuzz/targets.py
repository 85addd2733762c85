"""All targets by name: the readers, and the decoder of every codec that is registered."""

from __future__ import annotations

from fuzz.blobs import BlobTarget
from fuzz.decoders import DecoderTarget
from fuzz.engine import Target
from fuzz.files import KvzTarget, SafetensorsTarget
from kvzip.codecs import available_codecs, codec_class
from kvzip.errors import UnsupportedError


def all_targets() -> dict[str, Target]:
    """Targets by name; a new codec has one without more ado."""
    decoders = [DecoderTarget(name) for name in available_codecs() if _is_here(name)]
    found: list[Target] = [SafetensorsTarget(), KvzTarget(), BlobTarget(), *decoders]
    return {target.name: target for target in found}


def _is_here(codec: str) -> bool:
    try:
        codec_class(codec)
    except UnsupportedError:
        return False
    return True
