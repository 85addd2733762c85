"""Tensors in a GPU's memory: coded from where they are and decoded to where they are, on an emulated GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvzip
from kvzip.devices.cuda import Cuda
from kvzip.errors import UsageError
from tests.emulator.devices import cuda_on_emulator

LAYOUTS = {"tokens outside": (70, 3, 32), "heads outside": (3, 70, 32), "in a batch": (1, 3, 70, 32)}


@pytest.fixture(scope="module")
def gpu() -> Cuda:
    return cuda_on_emulator()


def tensors(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    kinds = [(layer, kind) for layer in range(2) for kind in ("key", "value")]
    return {f"layers.{layer}.{kind}": rng.standard_normal(shape).astype(np.float16) for layer, kind in kinds}


@pytest.mark.parametrize("codec", ["raw", "cachegen"])
@pytest.mark.parametrize("shape", LAYOUTS.values(), ids=LAYOUTS)
def test_tensors_on_the_gpu_give_the_same_file(gpu: Cuda, codec: str, shape: tuple[int, ...]) -> None:
    """Promise: a cache on the GPU gives the bytes that it gives on the host. It never is on the host: the emulated
    arrays refuse to be made numpy's, as CuPy's do.
    """
    arrays, options = tensors(shape), {"codec": codec, "block_tokens": 32, "heads": 3, "head_dim": 32}
    expected = kvzip.compress(arrays, device="cpu", **options)
    on_gpu = {name: gpu.to_device(array) for name, array in arrays.items()}
    assert kvzip.compress(on_gpu, device=gpu, **options) == expected
    mixed = {name: arrays[name] if name.endswith("value") else array for name, array in on_gpu.items()}
    assert kvzip.compress(mixed, device=gpu, **options) == expected


@pytest.mark.parametrize("codec", ["raw", "cachegen"])
def test_a_part_is_decoded_to_a_given_tensor(gpu: Cuda, codec: str) -> None:
    """Promise: ``out`` is filled where it lies, on the GPU and on the host, whatever its strides."""
    data = kvzip.compress(tensors((3, 70, 32)), codec=codec, device="cpu", block_tokens=32)
    with kvzip.open(data, device="cpu") as cache:
        expected = cache.key(1, (10, 50))
        host = np.zeros((40, 3, 32), np.float16)
        assert cache.key(1, (10, 50), out=host) is host and host.tobytes() == expected.tobytes()
        wide = np.zeros((3, 80, 64), np.float16)
        part = wide[:, -1:-80:-2, :32].transpose(1, 0, 2)[::-1]
        assert cache.key(1, (10, 50), out=part) is part and part.tobytes() == expected.tobytes()
        assert np.count_nonzero(wide) == np.count_nonzero(expected)
    with kvzip.open(data, device=gpu) as cache:
        out = gpu.to_device(np.zeros((3, 40, 32), np.float16)).transpose(1, 0, 2)
        assert cache.key(1, (10, 50), out=out) is out
        assert gpu.to_host(out).tobytes() == expected.tobytes()
        host[...] = 0
        assert cache.key(1, (10, 50), out=host) is host and host.tobytes() == expected.tobytes()


def overlapping(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(np.zeros(np.prod(shape), np.float16), shape, strides)


class Tensor:
    """A torch tensor on a device that kvzip cannot write to."""

    __module__ = "torch"
    shape, dtype = (70, 3, 32), "torch.float16"

    def __init__(self, device: str) -> None:
        self.device = SimpleNamespace(type=device)


def test_tensors_on_the_gpu_are_not_for_the_cpu(gpu: Cuda) -> None:
    with pytest.raises(UsageError, match=r"'layers.0.key' is on a GPU"):
        kvzip.compress({"layers.0.key": gpu.to_device(np.zeros((3, 70, 32), np.float16))}, device="cpu")


def test_an_out_that_does_not_fit_is_refused(gpu: Cuda, tmp_path: Path) -> None:
    """Promise: another shape, dtype, stride, device or kind, and memory that is not to be written, is an error before
    anything is decoded.
    """
    data = kvzip.compress(tensors((3, 70, 32)), codec="raw", device="cpu", block_tokens=32)
    shape, nbytes = (70, 3, 32), 70 * 3 * 32 * 2
    (tmp_path / "mapped").write_bytes(bytes(nbytes))
    frozen = bytes(nbytes)
    bad: list[tuple[Any, str]] = [
        (np.frombuffer(frozen, np.float16).reshape(shape), "out is read-only"),
        (np.memmap(tmp_path / "mapped", np.float16, "r", shape=shape), "out is read-only"),
        (np.frombuffer(bytearray(nbytes + 1), np.float16, offset=1, count=nbytes // 2).reshape(shape), "aligned"),
        (overlapping(shape, (0, 64, 2)), "share memory"),
        (overlapping(shape, (64, 64, 2)), "share memory"),
        (np.zeros(shape, ">f2"), "out must be float16"),
        ([1], "out must be a numpy, torch or CuPy array, it is a list"),
        (memoryview(bytearray(nbytes)), "it is a memoryview"),
        (bytearray(nbytes), "it is a bytearray"),
        (Tensor("mps"), "out is on "),
    ]
    for one in ("cpu", gpu):
        with kvzip.open(data, device=one) as cache:
            for out, message in bad:
                with pytest.raises(UsageError, match=message) as error:
                    cache.key(0, out=out)
                assert error.value.code == "bad-out"
    assert frozen == bytes(nbytes)
    with kvzip.open(data, device="cpu") as cache:
        for out in (np.zeros((69, 3, 32), np.float16), np.zeros((70, 3, 32), np.float32)):
            with pytest.raises(UsageError, match=r"out must be float16 \[70, 3, 32\]"):
                cache.value(0, out=out)
        with pytest.raises(UsageError, match="last axis of out must be contiguous"):
            cache.value(0, out=np.zeros((70, 3, 64), np.float16)[:, :, ::2])
        with pytest.raises(UsageError, match="out is on a GPU"):
            cache.value(0, out=gpu.to_device(np.zeros((70, 3, 32), np.float16)))
