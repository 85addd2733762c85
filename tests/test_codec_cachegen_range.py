"""The range coder keeps its promises: LMCache's tables and streams for any input, whole, and safe on hostile ones."""

from __future__ import annotations

import numpy as np
import pytest

from kvzip.cache import Block, Plane
from kvzip.codecs.base import Batch
from kvzip.codecs.cachegen import CacheGen
from kvzip.coding import range_coder
from kvzip.devices.base import Device
from kvzip.errors import LimitError, UsageError
from kvzip.lmcache.blob import StreamChunk
from kvzip.lmcache.streams import decode_symbols, encode_symbols
from tests import codecs
from tests.reference import cachegen as oracle


def padded(symbols: np.ndarray) -> np.ndarray:
    """Symbols ``[planes, T, C]`` in rows of whole warps."""
    planes, tokens, channels = symbols.shape
    wide = np.zeros((planes, tokens, -(-channels // 32) * 32), np.uint8)
    wide[..., :channels] = symbols
    return wide


def random_symbols(rng: np.random.Generator, planes: int, tokens: int, channels: int) -> np.ndarray:
    """Channels of any width and mean, among them constants; alphabets of 15, 31 and all 32 symbols."""
    top = rng.choice([14, 30, 31])
    mean = rng.uniform(0, top, (planes, 1, channels))
    deviation = rng.choice([0, 0.1, 1, 3, 100], (planes, 1, channels))
    return np.clip(np.rint(rng.normal(mean, deviation, (planes, tokens, channels))), 0, top).astype(np.uint8)


def check_against_oracle(symbols: np.ndarray, device: Device) -> None:
    _, tokens, channels = symbols.shape
    tables, chunks = encode_symbols(device.to_device(padded(symbols)), tokens, channels, device)
    np.testing.assert_array_equal(tables, oracle.cdf(symbols))
    expected = oracle.encode_streams(symbols, tables)
    assert len(chunks) == len(expected)
    for chunk, (streams, lengths, count) in zip(chunks, expected, strict=True):
        assert chunk.streams.tobytes() == streams and chunk.tokens == count
        np.testing.assert_array_equal(chunk.lengths, lengths)
    restored = device.to_device(np.full_like(padded(symbols), 0xA5))
    decode_symbols(tables, chunks, restored, channels, device)
    np.testing.assert_array_equal(np.asarray(device.to_host(restored))[..., :channels], symbols)


def test_streams_are_those_of_lmcache_on_random_input(cpu: Device) -> None:
    """200 cases of tables and streams against the scalar coder, which agrees with LMCache's own files."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        tokens = int(rng.choice([1, 2, 7, 33, rng.integers(1, 80)]))
        check_against_oracle(random_symbols(rng, int(rng.integers(1, 3)), tokens, int(rng.integers(1, 7))), cpu)


@pytest.mark.parametrize("tokens", [255, 256, 257, 8192])
def test_streams_are_those_of_lmcache_in_long_calls(tokens: int, device: Device) -> None:
    check_against_oracle(random_symbols(np.random.default_rng(tokens), 1, tokens, 2), device)


def test_an_untypical_stretch_keeps_its_whole_stream(cpu: Device) -> None:
    """Where LMCache cuts a stream at 256 bytes and loses tokens, ours is longer."""
    symbols = np.full((1, 8192, 1), 15, np.uint8)
    symbols[0, :256, 0] = np.arange(256) % 31
    tables, chunks = encode_symbols(padded(symbols), 8192, 1, cpu)
    assert chunks[0].lengths.max() > 256
    restored = np.empty_like(padded(symbols))
    decode_symbols(tables, chunks, restored, 1, cpu)
    np.testing.assert_array_equal(restored[..., :1], symbols)


@pytest.mark.parametrize("pattern", ["rarest", "edges", "random"])
def test_any_table_and_any_symbols_agree_with_the_scalar_coder(pattern: str, device: Device) -> None:
    """Tables of other files, with frequencies of 1, make the longest shifts and the longest carries there are."""
    rng = np.random.default_rng(len(pattern))
    table = np.arange(33, dtype=np.uint16)
    table[17:] = 65535 - np.arange(15, -1, -1)
    symbols = {
        "rarest": np.where(rng.random((256, 32)) < 0.8, rng.integers(0, 16, (256, 32)), 31),
        "edges": rng.choice([0, 15, 16, 17, 31], (256, 32)),
        "random": rng.integers(0, 32, (256, 32)),
    }[pattern].astype(np.uint8)
    expected = [oracle.encode_stream(symbols[:, lane], table) for lane in range(32)]
    on_device = device.to_device(symbols)
    tables = device.to_device(np.ascontiguousarray(np.broadcast_to(table[:, None], (1, 33, 32))))
    blocks = np.zeros(1, range_coder.BLOCK)
    blocks["symbols"], blocks["tables"] = device.address(on_device), device.address(tables)
    blocks["tokens"], blocks["channels"] = 256, 32
    streams, _, lengths = range_coder.encode_streams(blocks, 1, device)
    assert np.asarray(device.to_host(streams)).tobytes() == b"".join(expected)
    assert np.asarray(device.to_host(lengths)).reshape(-1).tolist() == list(map(len, expected))
    chunk = StreamChunk(np.asarray(device.to_host(streams)), np.array([list(map(len, expected))], np.int32), 256)
    restored = device.to_device(np.zeros((1, 256, 32), np.uint8))
    decode_symbols(np.broadcast_to(table, (1, 32, 33)), (chunk,), restored, 32, device)
    np.testing.assert_array_equal(np.asarray(device.to_host(restored))[0], symbols)


def test_damaged_streams_decode_as_the_scalar_coder_has_it(device: Device) -> None:
    """Cut and random streams mean one thing everywhere: what is missing is zeros, no neighbour is looked into."""
    rng = np.random.default_rng(3)
    table = oracle.cdf(random_symbols(rng, 1, 50, 40))[0]
    streams = [rng.integers(0, 256, rng.integers(1, 30), np.uint8).tobytes() for _ in range(40)]
    lengths = np.array([list(map(len, streams))], np.int32)
    chunk = StreamChunk(np.frombuffer(b"".join(streams), np.uint8), lengths, 50)
    restored = device.to_device(np.zeros((1, 50, 64), np.uint8))
    decode_symbols(table[None], (chunk,), restored, 40, device)
    expected = [oracle.decode_stream(stream, table[c], 50) for c, stream in enumerate(streams)]
    np.testing.assert_array_equal(np.asarray(device.to_host(restored))[0, :, :40], np.stack(expected, axis=1))


@pytest.mark.parametrize("dtype", codecs.DTYPES)
def test_a_block_has_the_streams_of_one_call_of_lmcache(dtype: str, device: Device) -> None:
    """With zeros, sinks, NaN and Inf in it: exact tokens are coded as LMCache codes them, and come back exact."""
    array = codecs.numbers(300, 2, 24, dtype)
    array[3], array[5, 1, 2], array[6, 0, 0] = 0, np.nan, np.inf
    array[7] = array.dtype.type(1e-38) if dtype != "float16" else array[7]
    batch = codecs.batch_of([array])
    codec = codecs.bind(CacheGen(coder="range", sinks=2), batch)
    sections = codecs.encode(codec, batch, device)
    flat = array.reshape(300, -1)
    with np.errstate(invalid="ignore"):
        symbols, maxima = oracle.quantize(flat, 32)[None], oracle.max_tensor(flat)
    chunks = oracle.encode_streams(symbols, oracle.cdf(symbols))
    assert sections[0]["STRM"].tobytes() == b"".join(streams for streams, _, _ in chunks)
    lengths = sections[0]["LENS"].view(np.uint16).reshape(2, 64)
    np.testing.assert_array_equal(lengths[:, :48], [length[0] for _, length, _ in chunks])

    (restored,) = codecs.decode(codec, batch, sections, device)
    exact = [0, 1, 5, 6, *([7] if dtype != "float16" else [])]
    np.testing.assert_array_equal(codecs.bits(restored[exact]), codecs.bits(array[exact]))
    rest = np.delete(np.arange(300), exact)
    expected = oracle.dequantize(symbols[0][rest], maxima[rest], 32)
    np.testing.assert_array_equal(codecs.bits(restored[rest].reshape(expected.shape)), codecs.bits(expected))


@pytest.mark.parametrize("geometry", codecs.GEOMETRIES, ids=str)
def test_same_bytes_on_every_device(geometry: tuple[int, int, int], device: Device, cpu: Device) -> None:
    for dtype in codecs.DTYPES:
        for order in codecs.ORDERS.values():
            arrays = [order(codecs.numbers(*geometry, dtype, seed)) for seed in range(3)]
            codecs.check_same_bytes(CacheGen(coder="range", v_bins="16"), codecs.batch_of(arrays), device, cpu)


def test_blocks_of_different_length_share_a_batch(device: Device) -> None:
    """The last block of a plane is shorter than those coded with it."""
    arrays = [codecs.numbers(tokens, 1, 40, seed=tokens) for tokens in (520, 3, 256)]
    codec = CacheGen(coder="range", sinks=0)
    together = codecs.check_same_bytes(codec, codecs.batch_of(arrays), device, device)
    for array, sections in zip(arrays, together, strict=True):
        plane = Plane(0, 0, "key", len(array), 1, 40, "bfloat16")
        (alone,) = codecs.encode(
            codecs.bind(codec, codecs.batch_of(arrays)), Batch([Block((plane,), 0, len(array))], [array]), device
        )
        assert all((sections[tag] == alone[tag]).all() for tag in alone)


def test_same_numbers_as_the_other_coder(cpu: Device) -> None:
    arrays = [codecs.numbers(130, 2, 40, seed=seed) for seed in range(2)]
    batch = codecs.batch_of(arrays)
    restored = []
    for coder in ("rans", "range"):
        codec = codecs.bind(CacheGen(coder=coder), batch)
        restored.append(codecs.decode(codec, batch, codecs.encode(codec, batch, cpu), cpu))
    for one, other in zip(*restored, strict=True):
        np.testing.assert_array_equal(codecs.bits(one), codecs.bits(other))


def test_recorded_errors_are_true(cpu: Device) -> None:
    arrays = [codecs.numbers(300, 2, 40, seed=seed) for seed in range(2)]
    codecs.check_errors(CacheGen(coder="range"), codecs.batch_of(arrays), cpu)


def test_hostile_sections_are_reported(device: Device) -> None:
    """Lengths, counts and tokens that do not fit are errors; streams that decode to other symbols cannot be told."""
    arrays = [codecs.numbers(300, 2, 40, seed=seed) for seed in range(2)]
    arrays[0][7] = np.nan
    assert codecs.check_hostile(CacheGen(coder="range"), codecs.batch_of(arrays), device) > 30


def test_sixteen_bins_pay_for_fifteen_symbols(cpu: Device) -> None:
    array = codecs.numbers(256, 1, 64)
    sizes = {}
    for count in (16, 32):
        batch = codecs.batch_of([array])
        (sections,) = codecs.encode(codecs.bind(CacheGen(coder="range", k_bins=str(count)), batch), batch, cpu)
        sizes[count] = sections["CNTS"].nbytes
    assert sizes[16] < 0.75 * sizes[32] < 0.5 * 64 * 33 * 2


def test_configuration_round_trip() -> None:
    batch = codecs.batch_of([codecs.numbers(4, 1, 8)] * 24)
    codecs.check_config(CacheGen(coder="range"), batch)
    assert codecs.bind(CacheGen(coder="range"), batch).config()["coder"] == "range"


def test_what_the_range_coder_cannot_take_is_refused(cpu: Device) -> None:
    with pytest.raises(UsageError, match="coder must be one of rans, range"):
        CacheGen(coder="huffman")
    with pytest.raises(UsageError, match="62 bins are more than"):
        codecs.bind(CacheGen(coder="range", level=7), codecs.batch_of([codecs.numbers(4, 1, 8)]))
    long = codecs.batch_of([codecs.numbers(1 << 16, 1, 1)])
    with pytest.raises(LimitError, match="65535 tokens"):
        codecs.bind(CacheGen(coder="range"), long).encode(long, cpu)
