"""Code written for LMCache's serde package runs with kvzip.serde, and the bytes are LMCache's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvzip import serde
from kvzip.errors import KvzipError, UnsupportedError, UsageError
from kvzip.lmcache.blob import read_blob, write_blob
from tests import codecs
from tests.reference import cachegen, golden

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def config_of(case: golden.Case) -> serde.CacheGenConfig:
    def specs(bins: list[int]) -> list[serde.QuantizationSpec]:
        return [serde.QuantizationSpec(layer, layer + 1, count) for layer, count in enumerate(bins)]

    return serde.CacheGenConfig(len(case.input), specs(case.options["k_bins"]), specs(case.options["v_bins"]))


@pytest.mark.parametrize("name", golden.names("cachegen"))
def test_bytes_and_numbers_are_lmcaches(name: str) -> None:
    case = golden.load_case(name)
    data = serde.CacheGenSerializer(config_of(case)).to_bytes(case.input)
    assert data == write_blob(read_blob(case.encoded))
    decoded = serde.CacheGenDeserializer(config_of(case)).from_bytes(case.encoded)
    assert golden.same_bits(decoded, case.decoded)


def test_code_for_lmcache_ports_by_its_import() -> None:
    """LMCache's own objects, in the order of either of its releases."""
    kv = codecs.numbers(20, 64, 8).reshape(32, 2, 20, 1, 8)
    config, metadata = SimpleNamespace(chunk_size=256), SimpleNamespace(model_name=LLAMA, kv_dtype="float16")
    for order in ((config, metadata), (metadata, config)):
        serializer, deserializer = serde.CreateSerde("cachegen", *order)
        assert isinstance(serializer, serde.Serializer) and isinstance(deserializer, serde.Deserializer)
        back = deserializer.from_bytes(serializer.to_bytes(kv))
        assert back.shape == kv.shape and back.dtype == np.float16
    serializer, deserializer = serde.CreateSerde("cachegen", metadata=metadata, config=config)
    assert deserializer.dtype == "float16"


@pytest.mark.parametrize("dtype", [None, "float32", ml_dtypes.bfloat16, np.float16])
def test_the_deserializers_dtype_is_cast_once(dtype: Any) -> None:
    """From the float32 product, as LMCache does, not from numbers already rounded to the stored type."""
    case = golden.load_case("cachegen-t255")
    decoded = serde.CacheGenDeserializer(config_of(case), dtype=dtype).from_bytes(case.encoded)
    symbols, maxima = cachegen.quantize_cache(case.input, case.options["k_bins"], case.options["v_bins"])
    wide = maxima.astype(np.float32)
    exact = cachegen.dequantize_cache(
        symbols, wide, case.options["k_bins"], case.options["v_bins"], case.input.shape[3]
    )
    expected = exact.astype(case.input.dtype if dtype is None else dtype)
    np.testing.assert_array_equal(codecs.bits(decoded), codecs.bits(expected))


def test_schedules_are_lmcaches(tmp_path: Path) -> None:
    config = serde.CacheGenConfig.from_model_name(LLAMA)
    assert config == serde.CacheGenConfig.from_layer_count(32)
    assert config["nlayers"] == 32 and config.kspecs[1]["start_layer"] == 10
    assert config.kspecs == [serde.QuantizationSpec(0, 10, 32), serde.QuantizationSpec(10, 32, 16)]
    assert serde.CacheGenConfig.from_model_name("THUDM/glm-4-9b-chat").nlayers == 40
    for layers in (10, 12, 80):
        assert serde.CacheGenConfig.from_layer_count(layers).bins() == cachegen.bin_schedule(layers)
    assert serde.CacheGenConfig.from_layer_count(9).bins() == ([32] * 9, [32] * 9)
    for contents in ({"num_hidden_layers": 24}, {"model_type": "x", "text_config": {"num_hidden_layers": 24}}):
        (tmp_path / "config.json").write_text(json.dumps(contents))
        for source in (contents, tmp_path, tmp_path / "config.json"):
            assert serde.CacheGenConfig.from_hf_config(source).nlayers == 24
        assert serde.CacheGenConfig.from_model_name(str(tmp_path)).nlayers == 24


def test_unknown_models_are_refused_without_asking_the_network(tmp_path: Path) -> None:
    """By the error that LMCache raises, which is kvzip's own too."""
    (tmp_path / "config.json").write_text("[1")
    for ask in (
        lambda: serde.CacheGenConfig.from_model_name("someone/some-model"),
        lambda: serde.CacheGenConfig.from_hf_config({"hidden_size": 64}),
        lambda: serde.CacheGenConfig.from_hf_config(tmp_path),
        lambda: serde.CreateSerde("kivi"),
    ):
        with pytest.raises(ValueError, match=r"."):
            ask()
        with pytest.raises(UsageError):
            ask()


@pytest.mark.parametrize(
    "kv",
    [
        np.zeros((2, 2, 4, 8), np.float32),
        np.zeros((2, 3, 4, 1, 8), np.float32),
        np.zeros((2, 2, 0, 1, 8), np.float32),
        np.zeros((2, 2, 4, 1, 8), np.float64),
        np.zeros((3, 2, 4, 1, 8), np.float32),
    ],
)
def test_what_is_no_cache_of_the_model_is_refused(kv: np.ndarray) -> None:
    with pytest.raises(UsageError):
        serde.CacheGenSerializer(serde.CacheGenConfig.from_layer_count(2)).to_bytes(kv)


def test_layers_need_bins() -> None:
    for specs in ([], [serde.QuantizationSpec(0, 1, 32)], [serde.QuantizationSpec(0, 2, 64)]):
        with pytest.raises(UsageError, match="bins"):
            serde.CacheGenSerializer(serde.CacheGenConfig(2, specs, [serde.QuantizationSpec(0, 2, 32)]))
    with pytest.raises(UsageError, match="model_name"):
        serde.CacheGenSerializer(SimpleNamespace(chunk_size=256))


def test_blobs_of_another_model_are_refused() -> None:
    case = golden.load_case("cachegen-t1")
    with pytest.raises(UsageError, match="2 layers"):
        serde.CacheGenDeserializer(serde.CacheGenConfig.from_layer_count(3)).from_bytes(case.encoded)
    with pytest.raises(KvzipError):
        serde.CacheGenDeserializer(serde.CacheGenConfig.from_layer_count(2)).from_bytes(b"cos\nsystem\n.")


def test_strided_caches_are_taken_as_they_are() -> None:
    kv = codecs.numbers(30, 4, 32).reshape(30, 2, 2, 2, 16)
    views = [kv.transpose(1, 2, 0, 3, 4), kv.transpose(1, 2, 0, 4, 3)]
    serializer = serde.CacheGenSerializer(serde.CacheGenConfig.from_layer_count(2))
    for view in views:
        assert serializer.to_bytes(view) == serializer.to_bytes(np.ascontiguousarray(view))


def test_kvz_files_behind_the_same_interface() -> None:
    """The same numbers as cachegen's blobs, in fewer bytes."""
    kv = codecs.numbers(256, 4, 64).reshape(2, 2, 256, 1, 64)
    config = serde.CacheGenConfig.from_layer_count(2)
    serializer, deserializer = serde.CreateSerde("kvzip", config)
    data, blob = serializer.to_bytes(kv), serde.CacheGenSerializer(config).to_bytes(kv)
    assert len(data) < 0.7 * len(blob)
    expected = serde.CacheGenDeserializer(config).from_bytes(blob)
    np.testing.assert_array_equal(codecs.bits(deserializer.from_bytes(data)), codecs.bits(expected))
    assert serde.KvzipDeserializer("float32").from_bytes(data).dtype == np.float32
    with pytest.raises(KvzipError):
        deserializer.from_bytes(data[:-9])


def test_torch_tensors_in_and_out() -> None:
    torch = pytest.importorskip("torch")
    case = golden.load_case("cachegen-t7-fp16")
    kv = torch.from_numpy(case.input.copy())
    for dtype in (torch.float16, torch.bfloat16):
        serializer, deserializer = (
            serde.CacheGenSerializer(config_of(case)),
            serde.CacheGenDeserializer(config_of(case), dtype=dtype),
        )
        data = serializer.to_bytes(kv)
        assert data == serializer.to_bytes(case.input)
        back = deserializer.from_bytes(data)
        assert back.dtype == dtype and back.shape == kv.shape
    assert torch.equal(
        serde.CacheGenDeserializer(config_of(case), dtype=torch.float16).from_bytes(data),
        torch.from_numpy(case.decoded.copy()),
    )


def test_numpy_users_never_meet_torch() -> None:
    code = (
        "import sys, numpy as np; from kvzip import serde; c = serde.CacheGenConfig.from_layer_count(1);"
        "b = serde.CacheGenSerializer(c).to_bytes(np.ones((1, 2, 3, 1, 4), np.float16));"
        "serde.CacheGenDeserializer(c).from_bytes(b); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_torch_dtype_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dtype:
        def __str__(self) -> str:
            return "torch.float16"

    Dtype.__module__ = "torch"
    monkeypatch.setitem(sys.modules, "torch", None)
    case = golden.load_case("cachegen-t1")
    with pytest.raises(UnsupportedError, match="pip install"):
        serde.CacheGenDeserializer(config_of(case), dtype=Dtype()).from_bytes(case.encoded)
