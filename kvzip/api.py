"""The Python API: files, pipes, and dictionaries of numpy or torch tensors, in and out."""

from __future__ import annotations

import io
import logging
import operator
import os
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self, overload

import numpy as np

from kvzip.cache import BLOCK_TOKENS, Kind, Plane
from kvzip.codecs.base import Codec
from kvzip.container import Frame, Header, Totals
from kvzip.devices import get_device
from kvzip.devices.base import Device
from kvzip.errors import UsageError
from kvzip.gpu_border import target_array
from kvzip.identity import TokenIds
from kvzip.identity import check as check_identity
from kvzip.layouts import map_cache, spelt
from kvzip.opening import PathLike, Tensors, open_reader, open_restored, open_source, open_stored, open_target
from kvzip.pipeline import Choice, Report, StoredCache, assign, collect, decode_plane
from kvzip.pipeline import compress as run_compress
from kvzip.pipeline import decompress as run_decompress
from kvzip.pipeline.stored import FileFrames, Want
from kvzip.pipeline.study import at_random, reader
from kvzip.profiles.library import offering
from kvzip.tensorfile import TensorSource
from kvzip.torch_border import to_torch

Cut = range | slice | tuple[int, int] | int | None
Like = Literal["numpy", "torch"]

_log = logging.getLogger("kvzip")


@overload
def compress(
    source: PathLike | BinaryIO | bytes | TensorSource | Tensors, target: None = None, **options: Any
) -> bytes: ...
@overload
def compress(
    source: PathLike | BinaryIO | bytes | TensorSource | Tensors, target: PathLike | BinaryIO, **options: Any
) -> Report: ...
def compress(
    source: PathLike | BinaryIO | bytes | TensorSource | Tensors,
    target: PathLike | BinaryIO | None = None,
    *,
    codec: str | Codec = "cachegen",
    k_codec: str | Codec | None = None,
    v_codec: str | Codec | None = None,
    layer_codec: str | None = None,
    layout: str | None = None,
    heads: int | None = None,
    head_dim: int | None = None,
    device: str | Device = "auto",
    threads: int | None = None,
    block_tokens: int = BLOCK_TOKENS,
    identity: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
    embed_profile: bool = False,
    force: bool = False,
    sync: bool = False,
    notice: Callable[[str], None] = _log.warning,
    progress: Callable[[int], None] = lambda _: None,
    **options: Any,
) -> bytes | Report:
    """Compress a KV cache.

    Args:
        source: a safetensors file, a folder of them, ``"-"``, an open binary stream, a file's bytes, or tensors by name
            (numpy, torch or CuPy). Tensors on a GPU stay on it, if ``device`` is that GPU.
        target: where the ``.kvz`` goes: a path, ``"-"``, or an open binary stream, which stays open. If None, the bytes
            are returned instead of a report.
        codec: a name, a name with options (``"cachegen:level=7"``), or a codec object.
        k_codec, v_codec: for keys or values alone, in place of ``codec``.
        layer_codec: for some layers, in place of all these, as in ``"0-1:raw,2-:kivi:bits=2"``.
        layout: what the tensors' axes mean, where names and shapes do not tell; ``heads`` and ``head_dim`` go with it.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:N"``, or a device object.
        threads: CPU threads; all if None.
        block_tokens: tokens in a block, the unit of random access.
        identity: JSON values that name the model and tokens, as :func:`kvzip.identity.identify` makes them; stored in
            the header. Or what gives them, called with the cache's number of tokens.
        embed_profile: whether the file carries the profile that its codec uses, and needs none to be decoded.
        force: whether an existing ``target`` may be replaced.
        sync: whether the file must have reached the disk on return.
        notice: is told, in sentences, what a user should know; logged by default.
        progress: is told how many more bytes of the source are done, from another thread.
        options: the options of ``codec``, such as ``level=7``.

    Raises:
        KvzipError: one of the classes in :mod:`kvzip.errors`; then there is no target file.
        OSError: a file cannot be read or written.
    """
    _expect(str | None, "a text", layer_codec=layer_codec, layout=layout)
    _expect(Integral | None, "a whole number", heads=heads, head_dim=head_dim)
    _expect(Mapping | Callable | None, "a mapping or a function", identity=identity)
    _check_block_tokens(block_tokens)
    where = _device(device, threads)
    chosen = Choice.of(codec, k_codec, v_codec, layer_codec, **options)
    with open_source(source, where) as origin, at_random(origin, chosen.studies, notice) as opened:
        cache_map = map_cache(opened, layout=layout, heads=heads, head_dim=head_dim)
        for text in cache_map.notices:
            notice(text)
        chosen.check(cache_map.planes)
        assignment = assign(cache_map.planes, chosen, notice, reader(opened, cache_map, where), block_tokens)
        if callable(identity):
            identity = identity(max((plane.tokens for plane in cache_map.planes if plane.kind != "bytes"), default=0))
        with open_target(target, source, force=force, sync=sync) as sink:
            report = run_compress(
                opened, cache_map, sink,
                assignment=assignment, device=where, block_tokens=block_tokens, identity=identity,
                embed_profile=embed_profile, notice=notice, progress=progress,
            )  # fmt: skip
        return sink.getvalue() if target is None and isinstance(sink, io.BytesIO) else report


@overload
def decompress(source: PathLike | BinaryIO | bytes, target: None = None, **options: Any) -> dict[str, Any]: ...
@overload
def decompress(source: PathLike | BinaryIO | bytes, target: PathLike | BinaryIO, **options: Any) -> Report: ...
def decompress(  # type: ignore[misc]  # the options of the overloads are the ones below
    source: PathLike | BinaryIO | bytes,
    target: PathLike | BinaryIO | None = None,
    *,
    layers: Cut = None,
    tokens: Cut = None,
    member: int | None = None,
    level: int | None = None,
    profile: PathLike | None = None,
    expect_model: str | None = None,
    expect_tokens: TokenIds | None = None,
    like: Like = "numpy",
    device: str | Device = "auto",
    threads: int | None = None,
    force: bool = False,
    sync: bool = False,
    notice: Callable[[str], None] = _log.warning,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any] | Report:
    """Restore a KV cache, or the part of it that ``layers`` and ``tokens`` name.

    Args:
        source: a ``.kvz`` file, ``"-"``, an open binary stream, or bytes.
        target: where the safetensors file (or folder of files) goes: a path, ``"-"``, or an open binary stream, which
            stays open. If None, the tensors are returned by name.
        layers: which layers, as a range, a slice, a ``(start, stop)`` pair or one number; all if None.
        tokens: which tokens, likewise.
        member: which cache, where several ``.kvz`` have been concatenated.
        level: which quality, where a file holds several; 0 is the coarsest. The finest if None.
        profile: a profile that the codec needs, or a folder of profiles; see :mod:`kvzip.profiles.library` for where
            they are looked for besides.
        expect_model, expect_tokens: what the cache must belong to, see :func:`kvzip.identity.check`.
        like: the kind of tensors to return.
        device, threads, force, sync, notice, progress: as for :func:`compress`.

    Raises:
        KvzipError: one of the classes in :mod:`kvzip.errors`; then there is no target file.
        OSError: a file cannot be read or written.
    """
    _expect(Integral | None, "a whole number", member=member, level=level)
    _check_like(like)
    where = _device(device, threads)
    with offering([profile] if profile is not None else []), open_stored(source, member) as stored:
        check_identity(
            stored.header.identity, expect_model, expect_tokens,
            name=str(source) if isinstance(source, (str, os.PathLike)) else "the cache",
        )  # fmt: skip
        if level is not None:
            stored.codecs.choose_level(level)
        selection = stored.select(as_range(layers, "layers"), as_range(tokens, "tokens"))
        if target is None:
            arrays = collect(stored, selection, device=where, notice=notice, progress=progress)
            return {name: _like(array, like) for name, array in arrays.items()}
        with open_restored(target, selection.files, source=source, force=force, sync=sync) as sink:
            return run_decompress(stored, selection, sink, device=where, notice=notice, progress=progress)


def open(
    source: PathLike | BinaryIO | bytes,
    *,
    member: int | None = None,
    profile: PathLike | None = None,
    like: Like = "numpy",
    device: str | Device = "auto",
    threads: int | None = None,
) -> Cache:
    """Open a ``.kvz`` for random access. Arguments as for :func:`decompress`; a pipe cannot be opened."""
    return Cache(source, member=member, profile=profile, like=like, device=device, threads=threads)


class Cache:
    """A compressed cache that is read where it is asked.

    Use it as a context manager, or call :meth:`close`.
    """

    def __init__(
        self,
        source: PathLike | BinaryIO | bytes,
        *,
        member: int | None = None,
        profile: PathLike | None = None,
        like: Like = "numpy",
        device: str | Device = "auto",
        threads: int | None = None,
    ) -> None:
        _expect(Integral | None, "a whole number", member=member)
        _check_like(like)
        self._device = _device(device, threads)
        self._reader = open_reader(source, member)
        try:
            with offering([profile] if profile is not None else []):
                self._stored = StoredCache(self._reader)
        except BaseException:
            self._reader.close()
            raise
        self._like: Like = like
        self._planes = {(plane.kind, plane.layer, plane.sequence): plane for plane in self.planes}

    @property
    def header(self) -> Header:
        """Geometry, codecs and channel specs."""
        return self._stored.header

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Every layer's keys, values or latents, and tensors that are no KV."""
        return self.header.planes

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers that the cache holds."""
        return sorted({plane.layer for plane in self.planes if plane.kind != "bytes"})

    @property
    def metadata(self) -> dict[str, str]:
        """The source's ``__metadata__``."""
        return self._stored.metadata

    @property
    def statistics(self) -> dict[str, Any] | None:
        """What a lossy codec did, in columns with an entry per plane: ``relative_error``, ``max_abs``; None where
        it did nothing, ``"inf"`` where it is not finite.
        """
        return self._reader.statistics

    @property
    def totals(self) -> Totals:
        """The file's bytes by component."""
        return self._reader.totals

    def key(self, layer: int, tokens: Cut = None, *, sequence: int = 0, out: Any = None) -> Any:
        """Keys of one layer, ``[tokens, heads, head_dim]`` in their stored dtype. Only the blocks needed are read.

        ``out`` is a writable tensor of that shape and dtype to decode to (numpy, torch or CuPy, the last axis
        contiguous); it is returned. On the GPU of ``device`` it is filled where it lies.
        """
        return self._read("key", layer, tokens, sequence, out)

    def value(self, layer: int, tokens: Cut = None, *, sequence: int = 0, out: Any = None) -> Any:
        """Values of one layer, as :meth:`key`."""
        return self._read("value", layer, tokens, sequence, out)

    def latent(self, layer: int, tokens: Cut = None, *, sequence: int = 0, out: Any = None) -> Any:
        """MLA latents of one layer, as :meth:`key`."""
        return self._read("latent", layer, tokens, sequence, out)

    def tensors(self, *, layers: Cut = None, tokens: Cut = None) -> dict[str, Any]:
        """The source's tensors by name, or what ``layers`` and ``tokens`` leave of them."""
        selection = self._stored.select(as_range(layers, "layers"), as_range(tokens, "tokens"))
        arrays = collect(self._stored, selection, device=self._device)
        return {name: _like(array, self._like) for name, array in arrays.items()}

    def _read(self, kind: Kind, layer: int, tokens: Cut, sequence: int, out: Any) -> Any:
        _expect(Integral, "a whole number", layer=layer, sequence=sequence)
        plane = self._planes.get((kind, layer, sequence))
        if plane is None:
            raise UsageError(
                f"{self._reader.source.name} has no {kind} of layer {layer}; its layers are {self.layers}",
                code="no-plane",
            )
        wanted = as_range(tokens, "tokens")
        wanted = range(plane.tokens) if wanted is None else wanted
        start, stop = (min(edge, plane.tokens) for edge in (wanted.start, wanted.stop))
        if start == stop and wanted.start < wanted.stop:
            raise UsageError(
                f"no token is in {spelt(wanted)}; {kind} of layer {layer} has {plane.tokens} tokens",
                code="tokens-range",
            )
        target = None
        if out is not None:
            target = target_array(out, (stop - start, plane.heads, plane.head_dim), plane.dtype, self._device)
        here = target if isinstance(target, self._device.xp.ndarray) else None
        numbers = decode_plane(self._stored, plane.index, start, stop, self._device, here)
        if here is not None:
            self._device.synchronize()
            return out
        if target is None:
            return _like(numbers, self._like)
        target[...] = numbers
        return out

    def codec_of(self, plane: Plane) -> Codec:
        """What coded a plane."""
        return self._stored.codecs[self.header.plane_codec[plane.index]]

    def frames(self, plane: Plane, tokens: range) -> Iterator[Frame]:
        """The frames that hold those tokens of a plane: checked, and not decoded."""
        want = Want(self.header.group_of[plane.index], tokens.start, min(tokens.stop, plane.tokens))
        for frames in FileFrames(self._stored.file, self._stored.codecs).chunks([want], self._device.batch_bytes):
            yield from frames

    def __repr__(self) -> str:
        return f"<kvzip.Cache {self._reader.source.name}: {len(self.layers)} layers, {len(self.planes)} planes>"

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def __enter__(self) -> Self:
        self._reader.source.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def as_range(cut: Cut, name: str) -> range | None:
    """What a caller names of ``layers`` or ``tokens`` as a range; an open end reaches as far as there is anything."""
    if cut is None:
        return None
    try:
        start, stop, step = _edges(cut)
        start, stop = operator.index(start or 0), sys.maxsize if stop is None else operator.index(stop)
    except (TypeError, ValueError):
        start, stop, step = -1, -1, None
    if start < 0 or stop < start or step not in (None, 1):
        raise UsageError(
            f"{name} must be a range or slice from 0 up in steps of 1, a pair of numbers, or one, "
            f"got {reprlib.repr(cut)}",
            code="bad-range",
        )
    return range(start, stop)


def _edges(cut: range | slice | tuple[int, int] | int) -> tuple[Any, Any, Any]:
    """Start, stop and step. Raises TypeError or ValueError for what names no range."""
    if isinstance(cut, (range, slice)):
        return cut.start, cut.stop, cut.step
    if isinstance(cut, tuple):
        start, stop = cut
        return start, stop, None
    return cut, operator.index(cut) + 1, None


def _device(device: str | Device, threads: int | None) -> Device:
    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise UsageError(f"device must be a name or a device, got {reprlib.repr(device)}", code="unknown-device")
    _expect(Integral | None, "a whole number", threads=threads)
    return get_device(device, threads)


def _check_block_tokens(block_tokens: int) -> None:
    _expect(Integral, "a whole number", block_tokens=block_tokens)
    if not 1 <= block_tokens < 1 << 32:
        raise UsageError(f"block_tokens must be from 1 to {(1 << 32) - 1}, got {block_tokens}", code="bad-block-tokens")


def _check_like(like: Like) -> None:
    if not isinstance(like, str) or like not in ("numpy", "torch"):
        raise UsageError(f"like must be 'numpy' or 'torch', got {reprlib.repr(like)}", code="bad-argument")


def _expect(kind: Any, what: str, **arguments: Any) -> None:
    """Refuse arguments that are not of a kind: mistakes are to be told where they were made."""
    for name, value in arguments.items():
        if not isinstance(value, kind):
            raise UsageError(f"{name} must be {what}, got {reprlib.repr(value)}", code="bad-argument")


def _like(array: np.ndarray, like: Like) -> Any:
    return to_torch(array) if like == "torch" else array
