"""The target that reads LMCache's files: pickles, which must never be run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

import kvzip
from fuzz.edits import edit, steps
from fuzz.files import refused
from fuzz.guard import GuardedCpu
from kvzip.errors import KvzipError
from kvzip.lmcache.convert import export_cache, import_files


class BlobTarget:
    """The first byte names a genuine file, the second tells whether the rest are changes to it or a file."""

    name = "lmcache-blob"

    @cached_property
    def _device(self) -> GuardedCpu:
        return GuardedCpu()

    @cached_property
    def files(self) -> list[bytes]:
        """CacheGen blobs of small caches: one token, one stream, two streams."""
        rng = np.random.default_rng(0)
        found = []
        for tokens, dtype in ((1, np.float16), (40, np.float32), (300, np.float16)):
            arrays = {
                f"layers.{layer}.{kind}": rng.standard_normal((tokens, 1, 8)).astype(dtype)
                for layer in range(2)
                for kind in ("key", "value")
            }
            packed = kvzip.compress(arrays, codec="cachegen", layout="T,H,D", sinks=0, device=self._device)
            with kvzip.open(packed, device=self._device) as cache:
                found.append(export_cache(cache, device=self._device))
        return found

    def seeds(self) -> Sequence[bytes]:
        return [b"\x00\xff" + file for file in self.files[:2]]

    def run(self, inputs: Sequence[bytes]) -> None:
        for data in inputs:
            first, second = (*data[:2], 0, 0)[:2]
            if second >= 192:
                blob = data[2:]
            else:
                changed = bytearray(self.files[first % len(self.files)])
                for step in steps(data[2:]):
                    edit(changed, step)
                blob = bytes(changed)
            try:
                import_files([("blob", blob)], None, device=self._device)
            except KvzipError as error:
                refused(error)
