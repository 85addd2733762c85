"""Threat: a safetensors file that the library refuses gets through, or a sound one does not.

The library is the oracle: everything it refuses must be refused, and everything it accepts must come out the same, but
for the four points in which ``kvzip.tensorfile.header`` differs on purpose.
"""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from kvzip.errors import CorruptError, KvzipError, UnsupportedError
from kvzip.tensorfile import DTYPES, from_arrays, open_tensors

ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
TAGS = [tag for tag in DTYPES if tag != "F8E4M3FN"]


def file_of(header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def ours(content: bytes) -> dict[str, tuple[str, list[int], bytes]] | str:
    try:
        with open_tensors(io.BytesIO(content)) as source:
            source.finish()
            result = {}
            for tensor in source.tensors:
                buffer = bytearray(tensor.nbytes)
                if tensor.nbytes and source.seekable:
                    source.read_into(0, tensor.offset, buffer)
                else:
                    buffer[:] = content[tensor.offset : tensor.offset + tensor.nbytes]
                result[tensor.name] = (tensor.tag, list(tensor.shape), bytes(buffer))
            return result
    except KvzipError as error:
        assert str(error), "an error without a message"
        return f"refused: {error.code}"


def theirs(content: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    try:
        return {
            name: (value["dtype"], list(value["shape"]), bytes(value["data"]))
            for name, value in safetensors.deserialize(content)
        }
    except safetensors.SafetensorError:
        return None


@st.composite
def sound_files(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    entries: dict[str, Any] = {}
    position = 0
    for name in draw(
        st.lists(st.text(max_size=4).filter(lambda text: text != "__metadata__"), unique=True, max_size=4)
    ):
        tag = draw(st.sampled_from(TAGS))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        bits = int(np.prod(shape, dtype=np.int64)) * DTYPES[tag].bits
        if bits % 8:
            shape, bits = [*shape, 8], bits * 8
        entries[name] = {"dtype": tag, "shape": shape, "data_offsets": [position, position + bits // 8]}
        position += bits // 8
    if draw(st.booleans()):
        entries["__metadata__"] = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
    keys = draw(st.permutations(list(entries)))
    return {key: entries[key] for key in keys}, draw(st.binary(min_size=position, max_size=position))


@given(sound_files(), st.sampled_from([b"", b" ", b"  \n\t\r"]))
def test_sound_files_of_any_dtype_and_order_come_out_as_the_library_has_them(
    file: tuple[dict[str, Any], bytes], padding: bytes
) -> None:
    content = file_of(json.dumps(file[0]).encode() + padding, file[1])
    assert theirs(content) is not None
    assert ours(content) == theirs(content)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(sound_files(), st.data())
def test_a_changed_entry_is_judged_as_the_library_judges_it(
    file: tuple[dict[str, Any], bytes], data: st.DataObject
) -> None:
    entries, content = file
    names = [name for name in entries if name != "__metadata__"]
    if names:
        entry = entries[data.draw(st.sampled_from(names))]
        key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "fmt", "shape item", "offset item"]))
        if key in entry or key == "fmt":
            entry[key] = data.draw(JSON_VALUES)
        elif key == "shape item" and entry["shape"]:
            entry["shape"][-1] = data.draw(st.integers(-1, 2**65))
        else:
            entry["data_offsets"][data.draw(st.integers(0, 1))] = data.draw(st.integers(-1, 40))
    whole = file_of(entries, content)
    expected = theirs(whole)
    assert ours(whole) == expected if expected is not None else str(ours(whole)).startswith("refused")


@given(sound_files(), st.data())
def test_damaged_bytes_never_pass_where_the_library_refuses_them(
    file: tuple[dict[str, Any], bytes], data: st.DataObject
) -> None:
    whole = bytearray(file_of(*file))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    result = ours(bytes(whole))
    if theirs(bytes(whole)) is None:
        assert str(result).startswith("refused")


@given(sound_files(), st.data())
def test_every_truncation_is_refused(file: tuple[dict[str, Any], bytes], data: st.DataObject) -> None:
    whole = file_of(*file)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(CorruptError), open_tensors(io.BytesIO(cut)) as source:
        for tensor in source.tensors:
            source.read_into(0, tensor.offset, bytearray(tensor.nbytes))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "safetensors-truncated"),
        (b"short", "safetensors-truncated"),
        (b"just some text, no tensors at all", "safetensors-header-length"),
        (file_of(b"{}", length=10**12), "safetensors-header-length"),
        (file_of(b"{}", length=90_000_000), "safetensors-truncated"),
        (file_of(b" {}"), "safetensors-json"),
        (file_of(b"{}\0"), "safetensors-json"),
        (file_of(b'{"a":' * 3000), "safetensors-json"),
        (file_of(b'{"a":' + b"9" * 5000 + b"}"), "safetensors-json"),
        (file_of(b'{"\xff":1}'), "safetensors-utf8"),
        (file_of(b'{"\\ud800":1}'), "safetensors-utf8"),
        (file_of(b'{"a":1,"a":1}'), "safetensors-json"),
        (file_of({"__metadata__": {"a": 1}}), "safetensors-metadata"),
        (file_of({"a": 1}), "safetensors-entry"),
        (file_of({"a": {"dtype": "F32", "data_offsets": [0, 0]}}), "safetensors-entry"),
        (file_of({"a": {**ENTRY, "shape": [True]}}, b"0000"), "safetensors-entry"),
        (file_of({"a": {**ENTRY, "dtype": "F128"}}, b"0000"), "safetensors-dtype"),
        (file_of({"a": {**ENTRY, "shape": [2]}}, b"0000"), "safetensors-size"),
        (file_of({"a": {**ENTRY, "shape": [2**63, 2]}}, b"0000"), "safetensors-overflow"),
        (file_of({"a": {**ENTRY, "shape": [2**62]}}, b"0000"), "safetensors-overflow"),
        (file_of({"a": {**ENTRY, "data_offsets": [4, 8]}}, b"00000000"), "safetensors-hole"),
        (file_of({"a": {**ENTRY, "data_offsets": [4, 0]}}, b"0000"), "safetensors-hole"),
        (file_of({"a": ENTRY, "b": ENTRY}, b"0000"), "safetensors-overlap"),
    ],
)
def test_bad_files_get_a_named_error(content: bytes, code: str) -> None:
    with pytest.raises((CorruptError, UnsupportedError)) as caught:
        open_tensors(io.BytesIO(content))
    assert caught.value.code == code


def test_errors_name_the_tensor() -> None:
    with pytest.raises(CorruptError, match=r"'layers\.3\.key'"):
        open_tensors(io.BytesIO(file_of({"layers.3.key": {**ENTRY, "shape": [5]}}, b"0000")))


def test_trailing_bytes_of_a_pipe_are_refused_at_its_end() -> None:
    with open_tensors(io.BytesIO(file_of({"a": ENTRY}, b"00000"))) as source:
        source.read_into(0, source.tensors[0].offset, bytearray(4))
        with pytest.raises(CorruptError) as caught:
            source.finish()
    assert caught.value.code == "safetensors-trailing-bytes"


def test_lmcache_gds_entries_are_understood() -> None:
    """Foreign keys, a nested ``__metadata__`` and LMCache's spelling of fp8."""
    entry = {
        "dtype": "F8E4M3FN",
        "shape": [4],
        "data_offsets": [0, 4],
        "fmt": 1,
        "__metadata__": {"lmcache_version": "1"},
    }
    with open_tensors(io.BytesIO(file_of({"kvcache": entry}, b"0000"))) as source:
        (tensor,) = source.tensors
    assert (tensor.tag, tensor.dtype, tensor.extra["fmt"]) == ("F8E4M3FN", "float8_e4m3fn", 1)


NUMPY_DTYPES = [
    "float16",
    "float32",
    "float64",
    "int8",
    "uint8",
    "int64",
    "bool",
    ml_dtypes.bfloat16,
    "uint32",
    "complex64",
]


@given(
    st.dictionaries(
        st.text(max_size=5).filter(lambda text: text != "__metadata__"),
        st.tuples(st.sampled_from(NUMPY_DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    )
)
def test_arrays_get_the_header_that_the_library_writes(spec: dict[str, tuple[Any, list[int]]]) -> None:
    arrays = {name: np.ones(shape, dtype) for name, (dtype, shape) in spec.items()}
    source = from_arrays(arrays, {"who": "me"})
    content = bytearray(source.files[0].size)
    source.read_into(0, 0, content)
    assert bytes(content) == safetensors.numpy.save(arrays, {"who": "me"})
