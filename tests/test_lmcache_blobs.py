"""LMCache's files come in and go out bit for bit: blobs of CacheGen, bytes of its fp8 serde."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvzip
from kvzip.codecs.cachegen import CacheGen
from kvzip.devices.base import Device
from kvzip.errors import CorruptError, KvzipError, UnsupportedError, UsageError
from kvzip.lmcache import cachegen, fp8
from kvzip.lmcache.blob import CacheGenBlob, read_blob, write_blob
from kvzip.lmcache.convert import export_cache, import_files
from tests import codecs
from tests.reference import cachegen_blob, golden

CASES = golden.names("cachegen")


def runs(per_layer: list[int]) -> str:
    return ",".join(f"{layer}:{count}" for layer, count in enumerate(per_layer))


def bins_of(case: golden.Case) -> dict[str, str]:
    return {"k_bins": runs(case.options["k_bins"]), "v_bins": runs(case.options["v_bins"])}


@pytest.mark.parametrize("name", CASES)
def test_blobs_are_lmcaches_byte_for_byte(name: str, cpu: Device) -> None:
    """Quantized, coded and pickled by us: the bytes that LMCache wrote, with its names of the storages."""
    case = golden.load_case(name)
    ours = cachegen.encode(case.input, case.options["k_bins"], case.options["v_bins"], cpu)
    keys = cachegen_blob.read(case.encoded).storage_keys
    assert write_blob(ours, keys) == case.encoded
    assert write_blob(read_blob(case.encoded), keys) == case.encoded


@pytest.mark.parametrize("name", CASES)
def test_blobs_decode_to_what_lmcache_decodes(name: str, device: Device) -> None:
    case = golden.load_case(name)
    decoded = cachegen.decode(read_blob(case.encoded), case.options["k_bins"], case.options["v_bins"], device)
    assert golden.same_bits(decoded, case.decoded)


@pytest.mark.parametrize("coder", ["rans", "range"])
@pytest.mark.parametrize("name", CASES)
def test_import_loses_nothing_and_export_gives_the_blob_back(name: str, coder: str, cpu: Device) -> None:
    """What a .kvz made of a blob restores is what LMCache decodes of the blob; exported, it is the blob again."""
    case = golden.load_case(name)
    made = import_files([(name, case.encoded)], None, coder=coder, device=cpu, **bins_of(case))
    assert golden.same_bits(kvzip.decompress(made)["kv_chunk"], case.decoded)
    back = export_bytes(made, device=cpu, **bins_of(case))
    assert write_blob(read_blob(back)) == write_blob(read_blob(case.encoded))


def export_bytes(made: bytes, **options: Any) -> bytes:
    with kvzip.open(made) as cache:
        return export_cache(cache, **options)


def chunked(tokens: int, size: int, cpu: Device, layers: int = 2, channels: int = 64) -> tuple[np.ndarray, list[bytes]]:
    """A cache and LMCache's blobs of its chunks."""
    rng = np.random.default_rng(0)
    kv = codecs.numbers(tokens, layers * 2, channels).reshape(tokens, layers, 2, 1, channels).transpose(1, 2, 0, 3, 4)
    kv = np.ascontiguousarray(kv + rng.normal(size=kv.shape).astype(kv.dtype))
    keys, values = cachegen.lmcache_bins(layers)
    pieces = [np.ascontiguousarray(kv[:, :, start : start + size]) for start in range(0, tokens, size)]
    return kv, [write_blob(cachegen.encode(piece, keys, values, cpu)) for piece in pieces]


def test_chunks_become_one_file_and_are_smaller(cpu: Device) -> None:
    """At most 0.60 of LMCache's blobs of 256 tokens, 0.85 of one of 1024; parts are blobs again."""
    kv, blobs = chunked(1024, 256, cpu, channels=256)
    files = [(f"chunk {i}", data) for i, data in enumerate(blobs)]
    small = import_files([files[0]], None, device=cpu)
    assert len(small) < 0.60 * len(blobs[0])
    together = import_files(files, None, device=cpu)
    (_, whole), *_ = [("", chunked(1024, 1024, cpu, channels=256)[1][0])]
    assert len(together) < 0.85 * len(whole)
    assert len(together) < 0.60 * sum(map(len, blobs))
    for i, data in enumerate(blobs):
        part = export_bytes(together, tokens=(256 * i, 256 * (i + 1)), device=cpu)
        assert part == write_blob(read_blob(data))
    restored = kvzip.decompress(together)["kv_chunk"]
    assert restored.shape == kv.shape


def test_poisoned_tokens_come_back_as_lmcache_decodes_them(cpu: Device) -> None:
    """NaN and Inf spoil their token in LMCache; importing such a blob spoils nothing more."""
    kv = codecs.numbers(40, 4, 16).reshape(2, 2, 40, 1, 16)
    kv[0, 0, 3, 0, 5], kv[1, 1, 7, 0, 0], kv[1, 0, 9] = np.nan, np.inf, 0
    data = write_blob(cachegen.encode(kv, [32, 32], [32, 32], cpu))
    made = import_files([("blob", data)], None, device=cpu)
    with np.errstate(invalid="ignore"):
        expected = cachegen.decode(read_blob(data), [32, 32], [32, 32], cpu)
    np.testing.assert_array_equal(codecs.bits(kvzip.decompress(made)["kv_chunk"]), codecs.bits(expected))


def test_wrong_bins_are_noticed(cpu: Device) -> None:
    """A blob does not say its bins; with others its symbols would make no sense, and the error says what to do."""
    case = golden.load_case("cachegen-t7-fp16")
    with pytest.raises(UnsupportedError, match="k_bins") as error:
        import_files([("blob", case.encoded)], None, k_bins="16", v_bins=bins_of(case)["v_bins"], device=cpu)
    assert error.value.code == "lmcache-symbols"


def test_a_second_quantization_is_told(cpu: Device) -> None:
    arrays = {"kv_chunk": codecs.numbers(64, 4, 32).reshape(2, 2, 64, 1, 32)}
    told: list[str] = []
    export_bytes(kvzip.compress(arrays, codec="cachegen", level=7), device=cpu, notice=told.append)
    assert len(told) == 1 and "62 bins" in told[0]
    export_bytes(kvzip.compress(arrays, codec="cachegen"), device=cpu, notice=told.append)
    assert len(told) == 1


def spoiled(blob: CacheGenBlob) -> dict[str, CacheGenBlob]:
    chunk = blob.chunks[0]
    flat = blob.tables.copy()
    flat[0, 0, 5] = flat[0, 0, 4]
    started = blob.tables.copy()
    started[0, 0, 0] = 1
    longer, empty = chunk.lengths.copy(), chunk.lengths.copy()
    longer[0, 0] += 1
    empty[0, 0], empty[0, 1] = 0, empty[0, 0] + empty[0, 1]
    return {
        "heads": replace(blob, heads=blob.heads + 1),
        "no heads": replace(blob, heads=-1, head_dim=-blob.heads * blob.head_dim),
        "tables": replace(blob, tables=blob.tables[:-1]),
        "entries": replace(blob, tables=blob.tables[..., :-1]),
        "flat table": replace(blob, tables=flat),
        "table from 1": replace(blob, tables=started),
        "maxima": replace(blob, value_maxima=blob.value_maxima[:, :-1]),
        "types": replace(blob, value_maxima=blob.value_maxima.astype(np.float32)),
        "no chunks": replace(blob, chunks=()),
        "chunk tokens": replace(blob, chunks=(replace(chunk, tokens=chunk.tokens + 1),)),
        "long chunk": replace(blob, chunks=(replace(chunk, tokens=1 << 40), replace(chunk, tokens=7 - (1 << 40)))),
        "stream bytes": replace(blob, chunks=(replace(chunk, streams=chunk.streams[:-1]),)),
        "lengths": replace(blob, chunks=(replace(chunk, lengths=longer),)),
        "empty stream": replace(blob, chunks=(replace(chunk, lengths=empty),)),
        "negative length": replace(blob, chunks=(replace(chunk, lengths=-chunk.lengths),)),
        "lengths' shape": replace(blob, chunks=(replace(chunk, lengths=chunk.lengths.T.copy()),)),
    }


@pytest.mark.parametrize("spoil", spoiled(read_blob(golden.load_case("cachegen-t7-fp16").encoded)))
def test_blobs_whose_parts_do_not_fit_are_refused(spoil: str) -> None:
    """Before anything is allocated or decoded by what they say."""
    blob = spoiled(read_blob(golden.load_case("cachegen-t7-fp16").encoded))[spoil]
    with pytest.raises(CorruptError) as error:
        read_blob(write_blob(blob))
    assert error.value.code in ("lmcache-blob", "lmcache-table", "lmcache-lengths")


def test_damaged_streams_are_decoded_to_some_numbers(cpu: Device) -> None:
    """Nothing in LMCache's format tells a damaged stream; importing one says no more than that, or refuses it."""
    case = golden.load_case("cachegen-t255")
    sound = read_blob(case.encoded)
    rng = np.random.default_rng(1)
    for _ in range(20):
        streams = sound.chunks[0].streams.copy()
        streams[rng.integers(len(streams), size=20)] = rng.integers(256)
        data = write_blob(replace(sound, chunks=(replace(sound.chunks[0], streams=streams),)))
        try:
            import_files([("blob", data)], None, device=cpu)
        except KvzipError as error:
            assert error.code == "lmcache-symbols"


def test_files_of_different_caches_are_not_joined(cpu: Device) -> None:
    files = [(name, golden.load_case(name).encoded) for name in ("cachegen-t1", "cachegen-t255")]
    with pytest.raises(UsageError, match="cachegen-t255 is bfloat16") as error:
        import_files(files, None, device=cpu)
    assert error.value.code == "lmcache-mixed"


@pytest.mark.parametrize("name", golden.names("fp8"))
def test_fp8_bytes_are_lmcaches(name: str, cpu: Device) -> None:
    """In: what comes back is what LMCache casts back. Out: the same bytes, of the cache and of the file made of it."""
    case = golden.load_case(name)
    _, layers, tokens, channels = case.input.shape
    geometry = fp8.Geometry(layers, tokens, 1, channels, case.input.dtype.name)
    file_format = "fp8-" + case.options["fp8_dtype"].removeprefix("float8_")
    made = import_files([(name, case.encoded)], None, file_format=file_format, geometry=geometry, device=cpu)
    restored = kvzip.decompress(made)["kv_chunk"].swapaxes(0, 1).reshape(case.decoded.shape)
    np.testing.assert_array_equal(restored.astype(np.float32), case.decoded.astype(np.float32))
    assert export_bytes(made, file_format=file_format, device=cpu) == case.encoded
    kv = np.ascontiguousarray(case.input.reshape(2, *geometry.shape[:1], *geometry.shape[2:]).swapaxes(0, 1))
    assert fp8.write_fp8(kv, case.options["fp8_dtype"], cpu) == case.encoded


def test_fp8_bytes_must_fill_the_shape(cpu: Device) -> None:
    geometry = fp8.Geometry(2, 3, 1, 8)
    for data in (b"", bytes(95), bytes(97)):
        with pytest.raises(CorruptError, match="make 96"):
            import_files([("f", data)], None, file_format="fp8-e4m3fn", geometry=geometry, device=cpu)
    with pytest.raises(UsageError, match="shape"):
        import_files([("f", bytes(96))], None, file_format="fp8-e4m3fn", device=cpu)


def test_caches_that_lmcache_has_no_files_for_are_refused(cpu: Device) -> None:
    odd: list[dict[str, Any]] = [
        {"layers.0.key": codecs.numbers(2, 8, 16), "layers.0.value": codecs.numbers(2, 8, 16)[:, :, :8].copy()},
    ]
    for arrays in odd:
        made = kvzip.compress(arrays, codec="raw", notice=lambda _: None)
        with pytest.raises(UsageError) as error:
            export_bytes(made, device=cpu)
        assert error.value.code == "lmcache-shape"


def test_unknown_formats_are_refused(cpu: Device) -> None:
    for run in (
        lambda: import_files([("f", b"")], None, file_format="kivi", device=cpu),
        lambda: export_bytes(
            kvzip.compress({"kv_chunk": codecs.numbers(8, 4, 32).reshape(2, 2, 8, 1, 32)}),
            file_format="kivi",
            device=cpu,
        ),
    ):
        with pytest.raises(UsageError, match="cachegen, fp8-e4m3fn, fp8-e5m2"):
            run()


def test_bins_beyond_lmcaches_are_refused(cpu: Device) -> None:
    made = kvzip.compress({"kv_chunk": codecs.numbers(8, 4, 32).reshape(2, 2, 8, 1, 32)}, codec=CacheGen())
    with pytest.raises(UsageError, match="at most 32 bins"):
        export_bytes(made, k_bins="64", device=cpu)
