"""Threat: bytes get lost, moved or invented between files, folders, pipes and arrays, or a bad source passes."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from kvzip.errors import CorruptError, RefusedError, UsageError
from kvzip.tensorfile import (
    ArraySink,
    SourceFile,
    TensorSource,
    from_arrays,
    header_bytes,
    open_raw,
    open_sink,
    open_tensors,
    parse_header,
    tensors_of,
)
from tests.tensor_files import SAMPLES, Pipe, copy_through

PERLAYER = SAMPLES / "perlayer.safetensors"


def read_all(source: TensorSource) -> dict[str, bytes]:
    found = {}
    for tensor in source.tensors:
        buffer = bytearray(tensor.nbytes)
        source.read_into(tensor.file, tensor.offset, buffer)
        found[tensor.label] = bytes(buffer)
    source.finish()
    return found


def test_a_file_and_a_pipe_give_the_same_tensors() -> None:
    with open_tensors(PERLAYER) as file, open_tensors(Pipe(PERLAYER.read_bytes())) as pipe:  # type: ignore[arg-type]
        assert file.seekable and not pipe.seekable
        assert (file.tensors, file.metadata, file.files) == (pipe.tensors, pipe.metadata, pipe.files)
        assert read_all(file) == read_all(pipe)


def test_a_pipe_skips_forward_and_refuses_to_go_back() -> None:
    with open_tensors(Pipe(PERLAYER.read_bytes())) as pipe, open_tensors(PERLAYER) as file:  # type: ignore[arg-type]
        last = pipe.tensors[-1]
        expected, found = bytearray(last.nbytes), bytearray(last.nbytes)
        pipe.read_into(0, last.offset, found)
        file.read_into(0, last.offset, expected)
        assert found == expected
        with pytest.raises(UsageError, match="passed already"):
            pipe.read_into(0, pipe.tensors[0].offset, found)


def test_standard_input_from_a_file_is_read_at_random_from_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "two"
    path.write_bytes(b"first line\n" + PERLAYER.read_bytes())
    with path.open("rb", buffering=0) as stream:
        stream.readline()
        with open_tensors(stream) as source, open_tensors(PERLAYER) as whole:  # type: ignore[arg-type]
            assert source.seekable
            assert read_all(source) == read_all(whole)


def test_a_fifo_is_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(PERLAYER.read_bytes(),))
    writer.start()
    with open_tensors(path) as source, open_tensors(PERLAYER) as whole:
        assert not source.seekable
        assert read_all(source) == read_all(whole)
    writer.join()


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "kv.safetensors"
    path.write_bytes(PERLAYER.read_bytes())
    with open_tensors(path) as source:
        os.truncate(path, source.tensors[-1].offset + 7)
        with pytest.raises(CorruptError) as caught:
            read_all(source)
    assert caught.value.code == "source-truncated"
    assert str(path) in str(caught.value)


def test_a_folder_keeps_every_file_and_sorts_layers_by_number(tmp_path: Path) -> None:
    for layer in (10, 2, 0):
        array = {"kv_cache": np.full((2, 3, 4), layer, np.float16)}
        safetensors.numpy.save_file(array, tmp_path / f"model.layers.{layer}.safetensors")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "config.json").write_text("{}")
    (tmp_path / "sub" / "empty").write_bytes(b"")
    with open_tensors(tmp_path) as source:
        assert [file.path for file in source.files] == [
            "model.layers.0.safetensors",
            "model.layers.2.safetensors",
            "model.layers.10.safetensors",
            "sub/config.json",
            "sub/empty",
        ]
        config, empty = source.tensors[-2:]
        assert (config.label, config.shape, empty.shape) == ("sub/config.json", (2,), (0,))
        assert source.tensors[1].label == "model.layers.2.safetensors/kv_cache"
        assert tensors_of(source.files) == (source.tensors, {})


def test_safetensors_bytes_are_known_by_content_not_by_suffix() -> None:
    with open_tensors(SAMPLES / "lmcache_v0_disk") as source:
        assert [tensor.name for tensor in source.tensors] == ["kv_chunk"]


def test_a_damaged_file_in_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.safetensors").write_bytes(PERLAYER.read_bytes())
    (tmp_path / "bad.safetensors").write_bytes(PERLAYER.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=r"bad\.safetensors is truncated"):
        open_tensors(tmp_path)


def test_folders_without_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no files"):
        open_tensors(tmp_path)


def test_raw_bytes_take_their_geometry_from_the_caller(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).astype(ml_dtypes.bfloat16)
    path = tmp_path / "page.bin"
    path.write_bytes(array.tobytes())
    with open_raw(path, (2, 3, 4), "bfloat16") as source:
        assert source.tensors[0].shape == (2, 3, 4)
        assert read_all(source) == {"kv": array.tobytes()}
    with pytest.raises(UsageError, match="has 48 bytes, but bfloat16") as caught:
        open_raw(path, (2, 3, 5), "bfloat16")
    assert caught.value.code == "raw-size"
    with pytest.raises(UsageError, match="unknown dtype"):
        open_raw(path, (2, 3, 4), "bf17")


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.iterdir() if path.suffix != ".md"))
def test_every_sample_is_copied_byte_for_byte(name: str, tmp_path: Path) -> None:
    with open_tensors(SAMPLES / name) as source:
        copy_through(source, tmp_path / "copy")
    original, copy = SAMPLES / name, tmp_path / "copy"
    if original.is_file():
        assert copy.read_bytes() == original.read_bytes()
        return
    files = {path.relative_to(original) for path in original.rglob("*") if path.is_file()}
    assert {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()} == files
    for path in files:
        assert (copy / path).read_bytes() == (original / path).read_bytes()


def test_a_stream_sink_writes_in_order_and_refuses_gaps() -> None:
    target = io.BytesIO()
    with open_tensors(PERLAYER) as source:
        copy_through(source, target)
        assert target.getvalue() == PERLAYER.read_bytes()
        sink = open_sink(io.BytesIO(), source.files)
        with pytest.raises(ValueError, match="pipe"):
            sink.write_at(0, source.tensors[1].offset, b"1234")


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_output_redirected_to_a_file_leaves_what_was_there_before(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as stream:
        stream.write(b"before ")
    with path.open("r+b" if mode == "wb" else mode) as stream, open_tensors(PERLAYER) as source:
        stream.seek(0, os.SEEK_END)
        copy_through(source, stream)  # type: ignore[arg-type]
        stream.write(b" after")
    assert path.read_bytes() == b"before " + PERLAYER.read_bytes() + b" after"


def test_a_folder_never_goes_into_a_pipe() -> None:
    with open_tensors(SAMPLES / "vllm_flat") as source, pytest.raises(RefusedError) as caught:
        open_sink(io.BytesIO(), source.files)
    assert caught.value.code == "folder-to-pipe"


@pytest.mark.parametrize("path", ["../up", "/abs", "a/../../b", "a//b", ".", "a/.", "x\0y", "\ud800"])
def test_stored_paths_cannot_leave_the_folder(path: str, tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with pytest.raises(CorruptError) as caught:
        open_sink(target, [SourceFile("fine", b"", 1), SourceFile(path, b"", 1)])
    assert caught.value.code == "unsafe-path"
    assert not target.exists()


def test_the_same_stored_path_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptError):
        open_sink(tmp_path / "folder", [SourceFile("a", b"", 1), SourceFile("a", b"", 1)])


def test_arrays_of_every_dtype_and_stride_go_in_and_out_unchanged() -> None:
    arrays = {
        "a": np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2],
        "b": np.arange(6).astype(ml_dtypes.float8_e4m3fn),
        "c": np.zeros((0, 3), np.int16),
        "d": np.float64(1.5).reshape(()),
        "e": np.array([True, False]),
    }
    source = from_arrays(arrays)
    sink = ArraySink(source.tensors)
    for tensor in source.tensors:
        buffer = bytearray(tensor.nbytes)
        source.read_into(0, tensor.offset, buffer)
        sink.write_at(0, tensor.offset, buffer)
    assert list(sink.arrays) == [tensor.name for tensor in source.tensors]
    for name, array in arrays.items():
        assert sink.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(sink.arrays[name], array)


def test_reads_across_arrays_are_those_of_a_file() -> None:
    arrays = {"a": np.arange(5, dtype=np.uint8), "b": np.arange(7, dtype=np.uint8)}
    source = from_arrays(arrays)
    content = bytearray(source.files[0].size)
    source.read_into(0, 0, content)
    middle = bytearray(6)
    source.read_into(0, len(source.files[0].header) + 3, middle)
    assert middle == content[len(source.files[0].header) + 3 :][:6]
    with pytest.raises(CorruptError):
        source.read_into(0, len(content) - 1, middle)


def test_a_canonical_header_is_aligned_and_means_what_it_was_made_of() -> None:
    with open_tensors(PERLAYER) as source:
        header = header_bytes(source.tensors, source.metadata, alignment=64)
        tensors, metadata = parse_header(header, "made")
    assert (len(header) - 8) % 64 == 0
    assert metadata == source.metadata
    assert [(t.name, t.tag, t.shape) for t in tensors] == [(t.name, t.tag, t.shape) for t in source.tensors]


def test_headers_alone_are_checked_against_the_stored_size() -> None:
    with open_tensors(PERLAYER) as source:
        (file,) = source.files
    with pytest.raises(CorruptError):
        tensors_of([SourceFile("", file.header, file.size + 1)])


class _Full(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, buffer: object) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_an_error() -> None:
    stream: BinaryIO = io.BufferedWriter(_Full(), 16)  # type: ignore[assignment]
    with open_tensors(PERLAYER) as source, pytest.raises(OSError, match="No space"):
        copy_through(source, stream)
    stream.detach()  # type: ignore[attr-defined]
