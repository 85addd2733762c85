"""cachegen keeps its promises: LMCache's symbols, the stream of the reference coder, the same bytes everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from kvzip.codecs.cachegen import CacheGen
from kvzip.codecs.cachegen import rans as rans_coder
from kvzip.coding import bins, tables
from kvzip.coding.tables import MAX_SYMBOLS
from kvzip.devices.base import Device
from kvzip.errors import UsageError
from tests import codecs
from tests.reference import cachegen as oracle
from tests.reference import golden, rans


def runs(per_layer: list[int]) -> str:
    return ",".join(f"{layer}:{count}" for layer, count in enumerate(per_layer))


@pytest.mark.parametrize("name", golden.names("cachegen"))
def test_decodes_to_the_numbers_of_lmcache(name: str, device: Device) -> None:
    """Without sinks, what comes back is what LMCache's own decoder gives, bit for bit."""
    case = golden.load_case(name)
    layers = case.input.shape[0]
    arrays = [case.input[layer, which] for layer in range(layers) for which in (0, 1)]
    batch = codecs.batch_of(arrays)
    codec = codecs.bind(
        CacheGen(k_bins=runs(case.options["k_bins"]), v_bins=runs(case.options["v_bins"]), sinks=0), batch
    )
    restored = codecs.decode(codec, batch, codecs.encode(codec, batch, device), device)
    expected = [case.decoded[layer, which] for layer in range(layers) for which in (0, 1)]
    for one, other in zip(restored, expected, strict=True):
        np.testing.assert_array_equal(codecs.bits(one), codecs.bits(other))


@pytest.mark.parametrize("dtype", codecs.DTYPES)
@pytest.mark.parametrize("level", [5, 9])
def test_symbols_are_those_of_the_reference(dtype: str, level: int, cpu: Device) -> None:
    """Levels beyond 32 symbols split them in a coded part and raw bits, and still give the reference's numbers."""
    arrays = [codecs.numbers(100, 2, 40, dtype, seed) for seed in range(4)]
    batch = codecs.batch_of(arrays)
    codec = codecs.bind(CacheGen(level=level, sinks=0), batch)
    restored = codecs.decode(codec, batch, codecs.encode(codec, batch, cpu), cpu)
    for i, (array, one) in enumerate(zip(arrays, restored, strict=True)):
        flat = array.reshape(len(array), -1)
        count = codec.describe(batch.blocks[i].plane)["bins"]
        expected = oracle.dequantize(oracle.quantize(flat, count), oracle.max_tensor(flat), count)
        np.testing.assert_array_equal(codecs.bits(one.reshape(flat.shape)), codecs.bits(expected))


def test_stream_is_that_of_the_reference_coder(cpu: Device) -> None:
    """Tables, states and words agree with a plain rANS written from the literature."""
    array = codecs.numbers(200, 1, 32)
    batch = codecs.batch_of([array])
    codec = codecs.bind(CacheGen(k_bins="32", v_bins="32", sinks=0), batch)
    (sections,) = codecs.encode(codec, batch, cpu)
    planes = sections["TABL"].view(np.uint32)
    index = sum(((planes[bit] >> np.arange(32)) & 1).astype(int) << bit for bit in range(12))
    frequencies = np.diff(tables.family(31).astype(int), axis=1)[index][:, :31]
    states, words = rans.encode(oracle.quantize(array.reshape(200, 32), 32), frequencies)
    np.testing.assert_array_equal(sections["STAT"].view(np.uint32)[1:], states)
    np.testing.assert_array_equal(sections["STRM"].view(np.uint16), words)


@pytest.mark.parametrize("order", codecs.ORDERS)
@pytest.mark.parametrize("geometry", codecs.GEOMETRIES, ids=str)
def test_same_bytes_on_every_device(geometry: tuple[int, int, int], order: str, device: Device, cpu: Device) -> None:
    for dtype in codecs.DTYPES:
        arrays = [codecs.ORDERS[order](codecs.numbers(*geometry, dtype, seed)) for seed in range(3)]
        plain = [np.ascontiguousarray(array) for array in arrays]
        ordered = codecs.check_same_bytes(CacheGen(), codecs.batch_of(arrays), device, cpu)
        contiguous = codecs.check_same_bytes(CacheGen(), codecs.batch_of(plain), device, cpu)
        for one, other in zip(ordered, contiguous, strict=True):
            assert all((one[tag] == other[tag]).all() for tag in one), "memory order shows in the format"


def test_raw_bits_are_the_same_on_every_device(device: Device, cpu: Device) -> None:
    for dtype in codecs.DTYPES:
        batch = codecs.batch_of([codecs.numbers(70, 2, 20, dtype)])
        sections = codecs.check_same_bytes(CacheGen(level=9), batch, device, cpu)
        assert "RAWB" in sections[0]


def test_raw_bits_come_with_more_than_half_of_the_alphabet() -> None:
    """Kernels for tables of half the size write none."""
    parameters = [rans_coder._symbols(count) for count in range(bins.FEWEST, bins.MOST + 1)]
    assert all(symbols <= MAX_SYMBOLS and (not raw or symbols > MAX_SYMBOLS // 2) for raw, symbols in parameters)


def test_sinks_and_unfit_tokens_are_exact(device: Device) -> None:
    """The oldest tokens, those with NaN or Inf and those too small to scale come back bit for bit; others do not
    suffer.
    """
    for dtype in codecs.DTYPES:
        array = codecs.numbers(100, 2, 24, dtype)
        array[40, 1, 3] = np.nan
        array[41, 0, 0] = -np.inf
        array[42] = array.dtype.type(1e-38) if dtype == "bfloat16" else array[42]
        array[43] = 0
        batch = codecs.batch_of([array])
        codec = codecs.bind(CacheGen(sinks=3), batch)
        (restored,) = codecs.decode(codec, batch, codecs.encode(codec, batch, device), device)
        exact = [0, 1, 2, 40, 41, *([42] if dtype == "bfloat16" else [])]
        np.testing.assert_array_equal(codecs.bits(restored[exact]), codecs.bits(array[exact]))
        assert (restored[43] == 0).all()
        rest = np.delete(np.arange(100), [*exact, 43])
        flat = array[rest].reshape(len(rest), -1)
        expected = oracle.dequantize(oracle.quantize(flat, 32), oracle.max_tensor(flat), 32)
        np.testing.assert_array_equal(codecs.bits(restored[rest].reshape(flat.shape)), codecs.bits(expected))


def test_sinks_count_from_the_start_of_the_file(cpu: Device) -> None:
    """A later block of the same plane has no sink."""
    array = codecs.numbers(64, 1, 32)
    codec = codecs.bind(CacheGen(sinks=1), codecs.batch_of([array]))
    (first,) = codecs.decode(codec, codecs.batch_of([array]), codecs.encode(codec, codecs.batch_of([array]), cpu), cpu)
    later = codecs.batch_of([array], start=1024)
    (second,) = codecs.decode(codec, later, codecs.encode(codec, later, cpu), cpu)
    assert (first[0] == array[0]).all() and (second[0] != array[0]).any()


def test_one_outlier_takes_its_token_along(cpu: Device) -> None:
    """LMCache's symbols win over outliers: a channel of 300 sends the rest of its token to zero, and no other token."""
    array = codecs.numbers(64, 1, 32) / 8
    array[10, 0, 5] = 300
    batch = codecs.batch_of([array.astype(codecs.DTYPES["bfloat16"])])
    codec = codecs.bind(CacheGen(), batch)
    (restored,) = codecs.decode(codec, batch, codecs.encode(codec, batch, cpu), cpu)
    assert restored[10, 0, 5] == 300 and np.count_nonzero(restored[10]) == 1
    assert np.count_nonzero(restored[11]) > 16


def test_recorded_errors_are_true(cpu: Device) -> None:
    arrays = [codecs.numbers(*geometry, seed=seed) for seed, geometry in enumerate([(300, 2, 40)] * 3)]
    codecs.check_errors(CacheGen(), codecs.batch_of(arrays), cpu)


def test_hostile_sections_are_reported(device: Device) -> None:
    arrays = [codecs.numbers(100, 2, 40, seed=seed) for seed in range(2)]
    arrays[0][7] = np.nan
    for level in (5, 9):
        assert codecs.check_hostile(CacheGen(level=level), codecs.batch_of(arrays), device) > 40


def test_configuration_round_trip() -> None:
    batch = codecs.batch_of([codecs.numbers(4, 1, 8)] * 24)
    for codec in (CacheGen(), CacheGen(level=8), CacheGen(k_bins="0-3:64,4-:8", v_bins="12", sinks=0)):
        codecs.check_config(codec, batch)


def test_schedule_is_that_of_lmcache() -> None:
    for layers in (10, 24, 32, 40, 80):
        keys, values = oracle.bin_schedule(layers)
        assert [bins.lookup(bins.lmcache(layers, "key"), layer) for layer in range(layers)] == keys
        assert [bins.lookup(bins.lmcache(layers, "value"), layer) for layer in range(layers)] == values
    assert all(bins.lookup(bins.lmcache(6, kind), layer) == 32 for kind in ("key", "value") for layer in range(6))


@pytest.mark.parametrize("text", ["", "x", "0-3:", "3-0:16", "0-3:2", "0-:99999", "0-3:16;4-:8"])
def test_bad_schedules_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="k_bins"):
        CacheGen(k_bins=text)


def test_layers_without_bins_are_refused() -> None:
    with pytest.raises(UsageError, match="layer 1"):
        codecs.bind(CacheGen(k_bins="0-0:32"), codecs.batch_of([codecs.numbers(4, 1, 8)] * 4))


@pytest.mark.parametrize("options", [{"level": 0}, {"level": 10}, {"sinks": -1}])
def test_bad_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        CacheGen(**options)
