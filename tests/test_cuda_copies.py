"""Copies beside kernels: right in whatever order CUDA may run them, and in a bounded amount of memory."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
import pytest

import kvzip
from kvzip.codecs import get_codec
from kvzip.container import Reader
from kvzip.devices import cuda, cuda_source, get_device, runs
from kvzip.devices.base import Array, Arrival, Device
from kvzip.devices.cuda import Cuda
from kvzip.layouts import map_cache
from kvzip.pipeline import StoredCache, assign, compress, decompress
from kvzip.pipeline.stages import Channel
from kvzip.tensorfile import ArraySink, from_arrays
from tests.emulator import fake_cupy, fake_streams
from tests.emulator.devices import CudaOnEmulator, cuda_on_emulator

SCHEDULES: dict[str, Callable[[], fake_streams.Schedule]] = {
    "late": lambda: fake_streams.late,
    "copies first": lambda: fake_streams.copies_first,
    "kernels first": lambda: fake_streams.kernels_first,
    **{f"shuffled {seed}": partial(fake_streams.shuffled, seed) for seed in range(6)},
}
"""Each is a way in which a GPU may happen to run what it is told; mistakes show in some."""

PROBES = {
    "probe.cu": """
#define KERNEL(name, ...) extern "C" __global__ void name(int warps, __VA_ARGS__)
KERNEL(probe_xor, const unsigned char* from, unsigned char* to, unsigned count, unsigned key) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = from[i] ^ key;
}
""",
    "runs.cu": cuda_source.sources()["runs.cu"],
}
NBYTES = 3000


@pytest.fixture(params=SCHEDULES.values(), ids=SCHEDULES)
def schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every schedule; small copies are pinned ones, too."""
    monkeypatch.setattr(cuda, "PINNED_FROM", 1)
    with fake_streams.scheduled(request.param()):
        yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """The device with one small kernel, and the one that puts arrays together."""
    monkeypatch.setattr(cuda_source, "sources", lambda: PROBES)
    cuda_source._stems.cache_clear()
    yield cuda_on_emulator()
    cuda_source._stems.cache_clear()


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all copies that are begun on their way to the host."""
    sizes: list[int] = []
    get = fake_cupy.ndarray.get

    def noted(array: fake_cupy.ndarray, *arguments: Any, blocking: bool = True, **options: Any) -> np.ndarray:
        sizes.extend([] if blocking else [array.nbytes])
        return get(array, *arguments, blocking=blocking, **options)

    monkeypatch.setattr(fake_cupy.ndarray, "get", noted)
    return sizes


def numbers(seed: int, nbytes: int = NBYTES) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes).astype(np.uint8)


def pinned(gpu: Cuda, content: np.ndarray) -> np.ndarray:
    buffer = gpu.host_buffer(content.nbytes)
    buffer[:] = content
    return buffer


def xor(gpu: Cuda, array: Array, key: int) -> Array:
    """A new array, by a kernel that has not run yet."""
    with gpu.activate():
        result = gpu.xp.empty(array.nbytes, np.uint8)
    gpu.launch("probe_xor", -(-array.nbytes // 32), array, result, np.uint32(array.nbytes), np.uint32(key))
    return result


@pytest.mark.usefixtures("schedule")
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "at once"])
def test_many_windows_go_through_whole(gpu: Cuda, ahead: bool) -> None:
    """Promise: uploads wait for kernels that still use their memory, kernels for the uploads, downloads for the
    kernels, and nothing takes the memory of a copy, device's or pinned, before it is done.
    """
    sources = [numbers(seed) for seed in range(12)]
    coming = iter(sources)
    uploads: list[Arrival] = []
    downloads: list[Arrival] = []
    found: list[np.ndarray] = []

    def collect() -> None:
        for download in downloads:
            found.extend(download())

    for number in range(12):
        uploads += [gpu.begin_upload([pinned(gpu, source)]) for source in islice(coming, 1 + ahead - len(uploads))]
        (array,) = uploads.pop(0)()
        array = xor(gpu, xor(gpu, array, 7), number)
        downloads.append(gpu.begin_download([array]))
        del array
    writer = threading.Thread(target=collect)
    writer.start()
    writer.join()
    for number, (source, result) in enumerate(zip(sources, found, strict=True)):
        np.testing.assert_array_equal(result, source ^ 7 ^ number)


@pytest.mark.usefixtures("schedule")
def test_many_arrays_come_in_one_copy(gpu: Cuda, downloads: list[int]) -> None:
    """Promise: of any size, wherever they lie, and though their memory is others' at once."""
    places = [(0, 1), (1, 1), (3, 20), (19, 2 * runs.PIECE), (2 * runs.PIECE + 7, 3 * runs.PIECE + 8)]
    rounds, arrivals = range(4), []
    for number in rounds:
        whole = xor(gpu, gpu.to_device(numbers(number, 3 * runs.PIECE + 8)), 1)
        alone = xor(gpu, gpu.to_device(numbers(number)), 2).view(np.uint16)
        arrivals.append(gpu.begin_download([*(whole[start:stop] for start, stop in places), alone]))
        del whole, alone
    for number, arrive in zip(rounds, arrivals, strict=True):
        *parts, alone = arrive()
        expected = numbers(number, 3 * runs.PIECE + 8) ^ 1
        assert [part.tobytes() for part in parts] == [expected[start:stop].tobytes() for start, stop in places]
        np.testing.assert_array_equal(alone, (numbers(number) ^ 2).view(np.uint16))
    assert len(downloads) == len(rounds)


@pytest.mark.usefixtures("schedule")
def test_what_nobody_waits_for_harms_nobody(gpu: Cuda) -> None:
    """Promise: an upload or a download that was given up, as at an error, writes to no memory that is others' by
    then.
    """
    array = gpu.to_device(numbers(1))
    gpu.synchronize()
    gpu.begin_upload([pinned(gpu, numbers(2))])
    result = xor(gpu, array, 1)
    gpu.begin_download([xor(gpu, array, 2)])
    buffer = pinned(gpu, numbers(3))
    gpu.synchronize()
    np.testing.assert_array_equal(gpu.to_host(result), numbers(1) ^ 1)
    np.testing.assert_array_equal(buffer, numbers(3))


@pytest.mark.usefixtures("schedule")
def test_another_thread_may_launch_while_one_waits(gpu: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the memory of a copy is its own until the wait for it is over."""
    array = gpu.to_device(numbers(1))
    first = gpu.begin_download([xor(gpu, array, 1)])
    wait = fake_cupy.Event.synchronize

    def launch_and_wait(event: fake_cupy.Event) -> None:
        xor(gpu, array, 2)
        wait(event)

    monkeypatch.setattr(fake_cupy.Event, "synchronize", launch_and_wait)
    gpu.begin_download([xor(gpu, array, 3)])
    np.testing.assert_array_equal(first()[0], numbers(1) ^ 1)


@pytest.mark.usefixtures("schedule")
def test_copies_hold_the_memory_of_two(gpu: Cuda) -> None:
    """Promise: however far the host is ahead, two copies each way are under way at most, the memory of one that is
    done is the next one's, and in the end nothing is kept.
    """
    before = fake_cupy.MemoryPool.used()
    source = pinned(gpu, numbers(1, 1 << 16))
    places = set()
    for _ in range(3):
        (array,) = gpu.begin_upload([source])()
        places.add(gpu.address(array))
        gpu.to_host(array)
        del array
    assert len(places) == 1
    for _ in range(10):
        gpu.begin_upload([source])
        assert fake_cupy.MemoryPool.used() - before < 3 << 16
    gpu.synchronize()
    arrays = [gpu.to_device(source) for _ in range(10)]
    arrivals = []
    while arrays:
        arrivals.append(gpu.begin_download([arrays.pop()]))
        assert fake_cupy.MemoryPool.used() - before < (len(arrays) + 3) << 16
    for arrival in arrivals:
        arrival()
    assert fake_cupy.MemoryPool.used() == before


@pytest.mark.usefixtures("schedule")
def test_what_is_brought_ahead_gives_way(gpu: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: work gets the memory of an upload that nobody has asked for yet; that one is made again then, or for
    the first time if there was no memory for it at first.
    """
    monkeypatch.setattr(fake_cupy.MemoryPool, "total", fake_cupy.MemoryPool.held() + 3 * NBYTES)
    upload = gpu.begin_upload([numbers(1), numbers(2)[:100]])
    with gpu.activate():
        whole = gpu.xp.empty(3 * NBYTES, np.uint8)
    other = gpu.begin_upload([numbers(3)])
    del whole
    arrays = [*upload(), *other()]
    assert [gpu.to_host(array).tobytes() for array in arrays] == [
        numbers(1).tobytes(), numbers(2)[:100].tobytes(), numbers(3).tobytes(),
    ]  # fmt: skip


@pytest.mark.usefixtures("schedule")
def test_the_default_stream_keeps_its_place(gpu: Cuda) -> None:
    """Promise: what a caller has done to a tensor on CuPy's default stream is done when kernels read it, also where the
    memory of a tensor that was freed there is used again; what kernels did to it is done when the default stream
    reads it.
    """
    xp = gpu.xp
    theirs = xp.empty(NBYTES, np.uint8)
    source = gpu.to_device(numbers(1))
    theirs[...] = source
    mine = xor(gpu, theirs, 5)
    theirs[...] = mine
    with gpu.activate():
        held = xp.empty(NBYTES, np.uint8)
    held[...] = theirs
    copied = xp.empty(NBYTES, np.uint8)
    copied[...] = held
    del held
    (array,) = gpu.begin_upload([pinned(gpu, numbers(2))])()
    assert (gpu.to_host(array) == numbers(2)).all() and (gpu.to_host(copied) == numbers(1) ^ 5).all()


def test_arrays_in_one_buffer_are_copied_as_they_lie(gpu: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: sections that were read to one piece of pinned memory are not packed first; scattered ones are."""
    buffer = pinned(gpu, numbers(1, 10_000))
    packed: list[int] = []
    monkeypatch.setattr(gpu, "host_buffer", lambda nbytes: packed.append(nbytes) or np.empty(nbytes, np.uint8))
    for places, copied in [
        ([(8, 3000), (3008, 3008), (3200, 9001)], []),
        ([(0, 100), (9000, 9100)], [256]),
        ([(0, 1001), (1001, 2000)], [2048]),
    ]:
        packed.clear()
        there = gpu.begin_upload([buffer[start:stop] for start, stop in places])()
        assert packed == copied and all(gpu.address(array) % 8 == 0 for array in there)
        for array, (start, stop) in zip(there, places, strict=True):
            np.testing.assert_array_equal(gpu.to_host(array), buffer[start:stop])


TOKENS = 320
CACHE = {
    f"layers.{layer}.{kind}": np.random.default_rng(layer).standard_normal((2, TOKENS, 32)).astype(np.float16)
    for layer in range(2)
    for kind in ("key", "value")
}
WINDOW = 2 * 64 * 32 * 2


def patient_peek(channel: Channel[Any]) -> Any:
    """Waits for the reader, so that all that can be brought ahead is."""
    with channel._run.changed:
        channel._run.wait_for(lambda: bool(channel._items) or channel._closed)
        return channel._items[0] if channel._items else None


def packed(device: Device, spec: str) -> bytes:
    source, out = from_arrays(CACHE), io.BytesIO()
    cache_map = map_cache(source, "per-layer")
    codec = get_codec(spec)
    assignment = assign(cache_map.planes, lambda plane: codec)
    compress(source, cache_map, out, assignment=assignment, device=device, block_tokens=32)
    return out.getvalue()


def restored(device: Device, data: bytes) -> dict[str, bytes]:
    stored = StoredCache(Reader.open(io.BytesIO(data)))
    selection = stored.select(None, range(10, 300))
    sink = ArraySink(selection.tensors)
    decompress(stored, selection, sink, device=device)
    return {name: array.tobytes() for name, array in sink.arrays.items()}


def test_the_sections_of_a_window_come_in_one_copy(downloads: list[int]) -> None:
    """Promise: however many blocks it has, here two, and sections they."""
    gpu = cuda_on_emulator()
    gpu.batch_bytes = WINDOW
    with Reader.open(io.BytesIO(packed(gpu, "cachegen"))) as reader:
        assert len(reader.totals.sections) == 4 and len(reader.index) == 2 * len(downloads)
        assert sum(downloads) >= sum(reader.totals.sections.values())


class Watched(CudaOnEmulator):
    """Notes the largest number of uploads that were under way when one was asked for."""

    ahead = 0

    def begin_upload(self, arrays: Sequence[Any]) -> Arrival:
        arrival, waiting = super().begin_upload(arrays), self._waiting
        waiting.append(arrival)

        def arrive() -> list[Array]:
            self.ahead = max(self.ahead, len(waiting))
            waiting.remove(arrival)
            return arrival()

        return arrive

    @cached_property
    def _waiting(self) -> list[Arrival]:
        return []


@pytest.mark.usefixtures("schedule")
@pytest.mark.parametrize("spec", ["raw", "fp8"])
def test_a_cache_in_many_windows_is_the_same(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: in the pipeline, too, with all its threads, one window ahead; and from tensors that a caller is still
    writing.
    """
    monkeypatch.setattr(Channel, "peek", patient_peek)
    cpu, gpu = get_device("cpu"), Watched()
    gpu.batch_bytes = WINDOW
    data = packed(cpu, spec)
    assert packed(gpu, spec) == data
    assert gpu.ahead == 2
    gpu.ahead = 0
    assert restored(gpu, data) == restored(cpu, data)
    assert gpu.ahead == 2
    theirs = {name: fake_cupy.empty(array.shape, np.float16) for name, array in CACHE.items()}
    for name, array in CACHE.items():
        theirs[name].set(array)
    assert kvzip.compress(theirs, codec=spec, device=gpu, block_tokens=32, layout="per-layer") == kvzip.compress(
        CACHE, codec=spec, device="cpu", block_tokens=32, layout="per-layer"
    )
