"""lossless keeps its promises: every bit of any input comes back, in fewer bytes wherever there is a gain."""

from __future__ import annotations

import hashlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch
from kvzip.codecs.lossless import Lossless, floats
from kvzip.coding import octaves
from kvzip.devices.base import Device
from kvzip.devices.cpu import Cpu
from tests import codecs
from tests.reference import lossless as oracle

FLOATS = {
    **codecs.DTYPES,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
OTHERS = {name: np.dtype(name) for name in ("int8", "uint16", "int32", "float64", "float8_e8m0fnu", "bool")}


def numbers(tokens: int, heads: int, head_dim: int, dtype: str, seed: int = 0) -> np.ndarray:
    return codecs.numbers(tokens, heads, head_dim, "float32", seed).astype(np.dtype(dtype))


def random_bits(shape: tuple[int, int, int], dtype: str, seed: int = 0) -> np.ndarray:
    """Any bit patterns: NaN of all kinds, infinities, subnormals."""
    dtype_ = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape[:2], shape[2] * dtype_.itemsize), np.uint8)
    return (raw & 1).view(bool) if dtype == "bool" else raw.view(dtype_)


def bytes_batch(data: bytes) -> Batch:
    """A tensor that is no KV."""
    array = np.frombuffer(data, np.uint8).reshape(-1, 1, 1).copy()
    return Batch([Block((Plane(0, 0, "bytes", len(data), 1, 1, "uint8"),), 0, len(data))], [array])


def check_exact(batch: Batch, device: Device) -> list[dict[str, np.ndarray]]:
    sections = codecs.encode(Lossless(), batch, device)
    for array, restored in zip(batch.arrays, codecs.decode(Lossless(), batch, sections, device), strict=True):
        assert array.tobytes() == restored.tobytes()
    return sections


def ratio(batch: Batch, device: Device) -> float:
    stored = sum(section.nbytes for one in check_exact(batch, device) for section in one.values())
    return sum(array.nbytes for array in batch.arrays) / stored


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS])
def test_every_bit_comes_back(dtype: str, device: Device) -> None:
    """Of numbers, and of random bits, whatever the geometry and the order of memory."""
    orders = list(codecs.ORDERS.values())
    for i, geometry in enumerate(codecs.GEOMETRIES[:-1]):
        check_exact(codecs.batch_of([orders[i % 3](numbers(*geometry, dtype))]), device)
        check_exact(codecs.batch_of([orders[i % 3](random_bits(geometry, dtype))]), device)


@pytest.mark.parametrize("dtype", FLOATS)
def test_unusual_numbers_come_back(dtype: str, device: Device) -> None:
    """Rows of NaN, Inf and zeros, subnormals, constant channels, channels far apart: in one plane, coded as floats."""
    array = numbers(100, 2, 24, dtype)
    special = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0]
    with np.errstate(over="ignore"):
        special += [float(ml_dtypes.finfo(array.dtype).smallest_subnormal), float(ml_dtypes.finfo(array.dtype).max)]
    for row, value in enumerate(special):
        array[20 + row] = value
    array[50:60] = 0
    array[:, 0, 3] = 1.25
    array[:, 1, 5] = 0
    array[:, 1, 6] *= np.array(2.0**-6, array.dtype)
    batch = codecs.batch_of([array])
    check_exact(batch, device)
    (sections,) = floats.encode(batch, device)
    (restored,) = codecs.decode(Lossless(), batch, [sections], device)
    assert "ESCP" in sections and restored.tobytes() == array.tobytes()


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=3000), st.integers(1, 400))
def test_any_bytes_come_back(data: bytes, times: int) -> None:
    """Tensors that are no KV: any length, one strip or several, bytes that occur once or always."""
    check_exact(bytes_batch(data * times), Cpu(threads=1))


@pytest.mark.parametrize("order", codecs.ORDERS)
@pytest.mark.parametrize("geometry", codecs.GEOMETRIES, ids=str)
def test_same_bytes_on_every_device(geometry: tuple[int, int, int], order: str, device: Device, cpu: Device) -> None:
    for dtype in ("bfloat16", "float32", "float8_e4m3fn", "int8"):
        array = codecs.ORDERS[order](numbers(*geometry, dtype))
        codecs.check_same_bytes(Lossless(), codecs.batch_of([array]), device, cpu)


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_independent_reader_agrees(dtype: str, cpu: Device) -> None:
    """The format page is enough to read the floats' form: a slow decoder written from it gives the same bits."""
    array = numbers(70, 1, 40, dtype)
    array[33:36] = 0
    array[40] = np.inf
    if dtype == "float32":
        array = (array.view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32)
    (sections,) = floats.encode(codecs.batch_of([array]), cpu)
    restored = oracle.decode_floats(sections, 70, 40, dtype, octaves.family())
    np.testing.assert_array_equal(restored, codecs.bits(array).reshape(70, 40))


def test_an_independent_reader_agrees_on_bytes(cpu: Device) -> None:
    data = np.random.default_rng(0).geometric(0.05, 70001).clip(0, 255).astype(np.uint8).tobytes()
    (sections,) = codecs.encode(Lossless(), bytes_batch(data), cpu)
    assert oracle.decode_bytes(sections, len(data)) == data


def test_normal_numbers_shrink_as_promised(cpu: Device) -> None:
    """bf16 by a third: sign and exponent of a normal distribution carry 3.55 bits in place of 9."""
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(1024, 2, 64)).astype(np.float32)
    for dtype, least in {"bfloat16": 1.5, "float16": 1.17, "float32": 1.2, "float8_e4m3fn": 1.2}.items():
        assert ratio(codecs.batch_of([normal.astype(np.dtype(dtype))]), cpu) > least


def test_what_is_nearly_nothing_takes_nearly_nothing(cpu: Device) -> None:
    """An unfilled cache, its unfilled end, constants, integers of few values, mantissas that once were bfloat16."""
    zeros = np.zeros((1024, 2, 64), np.float16)
    assert ratio(codecs.batch_of([zeros]), cpu) > 1000
    half_full = numbers(1024, 2, 64, "bfloat16")
    full = ratio(codecs.batch_of([half_full]), cpu)
    half_full[512:] = 0
    assert ratio(codecs.batch_of([half_full]), cpu) > 1.9 * full
    assert ratio(codecs.batch_of([zeros + np.float16(1)]), cpu) > 50
    assert ratio(bytes_batch(bytes(100_000)), cpu) > 200
    assert ratio(bytes_batch(np.arange(3000, dtype=np.int64).tobytes()), cpu) > 3
    widened = codecs.numbers(1024, 2, 64, "bfloat16").astype(np.float32)
    assert ratio(codecs.batch_of([widened]), cpu) > 3


def test_what_cannot_shrink_does_not_grow(cpu: Device) -> None:
    """Random bits are stored as they are: not a byte more than their own."""
    for dtype in ("bfloat16", "uint16"):
        (sections,) = check_exact(codecs.batch_of([random_bits((100, 2, 16), dtype)]), cpu)
        assert list(sections) == ["DATA"] and sections["DATA"].nbytes == 6400


@pytest.mark.parametrize("form", ["HEAD", "FREQ", "DATA"])
def test_hostile_sections_are_reported(form: str, device: Device) -> None:
    array = {
        "HEAD": numbers(100, 2, 40, "bfloat16"),
        "FREQ": np.random.default_rng(0).integers(-3, 4, (100, 2, 40)).astype(np.int8),
        "DATA": random_bits((100, 2, 40), "float16"),
    }[form]
    array[7] = 0
    if form == "HEAD":
        array[9] = np.nan
    batch = codecs.batch_of([array])
    (sections,) = codecs.encode(Lossless(), batch, device)
    assert form in sections
    assert codecs.check_hostile(Lossless(), batch, device, count=80) > (25 if form == "HEAD" else 15)


def test_tables_never_change() -> None:
    """Files depend on every one of the octave family's counts."""
    digest = hashlib.sha256(octaves.family().astype("<u2").tobytes()).hexdigest()
    assert digest[:16] == "f97046803a561965"


def test_configuration_round_trip() -> None:
    codecs.check_config(Lossless(), codecs.batch_of([codecs.numbers(4, 1, 8)]))
