"""Write tests/golden/lmcache's CacheGen and fp8 cases anew with LMCache itself, or say where they differ.

    python tools/make_lmcache_golden.py [--write]

Needs torch and ``lmcache==0.5.6``, whose numba kernels need no GPU. No test needs this script.
"""

from __future__ import annotations

import argparse
import lzma
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvzip.torch_border import to_numpy, to_torch
from tests.reference import golden


def cachegen(case: golden.Case) -> tuple[bytes, np.ndarray]:
    """What LMCache's serializer writes and its deserializer reads back. The blob is the script's own, so it may run."""
    import torch
    from lmcache.storage_backend.serde import cachegen_basics, cachegen_decoder, cachegen_encoder

    def specs(bins: list[int]) -> list[Any]:
        return [cachegen_basics.QuantizationSpec(layer, layer + 1, count) for layer, count in enumerate(bins)]

    config = cachegen_basics.CacheGenConfig(
        len(case.input), specs(case.options["k_bins"]), specs(case.options["v_bins"])
    )
    cachegen_basics.CacheGenConfig.from_model_name = staticmethod(lambda name: config)
    engine, metadata = SimpleNamespace(chunk_size=case.input.shape[2]), SimpleNamespace(model_name="golden")
    encoded = cachegen_encoder.CacheGenSerializer(engine, metadata).to_bytes(to_torch(case.input.copy()))
    deserializer = cachegen_decoder.CacheGenDeserializer(engine, metadata, getattr(torch, case.input.dtype.name))
    return encoded, to_numpy(deserializer.from_bytes(encoded).contiguous())


def fp8(case: golden.Case) -> tuple[bytes, np.ndarray]:
    """LMCache's fp8 serde is a cast of torch's; the classes around it need a running LMCache."""
    import torch

    codes = to_torch(case.input.copy()).to(getattr(torch, case.options["fp8_dtype"]))
    decoded = codes.to(getattr(torch, case.input.dtype.name))
    return codes.view(torch.uint8).numpy().tobytes(), to_numpy(decoded)


def safetensors_of(array: np.ndarray) -> bytes:
    """A safetensors file with the tensor ``kv``."""
    tag = {"bfloat16": "BF16", "float16": "F16"}[array.dtype.name]
    shape = ",".join(map(str, array.shape))
    header = f'{{"kv":{{"dtype":"{tag}","shape":[{shape}],"data_offsets":[0,{array.nbytes}]}}}}'.encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + array.tobytes()


def without_keys(blob: bytes) -> bytes:
    """What a blob holds, but for the names of its storages, which are addresses of the process that wrote it."""
    from kvzip.lmcache.blob import read_blob, write_blob

    return write_blob(read_blob(blob))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the files")
    write = parser.parse_args().write
    differing = 0
    for codec, make in (("cachegen", cachegen), ("fp8", fp8)):
        for name in golden.names(codec):
            case = golden.load_case(name)
            encoded, decoded = make(case)
            normal = without_keys if codec == "cachegen" else bytes
            same = normal(encoded) == normal(case.encoded) and golden.same_bits(decoded, case.decoded)
            differing += not same
            print(f"{name}: {'the same' if same else 'differs'}")
            if write:
                (golden.FOLDER / name / "encoded.bin.xz").write_bytes(lzma.compress(encoded))
                (golden.FOLDER / name / "decoded.safetensors.xz").write_bytes(lzma.compress(safetensors_of(decoded)))
    return int(differing > 0 and not write)


if __name__ == "__main__":
    sys.exit(main())
