"""Any cache, in any order of memory, by any codec, comes back under the same names, shapes and metadata."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import kvzip
from kvzip.codecs import available_codecs, get_codec
from kvzip.devices.cpu import Cpu
from kvzip.errors import UsageError
from tests.tensor_files import Pipe

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
ORDERS = {
    # The layout, and the shape of one layer's keys.
    "T,H,D": lambda t, h, d: (t, h, d),
    "H,T,D": lambda t, h, d: (h, t, d),
    "B,H,T,D": lambda t, h, d: (2, h, t, d),
}
CPU = Cpu(threads=1)


def usable_codecs() -> list[str]:
    """Those that need nothing but a cache."""
    found = []
    for name in available_codecs():
        try:
            get_codec(name)
            found.append(name)
        except UsageError:
            pass
    return found


@dataclass(frozen=True)
class Case:
    """A cache to be made, and how it is to be compressed."""

    layers: int
    tokens: int
    heads: int
    head_dim: int
    dtype: str
    order: str
    codec: str
    block_tokens: int
    seed: int
    others: bool
    special: bool

    def file(self) -> bytes:
        """The cache as a safetensors file."""
        rng = np.random.default_rng(self.seed)
        shape = ORDERS[self.order](self.tokens, self.heads, self.head_dim)
        arrays: dict[str, Any] = {}
        for layer in range(self.layers):
            for kind in ("key", "value"):
                values = rng.standard_normal(shape).astype(np.float32)
                if self.special:
                    values.reshape(-1)[:: max(1, values.size // 5)] = [np.nan, np.inf, -0.0, 0.0, 1e-40, -65504.0][
                        layer % 6
                    ]
                arrays[f"layers.{layer}.{kind}"] = values.astype(DTYPES[self.dtype])
        if self.others:
            arrays |= {"token_ids": np.arange(self.tokens), "empty": np.zeros((0, 3), np.uint8)}
        return safetensors.numpy.save(arrays, metadata={"model": "m", "é": "\n"})


CASES = st.builds(
    Case,
    layers=st.integers(1, 3),
    tokens=st.integers(1, 70),
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 40),
    dtype=st.sampled_from(list(DTYPES)),
    order=st.sampled_from(list(ORDERS)),
    codec=st.sampled_from(usable_codecs()),
    block_tokens=st.integers(1, 80),
    seed=st.integers(0, 1 << 30),
    others=st.booleans(),
    special=st.booleans(),
)


@settings(max_examples=50, deadline=None)
@given(CASES, st.data())
def test_any_cache_comes_back(case: Case, data: st.DataObject) -> None:
    """Header bytes exactly; all bytes if the codec is lossless; parts as the same parts of the whole; and a pipe gives
    the bytes that a file gives.
    """
    source = case.file()
    options = {"codec": case.codec, "layout": case.order, "block_tokens": case.block_tokens, "device": CPU}
    packed = kvzip.compress(Pipe(source), **options)
    with kvzip.open(packed, device=CPU) as cache:
        whole = cache.tensors()
        start = data.draw(st.integers(0, case.tokens - 1), label="start")
        stop = data.draw(st.integers(start + 1, case.tokens), label="stop")
        key = cache.key(case.layers - 1, (start, stop))
        np.testing.assert_array_equal(bits(key), bits(cache.key(case.layers - 1)[start:stop]))
        assert key.shape == (stop - start, case.heads, case.head_dim)
    out = io.BytesIO()
    kvzip.decompress(Pipe(packed), out, device=CPU, notice=lambda _: None)
    restored = out.getvalue()
    header = 8 + int.from_bytes(source[:8], "little")
    assert len(restored) == len(source)
    assert restored[:header] == source[:header]
    expected = dict(safetensors.deserialize(source))
    for name, tensor in safetensors.deserialize(restored):
        assert (tensor["dtype"], tensor["shape"]) == (expected[name]["dtype"], expected[name]["shape"])
        assert bytes(tensor["data"]) == whole[name].tobytes()
    if get_codec(case.codec).lossless:
        assert restored == source


@pytest.mark.parametrize("codec", usable_codecs())
def test_a_file_and_a_pipe_give_the_same_bytes(codec: str, tmp_path: Any) -> None:
    """And compressing twice does: nothing of time, place or order of threads is in a file."""
    source = Case(2, 70, 2, 24, "bfloat16", "H,T,D", codec, 32, 5, True, True).file()
    path = tmp_path / "kv.safetensors"
    path.write_bytes(source)
    options = {"codec": codec, "layout": "H,T,D", "block_tokens": 32}
    first = kvzip.compress(path, device=CPU, **options)
    assert first == kvzip.compress(Pipe(source), device=Cpu(threads=2), **options)
    assert first == kvzip.compress(path, device=CPU, **options)


def bits(array: np.ndarray) -> np.ndarray:
    """Bit patterns: NaN equals itself."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
