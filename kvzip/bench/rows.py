"""One row of the comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvzip.bench.attention import AttentionErrors
from kvzip.bench.sample import Sample
from kvzip.bench.timing import Timing
from kvzip.codecs.base import Codec
from kvzip.container import Totals
from kvzip.pipeline import PlaneErrors

if TYPE_CHECKING:
    from kvzip.evaluation import Quality


@dataclass(frozen=True)
class Copies:
    """Copies between host and device that go with coding on a device with memory of its own.

    ``raw_in`` and ``packed_out`` go with encoding, ``packed_in`` and ``raw_out`` with decoding.
    """

    raw_in: Timing
    packed_out: Timing
    packed_in: Timing
    raw_out: Timing


@dataclass(frozen=True)
class Row:
    """What a codec, or a peer, made of a sample.

    Attributes:
        name: what ``--codec`` accepts, or what people call the peer.
        stored_bytes: all that must be kept, with all side information; for a codec a whole ``.kvz``.
        encode, decode: of the whole sample, in the memory of the device, copies to and from it not counted.
        copies: those copies; None where the device works in the host's memory.
        codec: as it was bound to the sample; None for a peer, which loses nothing.
        totals: the bytes of the ``.kvz`` by component.
        errors: of each plane, measured on what was decoded.
        attention: of each layer, what the errors do to attention.
        quality: what they do to a model's predictions, if one was asked and there are any.
        version: of a peer.
    """

    name: str
    sample: Sample
    stored_bytes: int
    encode: Timing
    decode: Timing
    copies: Copies | None = None
    codec: Codec | None = None
    totals: Totals | None = None
    errors: list[PlaneErrors] = field(default_factory=list)
    attention: list[AttentionErrors] = field(default_factory=list)
    quality: Quality | None = None
    version: str | None = None

    @property
    def ratio(self) -> float:
        return self.sample.nbytes / self.stored_bytes

    @property
    def bits_per_element(self) -> float:
        return 8 * self.stored_bytes / self.sample.elements

    @property
    def encode_speed(self) -> float:
        """GB of input per second."""
        return self.encode.speed(self.sample.nbytes)

    @property
    def decode_speed(self) -> float:
        """GB of output per second."""
        return self.decode.speed(self.sample.nbytes)

    @property
    def encode_seconds(self) -> float:
        """The median with the copies that go with it."""
        return self.encode.median + (self.copies.raw_in.median + self.copies.packed_out.median if self.copies else 0)

    @property
    def decode_seconds(self) -> float:
        """The median with the copies that go with it."""
        return self.decode.median + (self.copies.packed_in.median + self.copies.raw_out.median if self.copies else 0)

    @property
    def lossy(self) -> bool:
        return any(error.relative for error in self.errors)

    def errors_of(self, kind: str) -> list[PlaneErrors]:
        return [error for error in self.errors if error.plane.kind == kind]

    def mean_error(self, kind: str) -> float:
        """The mean over the layers of the relative errors of ``key``, ``value`` or ``latent``; 0 for a peer."""
        return _mean([error.relative for error in self.errors_of(kind)])

    @property
    def logits_error(self) -> float:
        """The mean over the layers of the relative errors of the attention logits; 0 for a peer."""
        return _mean([error.logits for error in self.attention])

    @property
    def output_error(self) -> float:
        """The mean over the layers of the relative errors of the attention output; 0 for a peer."""
        return _mean([error.output for error in self.attention])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
