"""The CacheGen oracle has LMCache's bytes: symbols, max tensors, CDFs, streams and the file around them."""

from __future__ import annotations

import pickle
import pickletools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.reference import cachegen, cachegen_blob, golden

CASES = golden.names("cachegen")


def _symbols(case: golden.Case) -> tuple[np.ndarray, np.ndarray]:
    return cachegen.quantize_cache(case.input, case.options["k_bins"], case.options["v_bins"])


@pytest.mark.parametrize("name", CASES)
def test_oracle_has_lmcaches_bins_symbols_and_max_tensors(name: str) -> None:
    case = golden.load_case(name)
    layers = len(case.input)
    assert cachegen.bin_schedule(layers) == (case.options["k_bins"], case.options["v_bins"])
    symbols, maxima = _symbols(case)
    blob = cachegen_blob.read(case.encoded)
    assert golden.same_bits(maxima, np.concatenate([blob.max_tensors_key, blob.max_tensors_value]))
    restored = cachegen.dequantize_cache(
        symbols, maxima, case.options["k_bins"], case.options["v_bins"], case.input.shape[3]
    )
    assert golden.same_bits(restored, case.decoded)


@pytest.mark.parametrize("name", CASES)
def test_oracle_has_lmcaches_tables_and_streams(name: str) -> None:
    case = golden.load_case(name)
    symbols, _ = _symbols(case)
    blob = cachegen_blob.read(case.encoded)
    tables = cachegen.cdf(symbols)
    assert np.array_equal(tables, blob.cdf)
    for ours, theirs in zip(cachegen.encode_streams(symbols, tables), blob.chunks, strict=True):
        assert ours[0] == theirs[0]
        assert np.array_equal(ours[1], theirs[1])
        assert ours[2] == theirs[2]
    assert np.array_equal(cachegen.decode_streams(blob.chunks, blob.cdf), symbols)


@pytest.mark.parametrize("name", CASES)
def test_oracle_writes_lmcaches_file(name: str) -> None:
    case = golden.load_case(name)
    blob = cachegen_blob.read(case.encoded)
    assert blob.num_heads * blob.head_size == blob.cdf.shape[1]
    assert cachegen_blob.write(blob) == case.encoded


def test_what_the_oracle_names_itself_is_read_back() -> None:
    blob = cachegen_blob.read(golden.load_case("cachegen-t300").encoded)
    blob.storage_keys = ()
    again = cachegen_blob.read(cachegen_blob.write(blob))
    assert again.storage_keys == tuple(map(str, range(7)))
    assert np.array_equal(again.cdf, blob.cdf)
    assert again.chunks[1][0] == blob.chunks[1][0]


class _Hostile:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_reading_a_hostile_pickle_runs_nothing(protocol: int) -> None:
    data = pickle.dumps({"data_chunks": _Hostile()}, protocol)
    assert any(operation.name == "REDUCE" for operation, _, _ in pickletools.genops(data))
    with pytest.raises(ValueError, match=r"the pickle (asks for|uses)"):
        cachegen_blob.read(data)


@settings(max_examples=40, deadline=None)
@given(hnp.arrays(np.uint8, st.integers(1, 300), elements=st.integers(0, 31)), st.integers(0, 2**32 - 1))
def test_coder_survives_any_symbols_under_any_table(symbols: np.ndarray, seed: int) -> None:
    """A channel may be coded under a table made of other tokens: every symbol still has a frequency of at least one."""
    others = np.random.default_rng(seed).integers(0, 3, (50, 1)).astype(np.uint8)
    for table in (cachegen.cdf(symbols[:, None])[0], cachegen.cdf(others)[0]):
        stream = cachegen.encode_stream(symbols, table)
        assert np.array_equal(cachegen.decode_stream(stream, table, len(symbols)), symbols)
