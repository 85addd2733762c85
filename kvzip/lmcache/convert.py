"""``.kvz`` files of LMCache's files, and LMCache's files of ``.kvz`` files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvzip import api
from kvzip.codecs import get_codec
from kvzip.codecs.base import Codec
from kvzip.codecs.cachegen import CacheGen
from kvzip.codecs.fp8 import Fp8
from kvzip.codecs.turboquant import TurboQuant
from kvzip.coding import bins as schedule
from kvzip.devices.base import Device
from kvzip.errors import UnsupportedError, UsageError
from kvzip.lmcache import cachegen, fp8
from kvzip.lmcache.blob import read_blob, write_blob
from kvzip.lmcache.kept_codes import KeptCodes, codes_of, join_codes, stock_codec
from kvzip.lmcache.turboquant import read_codes, write_turboquant
from kvzip.pipeline.encoding import ignore
from kvzip.pipeline.steps import Notice

FORMATS = ("cachegen", *fp8.FORMATS, "turboquant")
OPTIONS = {
    "shape": (*fp8.FORMATS, "turboquant"),
    "k_bins": ("cachegen",),
    "v_bins": ("cachegen",),
    "coder": ("cachegen",),
    "preset": ("turboquant",),
}
"""The formats that an option goes with."""
TENSOR = "kv_chunk"
"""What LMCache's disk chunks call the cache: kvzip knows the layout by it."""


def import_files(
    files: Sequence[tuple[str, bytes]],
    target: Any,
    *,
    file_format: str = "cachegen",
    geometry: fp8.Geometry | None = None,
    k_bins: str | None = None,
    v_bins: str | None = None,
    coder: str | None = None,
    preset: str | None = None,
    device: Device,
    notice: Notice = ignore,
    **options: Any,
) -> Any:
    """One ``.kvz`` of some LMCache files, whose tokens follow each other. What comes back is what LMCache decodes.

    Args:
        files: what messages call each file, and its bytes.
        target: as for :func:`kvzip.compress`, whose result is returned; ``options`` likewise (``block_tokens``...).
        file_format: ``cachegen``, ``fp8-e4m3fn``, ``fp8-e5m2`` or ``turboquant``.
        geometry: of every fp8 or turboquant file.
        k_bins, v_bins: of CacheGen blobs, which do not tell; LMCache's schedule for the number of layers if None.
        coder: how the ``.kvz`` codes CacheGen's symbols, which stay as they are; ``rans`` if None.
        preset: of turboquant files, whose codes stay as they are: ``"4bit_nc"``, with the codec's other options behind
            it if need be, as in ``"4bit_nc,skip_first_layers=0"``; LMCache's usual one if None.

    Raises:
        UnsupportedError: a blob that may run code, or whose symbols no quantizer made.
        CorruptError: a file that is no such file, or damaged.
        UsageError: files that do not belong together, bins that do not fit, a missing geometry, options of another
            format.
    """
    _check_options(file_format, shape=geometry, k_bins=k_bins, v_bins=v_bins, coder=coder, preset=preset)
    if file_format == "cachegen":
        parts = [_read_cachegen(name, data, k_bins, v_bins, device, notice) for name, data in files]
        layers = len(parts[0])
        keys, values = _bins(layers, k_bins, v_bins)
        codec: Codec = CacheGen(k_bins=_runs(keys), v_bins=_runs(values), sinks=0, coder=coder or "rans")
    elif geometry is None:
        raise UsageError(f"{file_format} files do not say how the cache is shaped: give its shape", code="no-shape")
    elif file_format == "turboquant":
        stock = _turboquant(preset)
        read = [read_codes(data, stock, geometry, device, name, notice) for name, data in files]
        parts = [part for part, _ in read]
        codec = KeptCodes(stock, geometry.layers, join_codes([codes for _, codes in read]))
    else:
        dtype = fp8.FORMATS[file_format]
        parts = [fp8.read_fp8(data, dtype, geometry, name) for name, data in files]
        codec = Fp8(dtype=dtype)
    return api.compress(
        {TENSOR: _join(files, parts)}, target,
        codec=codec, layout="lmcache-blob", device=device, notice=notice, **options,
    )  # fmt: skip


def export_cache(
    cache: api.Cache,
    *,
    file_format: str = "cachegen",
    tokens: api.Cut = None,
    k_bins: str | None = None,
    v_bins: str | None = None,
    preset: str | None = None,
    device: Device,
    notice: Notice = ignore,
) -> bytes:
    """The LMCache file of an opened ``.kvz``, or of a part of its tokens.

    Symbols of LMCache's bins stay as they are, and so do codes of turboquant with ``tuned=false``; anything else is
    quantized once more. Without a ``preset`` turboquant's is that of the cache, or LMCache's usual one.

    Raises:
        UsageError: the cache is not made of keys and values of one shape in every layer; options of another format.
    """
    _check_options(file_format, k_bins=k_bins, v_bins=v_bins, preset=preset)
    kv = _whole_cache(cache, tokens)
    if file_format == "turboquant":
        stock = (stock_codec(cache) if preset is None else None) or _turboquant(preset)
        codes = codes_of(cache, stock, tokens)
        if codes is None and cache.statistics:
            notice(f"the codes are not those of LMCache's {stock.preset}: they are quantized a second time")
        return write_turboquant(kv, stock, device, codes, notice)
    if file_format != "cachegen":
        return fp8.write_fp8(kv, fp8.FORMATS[file_format], device, notice)
    keys, values = _bins(len(kv), k_bins, v_bins)
    if told := _second_loss(cache, keys, values):
        notice(told)
    return write_blob(cachegen.encode(kv, keys, values, device, notice))


def _check_options(file_format: str, **given: object) -> None:
    if file_format not in FORMATS:
        raise UsageError(f"unknown format {file_format!r}: {', '.join(FORMATS)} are known", code="lmcache-format")
    for name, value in given.items():
        if value is not None and file_format not in OPTIONS[name]:
            raise UsageError(
                f"{file_format} files have no {name}: that goes with {', '.join(OPTIONS[name])}",
                code="lmcache-option",
            )


def _turboquant(preset: str | None) -> TurboQuant:
    codec = get_codec("turboquant" if preset is None else f"turboquant:preset={preset}")
    assert isinstance(codec, TurboQuant)
    return codec


def _read_cachegen(
    name: str, data: bytes, k_bins: str | None, v_bins: str | None, device: Device, notice: Notice
) -> np.ndarray:
    blob = read_blob(data, name)
    keys, values = _bins(blob.layers, k_bins, v_bins)
    kv, lost = cachegen.decode_checked(blob, keys, values, device, notice)
    if lost.any():
        plane, token = np.argwhere(lost)[0].tolist()
        which, layer = divmod(plane, blob.layers)
        raise UnsupportedError(
            f"{name}: the symbols of layer {layer} {('key', 'value')[which]}, token {token} are not those of "
            f"{(keys, values)[which][layer]} bins; say with which bins the file was written (k_bins, v_bins)",
            code="lmcache-symbols",
        )
    return kv


def _bins(layers: int, k_bins: str | None, v_bins: str | None) -> tuple[list[int], list[int]]:
    given = []
    for text, option, kind in ((k_bins, "k_bins", "key"), (v_bins, "v_bins", "value")):
        runs = schedule.parse(text, option) if text is not None else schedule.lmcache(layers, kind)
        given.append([schedule.lookup(runs, layer) for layer in range(layers)])
        if max(given[-1]) > 32:
            raise UsageError(f"{option}: LMCache has at most 32 bins, got {max(given[-1])}", code="lmcache-bins")
    return given[0], given[1]


def _runs(bins: Sequence[int]) -> str:
    return ",".join(f"{layer}:{count}" for layer, count in enumerate(bins))


def _join(files: Sequence[tuple[str, bytes]], parts: Sequence[np.ndarray]) -> np.ndarray:
    first = parts[0]
    for (name, _), part in zip(files, parts, strict=True):
        if (part.shape[:2], part.shape[3:], part.dtype) != (first.shape[:2], first.shape[3:], first.dtype):
            raise UsageError(
                f"{name} is {part.dtype}{list(part.shape)}, {files[0][0]} {first.dtype}{list(first.shape)}: "
                "they are not of one cache",
                code="lmcache-mixed",
            )
    return np.concatenate(parts, axis=2) if len(parts) > 1 else first


def _whole_cache(cache: api.Cache, tokens: api.Cut) -> np.ndarray:
    planes = [plane for plane in cache.planes if plane.kind != "bytes"]
    shapes = {(plane.tokens, plane.heads, plane.head_dim, plane.dtype) for plane in planes}
    layers = {kind: sorted(plane.layer for plane in planes if plane.kind == kind) for kind in ("key", "value")}
    odd = len(shapes) != 1 or any(plane.kind == "latent" or plane.sequence for plane in planes)
    if odd or layers["key"] != layers["value"]:
        raise UsageError(
            "LMCache's files hold one sequence's keys and values, of one shape in every layer; this cache is not of "
            "that kind",
            code="lmcache-shape",
        )
    return np.stack([np.stack([cache.key(layer, tokens), cache.value(layer, tokens)]) for layer in layers["key"]])


def _second_loss(cache: api.Cache, keys: Sequence[int], values: Sequence[int]) -> str | None:
    """What to say of a cache whose symbols are not LMCache's."""
    number = {layer: at for at, layer in enumerate(cache.layers)}
    for plane, spec in zip(cache.header.planes, cache.header.specs, strict=True):
        if plane.kind in ("key", "value") and "bins" in spec:
            wanted = (keys if plane.kind == "key" else values)[number[plane.layer]]
            if spec["bins"] != wanted:
                return f"{plane} has {spec['bins']} bins, LMCache has {wanted}: it is quantized a second time"
    return None
