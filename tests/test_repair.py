"""What repair saves is a sound file that holds exactly what the same part of the undamaged one holds."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

import kvzip
from kvzip.container import Reader
from kvzip.devices.base import Device
from kvzip.errors import CorruptError, KvzipError, UsageError
from kvzip.repair import Repair, repair, share
from tests.containers import frames

LAYERS, TOKENS, BLOCK = 3, 70, 16


def arrays(layout: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    extra = {"token_ids": np.arange(TOKENS)}
    if layout == "L,kv,T,H,D":
        return {"kv": rng.standard_normal((LAYERS, 2, TOKENS, 2, 8)).astype(np.float16), **extra}
    names = [f"layers.{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")]
    return {**{name: rng.standard_normal((2, TOKENS, 8)).astype(np.float16) for name in names}, **extra}


def packed(cpu: Device, codec: str = "cachegen", layout: str = "H,T,D", **options: Any) -> bytes:
    identity = {"model": "m", "tokens": {"count": TOKENS}}
    return kvzip.compress(
        arrays(layout), codec=codec, layout=layout, block_tokens=BLOCK, identity=identity, device=cpu, **options
    )


def repaired(data: bytes, **options: Any) -> tuple[list[Repair], bytes]:
    sink = io.BytesIO()
    return repair(io.BytesIO(data), sink, **options), sink.getvalue()


def block_at(data: bytes, layer: int, kind: str, start: int) -> tuple[int, int]:
    """Offset and length of a frame."""
    (entry,) = [
        entry
        for entry in Reader.open(io.BytesIO(data)).index
        if any((p.layer, p.kind) == (layer, kind) for p in entry.block.planes) and entry.block.start == start
    ]
    return entry.offset, entry.length


def damaged(data: bytes, layer: int, kind: str, start: int) -> bytes:
    offset, length = block_at(data, layer, kind, start)
    return data[: offset + length // 2] + bytes([data[offset + length // 2] ^ 4]) + data[offset + length // 2 + 1 :]


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("codec", ["raw", "cachegen", "fp8"])
def test_broken_structure_around_sound_blocks_costs_nothing(codec: str, cpu: Device) -> None:
    """Index, trailer and prologue can be made again: the result is the original, byte for byte."""
    data = packed(cpu, codec)
    index = next(start for kind, start, _ in frames(data) if kind == b"INDX")
    for broken in (data[:index], data[:-9], data[9:], data[: index + 30] + b"\xff" * 30 + data[index + 60 :], data):
        (found,), restored = repaired(broken)
        assert found.complete
        assert restored == data


@pytest.mark.parametrize("layout", ["H,T,D", "L,kv,T,H,D"])
@pytest.mark.parametrize("codec", ["raw", "cachegen", "lossless"])
@pytest.mark.parametrize(("layer", "kind", "start"), [(0, "key", 16), (1, "value", 48), (2, "key", 64)])
def test_a_lost_block_leaves_the_tokens_before_it(
    codec: str, layout: str, layer: int, kind: str, start: int, cpu: Device
) -> None:
    """Of all layers, and equal to what ``--tokens`` of the undamaged file gives; other tensors stay whole."""
    data = packed(cpu, codec, layout)
    (found,), restored = repaired(damaged(data, layer, kind, start))
    assert (found.complete, found.tokens, found.layers) == (False, start, [0, 1, 2])
    assert [(p.layer, p.kind, a) for p, a, _ in found.missing] == [(layer, kind, start)]
    assert 0 < share(found, found.missing) < 0.1
    same(kvzip.decompress(restored, device=cpu), kvzip.decompress(data, tokens=(0, start), device=cpu))
    header = Reader.open(io.BytesIO(restored)).header
    assert header.identity == {"model": "m"}


@pytest.mark.parametrize("layout", ["H,T,D", "L,kv,T,H,D"])
def test_whole_layers_can_be_preferred(layout: str, cpu: Device) -> None:
    data = packed(cpu, layout=layout)
    (found,), restored = repaired(damaged(data, 0, "key", 48), whole_layers=True)
    assert (found.tokens, found.layers) == (None, [1, 2])
    same(kvzip.decompress(restored, device=cpu), kvzip.decompress(data, layers=(1, 3), device=cpu))
    whole, kept = (kvzip.open(one, device=cpu) for one in (data, restored))
    assert whole.statistics is not None and kept.statistics is not None
    indices = [plane.index for plane in whole.planes if plane.kind == "bytes" or plane.layer > 0]
    assert kept.statistics == {key: [column[i] for i in indices] for key, column in whole.statistics.items()}


def test_a_first_block_that_is_lost_leaves_whole_layers(cpu: Device) -> None:
    data = packed(cpu)
    (found,), restored = repaired(damaged(data, 2, "value", 0))
    assert (found.tokens, found.layers) == (None, [0, 1])
    same(kvzip.decompress(restored, device=cpu), kvzip.decompress(data, layers=(0, 2), device=cpu))


def test_a_lost_tensor_that_is_no_kv_is_left_out(cpu: Device) -> None:
    data = packed(cpu)
    offset = next(e.offset for e in Reader.open(io.BytesIO(data)).index if e.block.planes[0].kind == "bytes")
    (found,), restored = repaired(data[: offset + 50] + b"\xff" + data[offset + 51 :])
    assert found.tensors == ["token_ids"]
    assert (found.tokens, found.layers) == (None, [0, 1, 2])
    expected = kvzip.decompress(data, device=cpu)
    del expected["token_ids"]
    same(kvzip.decompress(restored, device=cpu), expected)


@pytest.mark.parametrize("layout", ["H,T,D", "L,kv,T,H,D"])
def test_every_truncation_gives_a_sound_part_or_says_that_nothing_is_left(layout: str, cpu: Device) -> None:
    """First tokens of all layers, or whole layers; more and more of either."""
    data = packed(cpu, "raw", layout)
    whole = kvzip.decompress(data, device=cpu)
    saved = [(0, 0)]
    for length in [*range(0, len(data), 97), len(data)]:
        try:
            (found,), restored = repaired(data[:length])
        except CorruptError as error:
            assert error.code in ("kvz-lost", "kvz-magic")
            assert saved == [(0, 0)]
            continue
        part = kvzip.decompress(restored, device=cpu)
        saved.append((len(found.layers), TOKENS if found.tokens is None else found.tokens))
        expected = whole
        if found.tokens is not None or len(found.layers) < LAYERS:
            run = (found.layers[0], found.layers[-1] + 1)
            expected = kvzip.decompress(data, layers=run, tokens=found.tokens and (0, found.tokens), device=cpu)
        same(part, {name: array for name, array in expected.items() if name not in found.tensors})
    assert saved[-1] == (LAYERS, TOKENS)
    assert {layers for layers, _ in saved} == set(range(LAYERS + 1))
    assert saved == sorted(saved)


def test_every_damaged_byte_leaves_something(cpu: Device) -> None:
    """One byte anywhere behind the header never costs more than a block's worth of tokens."""
    data = packed(cpu)
    _, start, length = frames(data)[0]
    for at in range(start + length, len(data), 61):
        _, restored = repaired(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        kvzip.decompress(restored, device=cpu)


def test_tokens_in_blocks_are_cut_between_blocks(cpu: Device) -> None:
    """A paged tensor cannot end inside one of its blocks of 24 tokens, whatever the frames say."""
    kv = np.random.default_rng(0).standard_normal((4, 24, 2, 8)).astype(np.float16)
    data = kvzip.compress(
        {f"layers.0.{k}": kv for k in ("key", "value")}, codec="raw", layout="N,b,H,D", block_tokens=16, device=cpu
    )
    (found,), restored = repaired(damaged(data, 0, "value", 80))
    assert found.tokens == 48
    same(kvzip.decompress(restored, device=cpu), kvzip.decompress(data, tokens=(0, 48), device=cpu))


def test_members_are_repaired_one_by_one(cpu: Device) -> None:
    data = packed(cpu)
    first, second = repaired(damaged(data, 0, "key", 32) + data)[0]
    assert (first.tokens, second.complete) == (32, True)
    restored = repaired(damaged(data, 0, "key", 32) + data)[1]
    same(kvzip.decompress(restored, member=1, device=cpu), kvzip.decompress(data, device=cpu))


def hopeless(data: bytes) -> bytes:
    """The first tokens of every layer are lost."""
    for layer in range(LAYERS):
        data = damaged(data, layer, "key", 0)
    return data


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", ["no tokens", "cut", "no header"])
def test_a_lost_member_does_not_take_the_others_with_it(place: int, kind: str, cpu: Device) -> None:
    """Each that can be saved is, and the lost one is reported in its place."""
    data = packed(cpu)
    _, start, length = frames(data)[0]
    bad = {
        "no tokens": hopeless(data),
        "cut": data[: start + length + 100],
        "no header": data[: start + 20] + b"\xff" + data[start + 21 :],
    }[kind]
    parts = [data, damaged(data, 0, "key", 32)]
    parts.insert(place, bad)
    repairs, saved = repaired(b"".join(parts))
    assert [each.lost is not None for each in repairs] == [number == place for number in range(3)]
    assert not repairs[place].complete
    whole, part = (each for each in repairs if each.lost is None)
    assert (whole.complete, whole.tokens, part.tokens) == (True, None, 32)
    expected = kvzip.decompress(data, device=cpu)
    same(kvzip.decompress(saved, member=0, device=cpu), expected)
    same(kvzip.decompress(saved, member=1, device=cpu), kvzip.decompress(data, tokens=(0, 32), device=cpu))
    with pytest.raises(UsageError, match="holds 2 caches"):
        kvzip.decompress(saved, member=2, device=cpu)


def test_nothing_is_saved_of_what_has_no_use(cpu: Device) -> None:
    data = packed(cpu)
    for lost in (hopeless(data), hopeless(data) + data[50:], hopeless(data) * 2, b"", data[50:], b"text"):
        with pytest.raises(KvzipError) as error:
            repaired(lost)
        assert error.value.code == "kvz-lost"
