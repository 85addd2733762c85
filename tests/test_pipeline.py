"""The road from tensors to ``.kvz`` and back: the same bytes from files and pipes, any part alone, flat memory."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 types with numpy)
import numpy as np
import pytest
import safetensors.numpy

from kvzip.cache import Block, Plane
from kvzip.codecs import register_codec
from kvzip.codecs.base import Batch, Codec, Encoded, Errors, Sections
from kvzip.codecs.raw import Raw
from kvzip.container import Header, Reader, StreamReader, Writer
from kvzip.devices import get_device
from kvzip.devices.base import Device
from kvzip.errors import CorruptError, KvzipError, UnsupportedError
from kvzip.layouts import map_cache
from kvzip.pipeline import Assignment, Report, StoredCache, assign, compress, decode_plane, decompress, verify
from kvzip.pipeline.plan import clusters, is_forward, plan
from kvzip.tensorfile import ArraySink, TensorSource, from_arrays, open_sink, open_tensors

TOKENS = 100
BLOCK = 32


def numbers(*shape: int, dtype: str = "float16") -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(dtype)


CASES: dict[str, tuple[str | None, dict[str, np.ndarray]]] = {
    "heads first": (
        "per-layer",
        {f"layers.{n}.{kind}": numbers(2, TOKENS, 16) + n for n in range(3) for kind in ("key", "value")},
    ),
    "batch of one, bfloat16": (
        "per-layer",
        {
            f"layers.{n}.{kind}": numbers(1, 2, TOKENS, 12, dtype="bfloat16")
            for n in range(2)
            for kind in ("key", "value")
        },
    ),
    "LMCache blob": ("L,kv,T,H,D", {"kv_chunk": numbers(3, 2, TOKENS, 2, 16)}),
    "keys and values in one slab": (
        "T,kv,H,D",
        {f"model.layers.{n}.attn": numbers(TOKENS, 2, 2, 16) for n in range(2)},
    ),
    "all layers in one slab": ("T,L,kv,H,D", {"cache": numbers(TOKENS, 3, 2, 2, 16)}),
    "channels not innermost": ("L,kv,H,D,T", {"cache": numbers(2, 2, 2, 16, TOKENS)}),
}


def file_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    extra = {"a.ids": np.arange(TOKENS), "zz.big": np.arange(3 << 17)}
    return safetensors.numpy.save({**arrays, **extra}, metadata={"model": "test"})


def piped(data: bytes) -> io.FileIO:
    """The reading end of a pipe through which ``data`` comes."""
    reading, writing = os.pipe()

    def feed() -> None:
        with suppress(BrokenPipeError), os.fdopen(writing, "wb") as stream:
            stream.write(data)

    threading.Thread(target=feed, daemon=True).start()
    return io.FileIO(reading, "rb")


def through_pipe(write: Callable[[Any], Any]) -> bytes:
    """What ``write`` puts into the writing end of a pipe."""
    reading, writing = os.pipe()
    got: list[bytes] = []

    def drain() -> None:
        with os.fdopen(reading, "rb") as stream:
            got.append(stream.read())

    thread = threading.Thread(target=drain)
    thread.start()
    with io.FileIO(writing, "wb") as stream:
        write(stream)
    thread.join()
    return got[0]


class Halves(Codec):
    """Lossy, and two planes to a frame: keeps the high byte of 16-bit numbers. Counts the blocks that it decodes."""

    name = "test-halves"
    decoded = 0

    def config(self) -> dict[str, Any]:
        return {}

    def supports(self, plane: Plane) -> bool:
        return plane.itemsize == 2

    def groups(self, planes: Sequence[Plane]) -> list[tuple[Plane, ...]]:
        found: list[tuple[Plane, ...]] = []
        for kind in ("key", "value"):
            alike = [plane for plane in planes if plane.kind == kind]
            found += [tuple(alike[start : start + 2]) for start in range(0, len(alike), 2)]
        return sorted(found, key=lambda group: group[0].index)

    def bound(self, block: Block) -> int:
        return block.nbytes // 2

    def encode(self, batch: Batch, device: Device) -> list[Encoded]:
        arrays = iter(batch.arrays)
        found = []
        for block in batch.blocks:
            sections, errors = {}, []
            for number, _ in enumerate(block.planes):
                array = np.ascontiguousarray(next(arrays))
                high = array.view(np.uint16) >> 8
                sections[f"HIG{number}"] = high.astype(np.uint8).reshape(-1)
                x, y = array.astype(np.float64), (high << 8).view(array.dtype).astype(np.float64)
                errors.append(Errors(float(((x - y) ** 2).sum()), float((x**2).sum()), float(np.abs(x - y).max())))
            found.append(Encoded(sections, errors))
        return found

    def decode(self, batch: Batch, sections: Sequence[Sections], device: Device) -> None:
        arrays = iter(batch.arrays)
        for block, parts in zip(batch.blocks, sections, strict=True):
            Halves.decoded += 1
            for number, _ in enumerate(block.planes):
                array = next(arrays)
                high = parts[f"HIG{number}"].astype(np.uint16) << 8
                array[...] = high.view(array.dtype).reshape(array.shape)


register_codec(Halves)


def pack(source: TensorSource, sink: Any, codec: Codec, layout: str | None, told: list[str] | None = None) -> Report:
    cache_map = map_cache(source, layout)
    assignment = assign(cache_map.planes, lambda plane: codec)
    notice = (told if told is not None else []).append
    return compress(
        source, cache_map, sink, assignment=assignment, device=get_device("cpu"), block_tokens=BLOCK, notice=notice
    )


def packed(data: bytes, codec: Codec, layout: str | None) -> bytes:
    out = io.BytesIO()
    pack(open_tensors(io.BytesIO(data)), out, codec, layout)
    return out.getvalue()


def unpack(reader: Reader | StreamReader, target: Any, told: list[str] | None = None) -> Report:
    stored = StoredCache(reader)
    selection = stored.select()
    with open_sink(target, selection.files) as sink:
        notice = (told if told is not None else []).append
        return decompress(stored, selection, sink, device=get_device("cpu"), notice=notice)


def part(data: bytes, layers: range | None, tokens: range | None, *, stream: bool = False) -> dict[str, np.ndarray]:
    stored = StoredCache(StreamReader(piped(data)) if stream else Reader.open(io.BytesIO(data)))
    selection = stored.select(layers, tokens)
    sink = ArraySink(selection.tensors)
    decompress(stored, selection, sink, device=get_device("cpu"))
    return sink.arrays


@pytest.fixture
def one_unit_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every unit were as large as a batch: small caches then take the road of large ones."""
    monkeypatch.setattr(Device, "batch_bytes", 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("codec", [Raw(), Halves()], ids=["raw", "halves"])
@pytest.mark.parametrize("large", [False, True])
def test_files_and_pipes_give_the_same_bytes_in_all_four_combinations(
    case: str, codec: Codec, large: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Byte-identical round trips for a lossless codec, identical results for a lossy one; no temporary file is left."""
    if large:
        request.getfixturevalue("one_unit_at_a_time")
    layout, arrays = CASES[case]
    data = file_bytes(arrays)
    (tmp_path / "kv.safetensors").write_bytes(data)
    with open_tensors(tmp_path / "kv.safetensors") as source, (tmp_path / "kv.kvz").open("wb") as stream:
        pack(source, stream, codec, layout)
    expected = (tmp_path / "kv.kvz").read_bytes()
    with piped(data) as pipe:
        assert through_pipe(lambda stream: pack(open_tensors(pipe), stream, codec, layout)) == expected

    unpack(Reader.open(tmp_path / "kv.kvz"), tmp_path / "back")
    restored = (tmp_path / "back").read_bytes()
    assert (restored == data) is codec.lossless
    assert restored[: len(data) - 3 * 2**20] == data[: len(data) - 3 * 2**20] or not codec.lossless
    with piped(expected) as pipe:
        assert through_pipe(lambda stream: unpack(StreamReader(pipe), stream)) == restored
    assert through_pipe(lambda stream: unpack(Reader.open(tmp_path / "kv.kvz"), stream)) == restored
    with piped(expected) as pipe:
        unpack(StreamReader(pipe), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == restored
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("codec", [Raw(), Halves()], ids=["raw", "halves"])
@pytest.mark.parametrize("tokens", [None, range(5), range(30, 70), range(63, 64), range(32, 96), range(90, 10**9)])
@pytest.mark.parametrize("layers", [None, range(1, 2)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_part_is_what_would_be_cut_from_the_whole(
    case: str, codec: Codec, tokens: range | None, layers: range | None, stream: bool
) -> None:
    layout, arrays = CASES[case]
    data = packed(file_bytes(arrays), codec, layout)
    whole, found = part(data, None, None), part(data, layers, tokens, stream=stream)
    assert found.keys() <= whole.keys()
    axes = map_cache(from_arrays(whole), layout).maps
    for tensor_map in axes:
        name = tensor_map.tensor.name
        if tensor_map.role is None:
            cut = whole[name]
        elif name in found:
            names = tensor_map.role.axes
            index = [slice(None)] * len(names)
            if tokens is not None:
                index[names.index("T")] = slice(tokens.start, tokens.stop)
            if layers is not None and "L" in names:
                index[names.index("L")] = slice(layers.start, layers.stop)
            cut = whole[name][tuple(index)]
        else:
            assert layers is not None and tensor_map.role.layer not in layers
            continue
        assert found[name].shape == cut.shape
        assert found[name].tobytes() == np.ascontiguousarray(cut).tobytes()


@pytest.mark.usefixtures("one_unit_at_a_time")
def test_a_frame_of_several_planes_is_decoded_once() -> None:
    layout, arrays = CASES["heads first"]
    data = packed(file_bytes(arrays), Halves(), layout)
    Halves.decoded = 0
    part(data, None, None)
    assert Halves.decoded == 4 * len([("k", 2), ("k", 1), ("v", 2), ("v", 1)])


def test_a_pipe_is_spooled_only_for_codecs_that_span_planes_and_says_so() -> None:
    layout, arrays = CASES["heads first"]
    data = file_bytes(arrays)
    for codec, notices in ((Raw(), 0), (Halves(), 1)):
        told: list[str] = []
        with piped(data) as pipe:
            out = through_pipe(lambda stream, pipe=pipe: pack(open_tensors(pipe), stream, codec, layout, told))  # noqa: B023
        assert len(told) == notices
        back: list[str] = []
        through_pipe(lambda stream: unpack(Reader.open(io.BytesIO(out)), stream, back))  # noqa: B023
        assert len(back) == notices
        assert all("TMPDIR" in text for text in told + back)


def test_errors_are_summed_per_plane_and_stored() -> None:
    layout, arrays = CASES["heads first"]
    out = io.BytesIO()
    source = from_arrays(arrays)
    report = pack(source, out, Halves(), layout)
    back = part(out.getvalue(), None, None)
    statistics = Reader.open(io.BytesIO(out.getvalue())).statistics
    assert statistics is not None and len(report.errors) == 6
    for found in report.errors:
        name = f"layers.{found.plane.layer}.{found.plane.kind}"
        x, y = arrays[name].astype(np.float64), back[name].astype(np.float64)
        assert found.relative == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-12)
        assert found.max_abs == np.abs(x - y).max()
        assert statistics["relative_error"][found.plane.index] == pytest.approx(found.relative, rel=1e-5)


def test_one_plane_alone_takes_only_its_own_tokens() -> None:
    layout, arrays = CASES["heads first"]
    data = packed(file_bytes(arrays), Raw(), layout)
    stored = StoredCache(Reader.open(io.BytesIO(data)))
    for plane in stored.cache_map.planes:
        if plane.kind == "bytes":
            continue
        whole = arrays[f"layers.{plane.layer}.{plane.kind}"].transpose(1, 0, 2)
        for start, stop in ((0, 100), (31, 65), (99, 100), (4, 4)):
            found = decode_plane(stored, plane.index, start, stop, get_device("cpu"))
            np.testing.assert_array_equal(found, whole[start:stop])


def rewritten(data: bytes, cuts: Sequence[int], backwards: bool) -> bytes:
    """The same cache with blocks cut elsewhere, or in the opposite order: as another writer may do it."""
    reader = Reader.open(io.BytesIO(data))
    stored = StoredCache(reader)
    out = io.BytesIO()
    writer = Writer(out, reader.header)
    blocks = []
    for plane in reader.header.planes:
        edges = [0, *cuts, plane.tokens] if plane.kind != "bytes" else [0, plane.tokens]
        blocks += [Block((plane,), low, high) for low, high in pairwise(edges)]
    for block in reversed(blocks) if backwards else blocks:
        array = decode_plane(stored, block.plane.index, block.start, block.stop, get_device("cpu"))
        writer.write_block(block, 0, {"DATA": np.ascontiguousarray(array).reshape(-1).view(np.uint8)})
    writer.close()
    return out.getvalue()


def test_blocks_may_be_cut_anywhere_in_a_file() -> None:
    layout, arrays = CASES["heads first"]
    data = rewritten(packed(file_bytes(arrays), Raw(), layout), [10, 40, 71, 77], backwards=True)
    for name, array in part(data, range(1, 3), range(35, 76)).items():
        if name in arrays:
            np.testing.assert_array_equal(array, arrays[name][:, 35:76])


@pytest.mark.usefixtures("one_unit_at_a_time")
def test_a_stream_in_another_order_is_refused_not_mixed_up() -> None:
    layout, arrays = CASES["heads first"]
    good = packed(file_bytes(arrays), Raw(), layout)
    for data in (rewritten(good, [32, 64, 96], backwards=True), rewritten(good, [10, 40, 71], backwards=False)):
        with pytest.raises(UnsupportedError, match="save it to a file"):
            part(data, None, None, stream=True)
        assert part(data, None, None).keys() == part(good, None, None).keys()


def test_a_file_is_readable_as_far_as_its_codecs_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, arrays = CASES["heads first"]

    class Foreign(Raw):
        name = "test-foreign"

    register_codec(Foreign)
    source, out = from_arrays(arrays), io.BytesIO()
    cache_map = map_cache(source, layout)
    here, foreign = Raw(), Foreign()
    assignment = assign(cache_map.planes, lambda plane: foreign if plane.layer == 1 else here)
    compress(source, cache_map, out, assignment=assignment, device=get_device("cpu"))
    monkeypatch.delitem(sys.modules["kvzip.codecs"]._registered, "test-foreign")
    assert part(out.getvalue(), range(1), None).keys() == {"layers.0.key", "layers.0.value"}
    with pytest.raises(UnsupportedError, match="test-foreign"):
        part(out.getvalue(), range(1, 2), None)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_verify_finds_every_damaged_byte_of_the_data(deep: bool, stream: bool) -> None:
    layout, arrays = CASES["LMCache blob"]
    data = packed(safetensors.numpy.save(arrays), Raw(), layout)

    def check(data: bytes) -> Report:
        reader = StreamReader(io.BytesIO(data)) if stream else Reader.open(io.BytesIO(data))
        return verify(StoredCache(reader), device=get_device("cpu") if deep else None)

    report = check(data)
    assert (report.stored_bytes, report.blocks) == (len(data), 6 * 4)
    for place in range(len(data) - 1, 0, -len(data) // 40):
        damaged = bytearray(data)
        damaged[place] ^= 4
        with pytest.raises(KvzipError):
            check(bytes(damaged))


def crafted(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A sound container whose header says something else than its writer meant."""
    layout, arrays = CASES["heads first"]
    reader = Reader.open(io.BytesIO(packed(safetensors.numpy.save(arrays), Raw(), layout)))
    header = reader.header
    fields = {name: getattr(header, name) for name in Header.__dataclass_fields__}
    change(fields)
    out = io.BytesIO()
    writer = Writer(out, Header(**fields))
    entries = list(reader.index)
    if len(fields["groups"]) == len(header.groups):
        for entry, frame in zip(entries, reader.read_frames(entries), strict=True):
            writer.write_block(entry.block, entry.codec, frame.sections)
    else:
        for group in fields["groups"]:
            for start in range(0, TOKENS, BLOCK):
                writer.write_block(Block(group, start, min(TOKENS, start + BLOCK)), 0, {"DATA": np.zeros(8, np.uint8)})
    writer.close()
    return out.getvalue()


def swap_layout(fields: dict[str, Any]) -> None:
    fields["map"] = {**fields["map"], "axes": ["H,T,D", "T,H,D"], "tensors": [[1, 0, "key", 1, 0]] * 6}


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.update(map={}),
        lambda fields: fields["map"].update(sizes=[1]),
        lambda fields: fields["map"].update(sizes=["many"]),
        swap_layout,
        lambda fields: fields.update(groups=tuple(fields["planes"][n : n + 2] for n in (0, 2, 4))),
        lambda fields: fields.update(codecs=[{"name": "cachegen", "config": {}}]),
        lambda fields: fields.update(codecs=[{"name": "raw", "config": {"x": 1}}]),
        lambda fields: fields.update(files=[("", b"")]),
    ],
)
def test_a_header_that_contradicts_itself_is_corrupt(change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(CorruptError):
        part(crafted(change), None, None)


def test_a_source_that_ends_early_or_late_is_an_error() -> None:
    layout, arrays = CASES["heads first"]
    data = safetensors.numpy.save(arrays)
    for wrong in (data[:-5], data + b"x", data[: len(data) // 2]):
        with piped(wrong) as pipe, pytest.raises(CorruptError):
            pack(open_tensors(pipe), io.BytesIO(), Raw(), layout)


def test_a_full_disk_is_an_error_of_the_run_not_of_its_writer_thread() -> None:
    layout, arrays = CASES["heads first"]
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(OSError, match="space"):
        pack(from_arrays(arrays), full, Raw(), layout)


class Elsewhere(Device):
    """A device whose memory is not the host's: only what went over by to_device and to_host has been there."""

    name = "elsewhere"
    xp: Any = SimpleNamespace(
        **{name: getattr(np, name) for name in ("empty", "uint8", "ascontiguousarray", "concatenate", "dtype")}
    )

    def launch(self, kernel: str, warps: int, *arguments: Any) -> None:
        raise AssertionError("raw launches no kernel")

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def to_device(self, array: Any) -> Any:
        assert array.dtype.isbuiltin == 1, "cupy has no ml_dtypes"
        return array.copy()

    def to_host(self, array: Any, out: Any = None) -> Any:
        return array.copy() if out is None else np.copyto(out, array)


@pytest.mark.parametrize("case", CASES)
def test_a_device_with_memory_of_its_own_gives_the_same_bytes(case: str) -> None:
    layout, arrays = CASES[case]
    data = file_bytes(arrays)
    expected = packed(data, Raw(), layout)
    source, out = open_tensors(io.BytesIO(data)), io.BytesIO()
    cache_map, raw = map_cache(source, layout), Raw()
    assignment = assign(cache_map.planes, lambda plane: raw)
    compress(source, cache_map, out, assignment=assignment, device=Elsewhere(), block_tokens=BLOCK)
    assert out.getvalue() == expected
    stored = StoredCache(Reader.open(out))
    for tokens in (None, range(20, 70)):
        selection = stored.select(None, tokens)
        sink = ArraySink(selection.tensors)
        decompress(stored, selection, sink, device=Elsewhere())
        for name, array in part(expected, None, tokens).items():
            assert sink.arrays[name].tobytes() == array.tobytes()


def test_codecs_are_bound_to_their_own_planes_only() -> None:
    bound: list[list[int]] = []

    class Binding(Raw):
        def bind(self, planes: Sequence[Plane]) -> Binding:
            bound.append([plane.layer for plane in planes])
            return self

    planes = [Plane(n, n // 2, ("key", "value")[n % 2], 10, 2, 4, "float16") for n in range(8)]
    planes.append(Plane(8, 0, "bytes", 99, 1, 1, "uint8"))
    one, other = Binding(), Binding()
    assignment = assign(planes, lambda plane: one if plane.layer < 3 else other)
    assert bound == [[0, 0, 1, 1, 2, 2], [3, 3]]
    assert assignment.ids == {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 1, 7: 1, 8: 2}
    assert isinstance(assignment, Assignment) and len(assignment.codecs) == 3


def test_units_cover_every_token_once_and_go_forward_where_the_layout_lets_them() -> None:
    for layout, arrays in CASES.values():
        cache_map = map_cache(from_arrays(arrays), layout)
        groups = [(plane,) for plane in cache_map.planes]
        assert sum(len(cluster.groups) for cluster in clusters(cache_map, groups)) == len(cache_map.planes)
        orders = []
        for forward in (False, True):
            units = list(plan(cache_map, groups, BLOCK, forward=forward))
            orders.append([block for unit in units for block in unit.blocks()])
            assert sum(unit.nbytes for unit in units) == sum(array.nbytes for array in arrays.values())
        assert orders[0] == orders[1]
        assert sum(block.nbytes for block in orders[0]) == sum(array.nbytes for array in arrays.values())
        assert is_forward(plan(cache_map, groups, BLOCK, forward=True))


MEMORY = """
import sys, kvzip
mode, source, target, codec = sys.argv[1:]
getattr(kvzip, mode)(source, target, force=True, **({"codec": codec} if mode == "compress" else {}))
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak) >> 10)  # not ru_maxrss, which begins with that of the parent
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are told by /proc")
@pytest.mark.parametrize("codec", ["raw", "cachegen"])
def test_memory_stays_flat_however_large_the_file(codec: str, tmp_path: Path) -> None:
    """Under 400 MB file to file; from and to pipes one plane more."""
    layers, shape = 16, (1, 8, 9000, 128)
    plane = np.random.default_rng(0).standard_normal(shape, np.float32).astype(np.float16)
    arrays = {f"layers.{n}.{kind}": plane for n in range(layers) for kind in ("key", "value")}
    safetensors.numpy.save_file(arrays, tmp_path / "kv.safetensors")
    assert (tmp_path / "kv.safetensors").stat().st_size > 550 << 20

    def peak(mode: str, source: str, target: str) -> int:
        command = [sys.executable, "-c", MEMORY, mode, source, target, codec]
        found = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        print(mode, Path(source).name, Path(target).name, found)
        return found

    file, packed_file, back = (str(tmp_path / name) for name in ("kv.safetensors", "kv.kvz", "back"))
    assert peak("compress", file, packed_file) < 400
    assert peak("decompress", packed_file, back) < 400
    os.mkfifo(tmp_path / "fifo")
    fifo = str(tmp_path / "fifo")
    for mode, source in (("compress", file), ("decompress", packed_file)):
        feeder = subprocess.Popen(["cp", source, fifo])
        assert peak(mode, fifo, str(tmp_path / "out")) < 400 + (plane.nbytes >> 20)
        assert feeder.wait() == 0
    drain = subprocess.Popen(["cmp", back, fifo])
    assert peak("decompress", packed_file, fifo) < 400 + (plane.nbytes >> 20)
    assert drain.wait() == 0
