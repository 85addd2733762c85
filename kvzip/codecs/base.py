"""What a codec is: parameters with a JSON round trip, and a way to turn batches of blocks into sections and back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvzip.cache import BLOCK_TOKENS, Block, Plane
from kvzip.codecs.options import CodecType
from kvzip.devices.base import Array, Device

if TYPE_CHECKING:
    from kvzip.profiles.profile import Profile

Sections = Mapping[str, Array]
"""What a block becomes: byte arrays (uint8, on the device) by four-letter tag, in the order in which they are
stored.
"""


Read = Callable[[Plane, int, int], Any]
"""Gives tokens ``start:stop`` of a plane: a numpy array ``[tokens, heads, head_dim]``."""


@dataclass(frozen=True, slots=True)
class Errors:
    """What a lossy codec did to one plane of a block, measured against the stored dtype while encoding.

    ``squared_error`` and ``energy`` are sums over the elements, ``max_abs`` is the largest absolute difference. Sums
    that are not finite, or too small for float32, say that the codec could not count: the pipeline decodes the block
    and measures it. They must be so where what is not finite does not come back the same.
    """

    squared_error: float
    energy: float
    max_abs: float


@dataclass(slots=True)
class Encoded:
    """One block's sections, and one :class:`Errors` per plane for a lossy codec."""

    sections: Sections
    errors: Sequence[Errors] = ()


@dataclass(slots=True)
class Batch:
    """What one kernel launch codes: some blocks, 8-32 MB together, that share dtype, heads and head_dim.

    ``arrays`` holds one device array ``[tokens, heads, head_dim]`` per plane of each block, in the order of
    ``(block, plane)``. The last axis is contiguous; tokens and heads may have any stride: the arrays are views into
    the file's own memory order. Encoders read them, decoders fill them.
    """

    blocks: list[Block]
    arrays: list[Array] = field(default_factory=list)


class Codec(metaclass=CodecType):
    """A compression method with its parameters. Subclasses are small; the work is in kernels.

    A subclass sets ``name``, takes its parameters as annotated keyword arguments of ``__init__``, which gets values of
    these types alone if they can be looked up at run time (:mod:`kvzip.codecs.options`), gives them back in
    :meth:`config`, and stands in the registry, ``kvzip/codecs/__init__.py``. See ``docs/adding-a-codec.md``.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    found: ClassVar[tuple[str, ...]] = ()
    """Options that nobody has to give: :meth:`study` or :meth:`bind` finds them out, for the header."""
    studies: bool = False
    """Whether :meth:`study` has to look at the numbers. A pipe is then spooled."""

    profile: Profile | None = None
    """What it knows of the model beforehand, if it uses that; its hash stands in :meth:`config`."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The parameters as JSON values; ``type(self)(**self.config())`` is an equal codec. Stored in the header."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(**config)

    @classmethod
    def ladder(cls) -> list[str]:
        """The presets and levels that ``bench`` shows, as the options behind ``name:`` in ``--codec``; the usual one
        first, ``""`` for the defaults.
        """
        return [""]

    def study(
        self, planes: Sequence[Plane], read: Read, notice: Callable[[str], None], block_tokens: int = BLOCK_TOKENS
    ) -> Self:
        """A codec with every choice made that depends on the numbers in the cache, for codecs that have such choices.

        Called before :meth:`bind`, with the planes that it is to code; ``read`` only works if ``studies`` is set.
        """
        return self

    def bind(self, planes: Sequence[Plane]) -> Self:
        """A codec with every choice that depends on the cache (bins per layer, say) made and fixed in
        :meth:`config`.
        """
        return self

    @property
    def quality_levels(self) -> int:
        """How many qualities its files hold, for a decoder to choose from."""
        return 1

    def at_level(self, level: int) -> Self:
        """A codec that decodes at quality ``level``, from 0 for the coarsest to ``quality_levels - 1``."""
        return self

    def supports(self, plane: Plane) -> bool:
        """Whether the codec can take this plane; the others pass through losslessly."""
        return True

    def groups(self, planes: Sequence[Plane]) -> list[tuple[Plane, ...]]:
        """How the planes are put together in frames: one by one unless the codec spans layers."""
        return [(plane,) for plane in planes]

    def describe(self, plane: Plane) -> dict[str, Any]:
        """The channel spec of a plane for the header: ``{"bins": 32}`` or ``{"bits": 8}``, as the codec has it."""
        return {}

    @abstractmethod
    def bound(self, block: Block) -> int:
        """The largest number of bytes that the sections of ``block`` can have together; a reader refuses more."""

    @abstractmethod
    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        """Encode every block of the batch; one result per block, in order."""

    @abstractmethod
    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        """Fill ``batch.arrays`` from one mapping of sections per block.

        Sections come straight from a file: their lengths and contents are untrusted. Raises ``CorruptError`` on
        anything that does not fit, naming the block; never reads or writes outside the given arrays.
        Each section starts at a multiple of 8 bytes, and at least 128 readable bytes follow the last one.
        """
