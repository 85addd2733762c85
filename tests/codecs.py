"""What every codec is held to, whatever it does inside: the checkers that the tests of all codecs call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch, Codec, Encoded
from kvzip.devices.base import Array, Device
from kvzip.errors import CorruptError

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}

GEOMETRIES = [
    # tokens, heads, head_dim: one number, idle lanes, lanes across heads, several tiles, more than a full block.
    (1, 1, 1),
    (5, 1, 3),
    (33, 2, 80),
    (64, 3, 64),
    (31, 5, 24),
    (130, 1, 33),
    (1030, 1, 40),
]

ORDERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    # Each takes [tokens, heads, head_dim] and gives equal numbers in another order of memory.
    "token-major": np.ascontiguousarray,
    "head-major": lambda x: np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2),
    "fused": lambda x: np.ascontiguousarray(np.concatenate([x, x], axis=2))[:, :, x.shape[2] :],
}


def numbers(tokens: int, heads: int, head_dim: int, dtype: str = "bfloat16", seed: int = 0) -> np.ndarray:
    """A plane of random numbers whose channels have means and deviations of their own, as keys do."""
    rng = np.random.default_rng(seed)
    mean = rng.normal(0, 2, (1, heads, head_dim))
    deviation = np.exp(rng.normal(0, 1, (1, heads, head_dim)))
    return (rng.normal(size=(tokens, heads, head_dim)) * deviation + mean).astype(DTYPES[dtype])


def batch_of(arrays: Sequence[np.ndarray], *, start: int = 0) -> Batch:
    """A batch of one block per array: keys and values of layer after layer."""
    blocks = []
    for i, array in enumerate(arrays):
        tokens, heads, head_dim = array.shape
        plane = Plane(i, i // 2, ("key", "value")[i % 2], start + tokens, heads, head_dim, array.dtype.name)
        blocks.append(Block((plane,), start, start + tokens))
    return Batch(blocks, list(arrays))


def bind(codec: Codec, batch: Batch) -> Codec:
    return codec.bind([plane for block in batch.blocks for plane in block.planes])


def as_read(sections: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Sections as a reader gives them: in one buffer, each at a multiple of 8, padding behind."""
    starts, at = {}, 0
    for tag, section in sections.items():
        starts[tag] = at
        at += -(-section.nbytes // 8) * 8
    buffer = np.zeros(at + 128, np.uint8)
    views = {}
    for tag, section in sections.items():
        view = buffer[starts[tag] : starts[tag] + section.nbytes]
        view[:] = np.asarray(section)
        views[tag] = view
    return views


def on_host(device: Device, encoded: Encoded) -> dict[str, np.ndarray]:
    return {tag: np.asarray(device.to_host(section)) for tag, section in encoded.sections.items()}


def encode(codec: Codec, batch: Batch, device: Device) -> list[dict[str, np.ndarray]]:
    """The sections of every block, on the host, within the codec's own bound."""
    return _encode(codec, batch, device)[0]


def _encode(codec: Codec, batch: Batch, device: Device) -> tuple[list[dict[str, np.ndarray]], list[Any]]:
    """Sections, and the errors that are recorded."""
    encoded = codec.encode(Batch(batch.blocks, [device.to_device(array) for array in batch.arrays]), device)
    assert len(encoded) == len(batch.blocks)
    results = [on_host(device, one) for one in encoded]
    for block, sections in zip(batch.blocks, results, strict=True):
        assert sum(section.nbytes for section in sections.values()) <= codec.bound(block)
        assert all(section.dtype == np.uint8 for section in sections.values())
    return results, [list(one.errors) for one in encoded]


def decode(codec: Codec, batch: Batch, sections: list[dict[str, np.ndarray]], device: Device) -> list[np.ndarray]:
    """The decoded planes on the host, in the memory order of ``batch``, decoded over garbage."""
    outputs = []
    for array in batch.arrays:
        garbage = np.full(array.nbytes, 0xA5, np.uint8)
        if array.strides == array.copy().strides:
            outputs.append(garbage.view(array.dtype).reshape(array.shape))
        else:
            tokens, heads, head_dim = array.shape
            outputs.append(garbage.view(array.dtype).reshape(heads, tokens, head_dim).transpose(1, 0, 2))
    on_device = [device.to_device(output) for output in outputs]
    codec.decode(Batch(batch.blocks, on_device), [_to_device(as_read(one), device) for one in sections], device)
    return [_to_host(on, array.dtype, device) for on, array in zip(on_device, batch.arrays, strict=True)]


def _to_device(sections: dict[str, np.ndarray], device: Device) -> dict[str, np.ndarray]:
    return {tag: device.to_device(section) for tag, section in sections.items()}


def _to_host(array: Array, dtype: np.dtype, device: Device) -> np.ndarray:
    """On a GPU, which has not all dtypes, the array may be integers that carry the bits."""
    return np.asarray(device.to_host(array)).view(dtype)


def check_same_bytes(codec: Codec, batch: Batch, device: Device, reference: Device) -> list[dict[str, np.ndarray]]:
    """Sections, recorded errors and what is decoded are the same on both devices; returns the sections."""
    codec = bind(codec, batch)
    (sections, errors), (expected, expected_errors) = (_encode(codec, batch, on) for on in (device, reference))
    assert repr(errors) == repr(expected_errors)
    for one, other in zip(sections, expected, strict=True):
        assert list(one) == list(other)
        for tag in one:
            np.testing.assert_array_equal(one[tag], other[tag], err_msg=tag)
    for one, other in zip(
        decode(codec, batch, sections, device), decode(codec, batch, sections, reference), strict=True
    ):
        np.testing.assert_array_equal(bits(one), bits(other))
    return sections


def check_config(codec: Codec, batch: Batch) -> None:
    """A codec bound to a cache comes back from its own configuration, and binding again changes nothing."""
    bound = bind(codec, batch)
    assert type(bound).from_config(bound.config()).config() == bound.config()
    assert bind(bound, batch).config() == bound.config()


def check_errors(codec: Codec, batch: Batch, device: Device) -> None:
    """The recorded errors are those of the decoded planes, all tokens counted."""
    codec = bind(codec, batch)
    encoded = codec.encode(batch, device)
    planes = decode(codec, batch, [on_host(device, one) for one in encoded], device)
    for i, (one, restored) in enumerate(zip(encoded, planes, strict=True)):
        original = batch.arrays[i].astype(np.float64)
        difference = restored.astype(np.float64) - original
        (errors,) = one.errors
        assert errors.squared_error == pytest.approx((difference**2).sum(), rel=1e-4, abs=1e-30)
        assert errors.energy == pytest.approx((original**2).sum(), rel=1e-4, abs=1e-30)
        assert errors.max_abs == pytest.approx(np.abs(difference).max(initial=0.0), rel=1e-6)


def damaged(sections: dict[str, np.ndarray], seed: int, count: int) -> Iterator[dict[str, np.ndarray]]:
    """The sections with bytes changed, cut, stretched, filled, missing or swapped."""
    rng = np.random.default_rng(seed)
    tags = [tag for tag in sections if sections[tag].nbytes]
    for _ in range(count):
        tag = tags[rng.integers(len(tags))]
        section = sections[tag].copy()
        match rng.integers(5):
            case 0:
                section[rng.integers(section.size, size=rng.integers(1, 9))] = rng.integers(256)
            case 1:
                section = section[: rng.integers(section.size)]
            case 2:
                section = np.concatenate([section, rng.integers(0, 256, rng.integers(1, 64), np.uint8)])
            case 3:
                section = np.full_like(section, (0, 255)[rng.integers(2)])
            case _:
                section = rng.integers(0, 256, section.size, np.uint8)
        yield {**sections, tag: section}
    for tag in sections:
        yield {other: section for other, section in sections.items() if other != tag}


def check_hostile(codec: Codec, batch: Batch, device: Device, count: int = 60) -> int:
    """Damaged sections give a CorruptError or some numbers: no other error, no write beyond the arrays. Returns
    errors.
    """
    codec = bind(codec, batch)
    good = encode(codec, batch, device)
    errors = 0
    for bad in damaged(good[0], seed=1, count=count):
        guarded = [device.to_device(np.full(array.size + 512, 7, array.dtype)) for array in batch.arrays]
        views = [g[256 : 256 + a.size].reshape(a.shape) for g, a in zip(guarded, batch.arrays, strict=True)]
        try:
            read = [_to_device(as_read(one), device) for one in (bad, *good[1:])]
            codec.decode(Batch(batch.blocks, views), read, device)
        except CorruptError:
            errors += 1
        for guard, array in zip(guarded, batch.arrays, strict=True):
            host = _to_host(guard, array.dtype, device)
            assert (host[:256] == 7).all() and (host[-256:] == 7).all()
    return errors


def check_number_refused(
    codec: Codec, batch: Batch, device: Device, tag: str, fine: np.unsignedinteger, wrong: np.unsignedinteger
) -> None:
    """The last number of a section, in any block, may have the bits ``fine`` and not those of ``wrong``."""
    good = encode(codec, batch, device)
    for which, sections in enumerate(good):
        for bad in (fine, wrong):
            numbers = sections[tag].view(bad.dtype).copy()
            numbers[-1] = bad
            changed = [*good]
            changed[which] = {**sections, tag: numbers.view(np.uint8)}
            if bad is fine:
                decode(codec, batch, changed, device)
            else:
                with pytest.raises(CorruptError):
                    decode(codec, batch, changed, device)


def bits(array: np.ndarray) -> np.ndarray:
    """The bit patterns, so that NaN equals itself and -0.0 differs from 0.0."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
