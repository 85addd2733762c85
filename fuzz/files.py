"""Targets that read whole files: safetensors and ``.kvz``."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import safetensors
import safetensors.numpy
import xxhash

import kvzip
from fuzz.decoders import OPTIONS
from fuzz.edits import edit, edit_json, steps
from fuzz.guard import GuardedCpu
from kvzip.codecs import available_codecs
from kvzip.container import Reader, StreamReader
from kvzip.container import format as fmt
from kvzip.errors import KvzipError
from kvzip.inspection import Inspection
from kvzip.layouts import map_cache
from kvzip.pipeline import StoredCache, collect
from kvzip.repair import repair
from kvzip.tensorfile import open_tensors

LARGEST = 1 << 22
"""Bytes of a cache that is still decoded: a header may claim any size that its frames cover."""

LENIENT = ("F8E4M3FN",)
"""What the reader takes and the safetensors library does not."""


def refused(error: KvzipError) -> None:
    """An error of ours must have a name of its own."""
    assert error.code != type(error).default_code, f"an error without a code: {error}"


class SafetensorsTarget:
    """The first byte tells whether the rest is a file or changes to a genuine one, the second which one."""

    name = "safetensors"

    @cached_property
    def files(self) -> list[tuple[bytes, bytes]]:
        """Header and data of small genuine files."""
        half, tokens = np.ones((2, 3, 4), np.float16), np.arange(3)
        fused = np.ones((2, 2, 3, 8), np.float32)
        return [
            split(saved({"layers.0.key": half, "layers.0.value": half, "ids": tokens})),
            split(saved({"kv": fused})),
            split(saved({"past_key_values.0.key": half[None], "past_key_values.0.value": half[None]})),
            (b"{}", b""),
        ]

    def seeds(self) -> Sequence[bytes]:
        return [b"\xff\x00" + struct.pack("<Q", len(head)) + head + data for head, data in self.files]

    def run(self, inputs: Sequence[bytes]) -> None:
        for data in inputs:
            self._read(data[2:] if data[:1] >= b"\xc0" else self._changed(data))

    def _changed(self, script: bytes) -> bytes:
        head, data = map(bytearray, self.files[(script[1] if len(script) > 1 else 0) % len(self.files)])
        length = None
        for step in steps(script[2:]):
            if step.part >= 250:
                length = step.value if step.part % 2 else step.where
            elif step.part >= 230:
                edit(data, step)
            else:
                edit_json(head, step)
        return struct.pack("<Q", len(head) if length is None else length) + head + data

    def _read(self, data: bytes) -> None:
        try:
            with open_tensors(io.BytesIO(data)) as source:
                source.read_into(0, 0, bytearray(source.files[0].size))
                source.finish()
                map_cache(source)
        except KvzipError as error:
            refused(error)
            return
        # What is refused here and taken by the library is stricter on purpose; the other way round is a bug.
        if not any(tag.encode() in data for tag in LENIENT):
            safetensors.deserialize(data)


class KvzTarget:
    """The first byte names a genuine file, the second whether checksums and index are made right again; then come
    changes to its frames' heads and bodies.
    """

    name = "kvz"

    @cached_property
    def _device(self) -> GuardedCpu:
        return GuardedCpu()

    @cached_property
    def files(self) -> list[list[Frame]]:
        """The frames of small genuine files."""
        rng = np.random.default_rng(0)
        arrays = {
            f"layers.{layer}.{kind}": rng.standard_normal((2, 40, 8)).astype(np.float16)
            for layer in range(2)
            for kind in ("key", "value")
        }
        options = {"block_tokens": 16, "device": self._device}
        specs = [OPTIONS.get(name, (name,))[-1] for name in available_codecs()]
        files = [kvzip.compress({**arrays, "x": np.arange(9)}, codec=spec, **options) for spec in specs]
        stacked = rng.standard_normal((2, 2, 20, 8)).astype(np.float32)
        files.append(kvzip.compress({"kv": stacked}, codec="cachegen", layout="kv,L,T,C", head_dim=4, **options))
        return [frames(file) for file in files]

    def seeds(self) -> Sequence[bytes]:
        return ()

    def run(self, inputs: Sequence[bytes]) -> None:
        for data in inputs:
            if len(data) > 2:
                self._read(self._changed(data), data[1])

    def _changed(self, script: bytes) -> bytes:
        parts = [
            (kind, bytearray(head), bytearray(body)) for kind, head, body in self.files[script[0] % len(self.files)]
        ]
        for step in steps(script[2:]):
            # The header and the index are few among many frames, and most of what is read.
            number = (0, 0, -2, -3)[step.part % 4] if step.part < 160 else step.part % len(parts)
            kind, head, body = parts[number]
            if step.what >= 250:
                parts.insert(number % len(parts), parts[number]) if step.what % 2 else parts.pop(number)
                if not parts:
                    break
            elif body and step.part & 16:
                edit(body, step)
            else:
                (edit_json if kind in (b"HEAD", b"stat") else edit)(head, step)
        data = assemble(
            [(kind, bytes(head), bytes(body)) for kind, head, body in parts],
            index=script[1] < 200,
            trailer=script[1] < 220,
        )
        if script[1] >= 240:
            damaged = bytearray(data)
            for step in steps(script[2:]):
                edit(damaged, step)
            data = bytes(damaged)
        return data

    def _read(self, data: bytes, way: int) -> None:
        try:
            if way % 3 == 0:
                saved = io.BytesIO()
                repair(io.BytesIO(data), saved, whole_layers=way % 2 > 0)
                Reader.open(saved)
                return
            reader = Reader.open(io.BytesIO(data)) if way % 3 == 1 else StreamReader(io.BytesIO(data))
            stored = StoredCache(reader)
            if isinstance(reader, Reader):
                Inspection(reader.header, reader).to_json(sections=True)
            if sum(plane.nbytes for plane in reader.header.planes) <= LARGEST:
                collect(stored, stored.select(*PARTS[way % len(PARTS)]), device=self._device)
        except KvzipError as error:
            refused(error)


PARTS = ((None, None), (None, range(5, 30)), (range(1, 2), None), (range(1), range(3)))
Frame = tuple[bytes, bytes, bytes]


def saved(arrays: dict[str, np.ndarray]) -> bytes:
    """A safetensors file, as the library writes it."""
    return safetensors.numpy.save(arrays, metadata={"format": "pt"})


def split(file: bytes) -> tuple[bytes, bytes]:
    """The JSON and the data of a safetensors file."""
    (length,) = struct.unpack_from("<Q", file)
    return file[8 : 8 + length], file[8 + length :]


def frames(file: bytes) -> list[Frame]:
    """Type, head and body of every frame of a one-member file."""
    found = []
    at = fmt.PROLOGUE.size
    while at < len(file):
        size = fmt.parse_frame(file, at, at)
        head, body = at + fmt.FRAME.size, at + fmt.FRAME.size + fmt.padded(size.head)
        found.append((size.kind, file[head : head + size.head], file[body : body + size.body]))
        at += size.total
    return found


def assemble(parts: Sequence[Frame], *, index: bool, trailer: bool) -> bytes:
    """A file of frames with right checksums; ``index`` and ``trailer`` tell whether those are made right, too."""
    out = bytearray(fmt.pack_prologue())
    seed, index_span = 0, (0, 0)
    rows: list[tuple[int, ...]] = []
    for kind, head, body in parts:
        at = len(out)
        if kind == b"INDX" and index:
            body = mended(rows, head, body)
            head = fmt.INDEX_HEAD.pack(len(rows), (len(body) - 40 * len(rows)) // 16, 0)
        if kind == b"TAIL" and trailer and index_span[0]:
            head = struct.pack("<QQQ", *index_span, at + fmt.TAIL.size)
        frame = fmt.FRAME.pack(kind, len(head), len(body)) + head + fmt.zeros(len(head)) + body + fmt.zeros(len(body))
        checksum = xxhash.xxh3_64_intdigest(frame, 0 if kind in (b"HEAD", b"TAIL") else seed)
        out += frame + fmt.CHECKSUM.pack(checksum)
        seed = checksum if kind == b"HEAD" else seed
        if kind == b"INDX":
            index_span = (at, len(out) - at)
        if kind == b"DATA" and len(head) >= fmt.DATA_HEAD.size:
            group, codec, _, start, count, _ = fmt.DATA_HEAD.unpack_from(head)
            rows.append((at, checksum, start, len(out) - at, count, group, codec, 0))
    return bytes(out)


def mended(rows: list[tuple[int, ...]], head: bytes, body: bytes) -> bytes:
    """The body of an index of the frames that came before it; its totals stay."""
    count = fmt.INDEX_HEAD.unpack_from(head)[0] if len(head) >= fmt.INDEX_HEAD.size else 0
    return np.array(rows, fmt.ENTRY).tobytes() + body[40 * min(count, len(body) // 40) :]
