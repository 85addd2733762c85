"""turboquant keeps its promises: LMCache's bytes when asked for, fewer bits at its error when tuned, the same bytes
everywhere.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvzip.codecs.base import Codec
from kvzip.codecs.turboquant import PRESETS, TurboQuant, codebooks, rotation
from kvzip.devices.base import Device
from kvzip.devices.cpu import Cpu
from kvzip.errors import CorruptError, UsageError
from kvzip.lmcache.fp8 import Geometry
from kvzip.lmcache.turboquant import read_turboquant, write_turboquant
from tests import codecs
from tests.reference import golden
from tests.reference import turboquant as oracle
from tests.reference import turboquant_tuned as tuned_oracle

INNER = {"skip_first_layers": 0, "skip_last_layers": 0}
SHORT = [preset.removeprefix("turboquant_") for preset in PRESETS]


def gaussian(tokens: int, heads: int, head_dim: int, dtype: str = "float16", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(tokens, heads, head_dim)).astype(codecs.DTYPES[dtype])


def keys_like_qwen(tokens: int, heads: int, head_dim: int, seed: int = 0) -> np.ndarray:
    """Keys of a model whose projection has a bias: some channels stand far from zero."""
    rng = np.random.default_rng(seed)
    offset = np.where(rng.random((heads, head_dim)) < 0.1, rng.normal(0, 100, (heads, head_dim)), 0)
    return (rng.normal(size=(tokens, heads, head_dim)) + offset).astype(codecs.DTYPES["bfloat16"])


def bits_and_errors(codec: Codec, batch: codecs.Batch, device: Device, which: int) -> tuple[float, float]:
    """Bits a value and relative squared error of the keys (0) or values (1) of a batch."""
    encoded = codecs.bind(codec, batch).encode(batch, device)[which::2]
    size = sum(section.nbytes for one in encoded for section in one.sections.values())
    errors = [error for one in encoded for error in one.errors]
    values = sum(array.size for array in batch.arrays[which::2])
    return 8 * size / values, sum(e.squared_error for e in errors) / sum(e.energy for e in errors)


# ------------------------------------------------------------------------------------------------------ LMCache's bytes


@pytest.mark.parametrize("name", golden.names("turboquant"))
def test_object_is_that_of_lmcache(name: str, device: Device) -> None:
    """Every byte of the object, and every bit of what LMCache makes of it, for all presets."""
    case = golden.load_case(name)
    _, layers, tokens, width = case.input.shape
    geometry = Geometry(
        layers, tokens, width // case.options["head_dim"], case.options["head_dim"], case.input.dtype.name
    )
    kv = case.input.reshape(2, layers, *geometry.shape[2:]).swapaxes(0, 1)
    codec = TurboQuant(preset=case.options["preset"])
    assert write_turboquant(kv, codec, device) == case.encoded
    restored = read_turboquant(case.encoded, codec, geometry, device)
    expected = case.decoded.reshape(2, layers, *geometry.shape[2:]).swapaxes(0, 1)
    np.testing.assert_array_equal(codecs.bits(restored), codecs.bits(expected))


@pytest.mark.parametrize("head_dim", [64, 96, 112])
def test_slots_of_rows_with_nan_are_alike(head_dim: int, device: Device) -> None:
    """A GPU takes other registers for some lengths than a CPU does; a NaN must not show it, though its row is exact."""
    array = gaussian(32, 1, head_dim, "bfloat16")
    array[np.arange(32), 0, np.random.default_rng(1).integers(0, head_dim, 32)] = np.nan
    batch = codecs.batch_of([array, array])
    codec = codecs.bind(TurboQuant(preset="4bit_nc", tuned=False, **INNER), batch)
    found, expected = (
        [{tag: part.tobytes() for tag, part in one.items()} for one in codecs.encode(codec, batch, each)]
        for each in (device, Cpu())
    )
    assert found == expected


@pytest.mark.parametrize("preset", SHORT)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_rows_are_those_of_the_reference(preset: str, head_dim: int, device: Device) -> None:
    """On fresh numbers too, in every power of two; a tie within float32's rounding may go either way."""
    arrays = [gaussian(40, 2, head_dim, "bfloat16", seed) for seed in range(2)]
    batch = codecs.batch_of(arrays)
    codec = codecs.bind(TurboQuant(preset=preset, tuned=False, **INNER), batch)
    keys, values = codecs.encode(codec, batch, device)
    parts = [keys["DATA"], *([keys["NORM"]] if "NORM" in keys else []), values["DATA"], values["SCAL"]]
    found = np.concatenate([part.reshape(40, 2, -1) for part in parts], axis=-1)
    expected = oracle.encode_slots(*arrays, 0, oracle.PRESETS[f"turboquant_{preset}"])
    assert (found != expected[..., : found.shape[-1]]).sum() <= 1
    restored = codecs.decode(codec, batch, [keys, values], device)
    slots = np.zeros_like(expected)
    slots[..., : found.shape[-1]] = found
    for one, other in zip(
        restored, oracle.decode_slots(slots, 0, oracle.PRESETS[f"turboquant_{preset}"], head_dim), strict=True
    ):
        np.testing.assert_array_equal(codecs.bits(one), codecs.bits(other.astype(one.dtype)))


def test_signs_and_codebooks_are_those_of_the_reference() -> None:
    for layer in (0, 2, 31, 10**6):
        np.testing.assert_array_equal(rotation.signs(layer, 700), oracle.signs(layer, 700))
    for bits in (3, 4):
        for head_dim in (16, 32, 64, 128, 256, 512):
            levels = codebooks.codebook(bits, head_dim).view(np.float32)
            np.testing.assert_array_equal(levels[0, : 1 << bits], oracle.codebook(bits, head_dim))


@pytest.mark.parametrize("options", [{"block_size": 16}, {"block_size": 7, "skip_first_layers": 0}])
def test_object_of_any_shape_comes_back(options: dict[str, int], cpu: Device) -> None:
    """Tokens that fill no block, a head_dim that LMCache refuses, no raw layers at one end."""
    kv = np.stack([gaussian(2 * 19, 3, 80, seed=layer).reshape(2, 19, 3, 80) for layer in range(5)])
    codec = TurboQuant(preset="3bit_nc", **options)
    data = write_turboquant(kv, codec, cpu)
    geometry = Geometry(5, 19, 3, 80, "float16")
    restored = read_turboquant(data, codec, geometry, cpu)
    assert write_turboquant(restored, codec, cpu)[-100:] == data[-100:]
    error = ((restored.astype(float) - kv.astype(float)) ** 2).mean(axis=(1, 2, 3, 4))
    raw = np.arange(5) < codec.skip_first_layers
    raw[-2:] = True
    assert (error[raw] == 0).all() and (error[~raw] < 0.06).all()
    with pytest.raises(CorruptError, match="makes"):
        read_turboquant(data[:-1], codec, geometry, cpu)


def test_object_needs_more_layers_than_stay_raw(cpu: Device) -> None:
    with pytest.raises(UsageError, match="3 layers"):
        write_turboquant(np.zeros((3, 2, 4, 1, 32), np.float16), TurboQuant(), cpu)


# ------------------------------------------------------------------------------------------------------------ fidelity


@pytest.mark.parametrize(("preset", "most"), [("3bit_nc", 2.75), ("4bit_nc", 3.8)])
def test_tuned_takes_fewer_bits_at_the_error_of_the_preset(preset: str, most: float, cpu: Device) -> None:
    """On Gaussian numbers, which have no sink, all side information counted, for keys and values apart."""
    batch = codecs.batch_of([gaussian(1024, 4, 128, seed=seed) for seed in range(4)])
    for which in (0, 1):
        _, stock = bits_and_errors(TurboQuant(preset=preset, tuned=False, **INNER), batch, cpu, which)
        bits, error = bits_and_errors(TurboQuant(preset=preset, sinks=0, **INNER), batch, cpu, which)
        assert error <= stock * 1.01 and bits <= most


def test_tuned_survives_large_offsets(cpu: Device) -> None:
    """Rotation spreads a constant offset over all channels: the mean has to go first."""
    batch = codecs.batch_of([keys_like_qwen(256, 2, 64), gaussian(256, 2, 64, "bfloat16")])
    _, stock = bits_and_errors(TurboQuant(preset="4bit_nc", tuned=False, **INNER), batch, cpu, 0)
    _, tuned = bits_and_errors(TurboQuant(preset="4bit_nc", **INNER), batch, cpu, 0)
    assert tuned < stock / 50


def test_boundary_layers_are_raw_or_nearly_so(cpu: Device) -> None:
    """The first and last two layers: exact with LMCache's bytes, better than fp8 when tuned; the others are coarse."""
    batch = codecs.batch_of([gaussian(64, 1, 128, seed=seed) for seed in range(12)])
    for tuned, most in ((False, 0.0), (True, 3e-4)):
        codec = codecs.bind(TurboQuant(preset="3bit_nc", tuned=tuned), batch)
        restored = codecs.decode(codec, batch, codecs.encode(codec, batch, cpu), cpu)
        error = [((a.astype(float) - b.astype(float)) ** 2).mean() for a, b in zip(batch.arrays, restored, strict=True)]
        assert max(error[:4] + error[8:]) <= most and min(error[4:8]) > 0.02
        bits = [codec.describe(block.plane)["bits"] for block in batch.blocks]
        assert bits == [8 if tuned else 16] * 4 + [3] * 4 + [8 if tuned else 16] * 4


def test_restored_keys_keep_their_length(cpu: Device) -> None:
    """Scores of keys with queries are not biased more than LMCache's; values have the least squared error instead."""
    key, value = gaussian(512, 2, 128, seed=1), gaussian(512, 2, 128, seed=2)
    batch = codecs.batch_of([key, value])
    codec = codecs.bind(TurboQuant(preset="3bit_nc", **INNER), batch)
    restored = codecs.decode(codec, batch, codecs.encode(codec, batch, cpu), cpu)
    lengths = [
        np.linalg.norm(b.astype(float), axis=-1).mean() / np.linalg.norm(a.astype(float), axis=-1).mean()
        for a, b in zip(batch.arrays, restored, strict=True)
    ]
    assert abs(lengths[0] - 1) < 0.003 and 0.975 < lengths[1] < 0.99


def test_sinks_are_exact_and_touch_nothing_else(device: Device, cpu: Device) -> None:
    """The first tokens come back bit for bit at 16 bits a number; what they hold shows in no other section."""
    sections = []
    for scale in (1, 1000):
        arrays = [codecs.numbers(70, 2, 40, seed=seed) for seed in range(2)]
        for array in arrays:
            array[:3] *= array.dtype.type(scale)
        batch = codecs.batch_of(arrays)
        codec = TurboQuant(preset="3bit_nc", sinks=3, **INNER)
        sections.append(codecs.check_same_bytes(codec, batch, device, cpu))
        restored = codecs.decode(codecs.bind(codec, batch), batch, sections[-1], device)
        for one, array in zip(restored, arrays, strict=True):
            np.testing.assert_array_equal(codecs.bits(one[:3]), codecs.bits(array[:3]))
    for one, other in zip(*sections, strict=True):
        assert {tag for tag in one if one[tag].tobytes() != other[tag].tobytes()} == {"ROWS"}
        assert (one["EXCT"].nbytes, one["ROWS"].nbytes) == (2 * 4, 3 * 2 * 40 * 2)


def test_sinks_count_from_the_start_of_the_file(cpu: Device) -> None:
    array = codecs.numbers(40, 2, 32)
    for start, sinks, exact in ((0, 1, 1), (1, 3, 2), (1024, 1, 0), (0, 50, 40)):
        batch = codecs.batch_of([array], start=start)
        (sections,) = codecs.encode(codecs.bind(TurboQuant(sinks=sinks, **INNER), batch), batch, cpu)
        assert sections.get("ROWS", np.zeros(0)).nbytes == exact * 2 * 32 * 2


@pytest.mark.parametrize("dtype", codecs.DTYPES)
def test_tuned_blocks_are_what_the_format_says(dtype: str, cpu: Device) -> None:
    """A decoder written from docs/format.md in float64 gives the same numbers, up to float32's rounding."""
    for preset, head_dim in (("3bit_nc", 64), ("4bit_nc", 80), ("k8v4", 33)):
        batch = codecs.batch_of([codecs.numbers(50, 2, head_dim, dtype, seed) for seed in range(2)])
        codec = codecs.bind(TurboQuant(preset=preset, **INNER), batch)
        sections = codecs.encode(codec, batch, cpu)
        for i, restored in enumerate(codecs.decode(codec, batch, sections, cpu)):
            bits = codec.describe(batch.blocks[i].plane)["bits"]
            expected = tuned_oracle.decode(sections[i], restored.shape, restored.dtype, 0, bits, keep_norm=i == 0)
            precision = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-22}[dtype]
            np.testing.assert_allclose(restored.astype(float), expected, rtol=precision, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------- any shape


@pytest.mark.parametrize("order", codecs.ORDERS)
@pytest.mark.parametrize("geometry", [*codecs.GEOMETRIES, (40, 1, 576)], ids=str)
def test_same_bytes_on_every_device(geometry: tuple[int, int, int], order: str, device: Device, cpu: Device) -> None:
    """Any head_dim, any order in memory; 3 bits times a head_dim that is no multiple of 8 are padded."""
    for dtype, preset in (("bfloat16", "3bit_nc"), ("float16", "4bit_nc"), ("float32", "k8v4")):
        arrays = [codecs.ORDERS[order](codecs.numbers(*geometry, dtype, seed)) for seed in range(2)]
        plain = codecs.batch_of([np.ascontiguousarray(array) for array in arrays])
        for tuned in (True, False):
            codec = TurboQuant(preset=preset, tuned=tuned, **INNER)
            ordered = codecs.check_same_bytes(codec, codecs.batch_of(arrays), device, cpu)
            for one, other in zip(ordered, codecs.encode(codecs.bind(codec, plain), plain, cpu), strict=True):
                assert all((one[tag] == other[tag]).all() for tag in one), "memory order shows in the format"


@pytest.mark.parametrize("tuned", [True, False])
def test_odd_sizes_are_no_worse(tuned: bool, cpu: Device) -> None:
    """Rows of 80, 96 and 192 are rotated in blocks, with the error of powers of two."""
    for head_dim in (80, 96, 192, 100):
        batch = codecs.batch_of([gaussian(256, 2, head_dim, seed=seed) for seed in range(2)])
        for which, most in ((0, 0.036), (1, 0.055)):
            assert bits_and_errors(TurboQuant(preset="3bit_nc", tuned=tuned, **INNER), batch, cpu, which)[1] < most


def test_head_dim_cuts_planes_that_do_not_tell(cpu: Device) -> None:
    """``[tokens, 1, heads * head_dim]`` with the option is ``[tokens, heads, head_dim]`` without."""
    arrays = [gaussian(50, 4, 64, seed=seed) for seed in range(2)]
    joined = codecs.batch_of([array.reshape(50, 1, 256) for array in arrays])
    told = codecs.batch_of(arrays)
    for tuned in (True, False):
        options = {"preset": "3bit_nc", "tuned": tuned, **INNER}
        one = codecs.encode(codecs.bind(TurboQuant(head_dim=64, **options), joined), joined, cpu)
        other = codecs.encode(codecs.bind(TurboQuant(**options), told), told, cpu)
        for a, b in zip(one, other, strict=True):
            assert all((a[tag] == b[tag]).all() for tag in a)


def test_head_dim_that_does_not_fit_is_refused() -> None:
    plane = codecs.batch_of([gaussian(4, 1, 100)]).blocks[0].plane
    with pytest.raises(UsageError, match="head_dim 64 does not fit layer 0 key"):
        TurboQuant(head_dim=64).supports(plane)
    with pytest.raises(UsageError, match="head_dim 50"):
        TurboQuant(head_dim=50).supports(replace(plane, heads=2))
    assert TurboQuant().supports(replace(plane, head_dim=576))
    assert not TurboQuant().supports(replace(plane, head_dim=512, heads=2))
    assert not TurboQuant().supports(replace(plane, head_dim=1009))
    assert not TurboQuant().supports(replace(plane, dtype="float8_e4m3fn"))


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("tuned", [True, False])
@pytest.mark.parametrize("dtype", codecs.DTYPES)
def test_rows_that_cannot_be_held_are_exact(tuned: bool, dtype: str, device: Device, cpu: Device) -> None:
    """NaN, Inf and numbers beyond fp16 come back bit for bit with their row; other rows do not suffer."""
    array = codecs.numbers(70, 3, 40, dtype)
    huge = array.dtype.type(60000 if dtype == "float16" else 1e38)
    array[0, 0, 0], array[33, 1, 7], array[69, 2, 39], array[40, 0] = np.nan, np.inf, -np.inf, huge
    batch = codecs.batch_of([array, array.copy()])
    codec = TurboQuant(preset="3bit_nc", tuned=tuned, **INNER)
    sections = codecs.check_same_bytes(codec, batch, device, cpu)
    restored = codecs.decode(codecs.bind(codec, batch), batch, sections, device)
    rows = [(0, 0), (33, 1), (69, 2), *([] if dtype == "float16" else [(40, 0)])]
    others = np.ones((70, 3), bool)
    others[40, 0] = False
    for token, head in rows:
        others[token, head] = False
    for one in restored:
        for token, head in rows:
            np.testing.assert_array_equal(codecs.bits(one[token, head]), codecs.bits(array[token, head]))
        error = (one[others].astype(float) - array[others].astype(float)) ** 2
        assert error.mean() < 0.06 * (array[others].astype(float) ** 2).mean()


@pytest.mark.parametrize("tuned", [True, False])
def test_rows_without_spread_come_back(tuned: bool, cpu: Device) -> None:
    """Zeros are zeros, a value that all tokens share is close to itself, and nothing is divided by nothing."""
    zeros = np.zeros((40, 2, 64), np.float16)
    constant = np.full((40, 2, 64), 7.25, np.float16)
    for array in (zeros, constant):
        batch = codecs.batch_of([array, array])
        codec = codecs.bind(TurboQuant(preset="3bit_nc", tuned=tuned, **INNER), batch)
        key, value = codecs.decode(codec, batch, codecs.encode(codec, batch, cpu), cpu)
        np.testing.assert_array_equal(value, array)
        assert ((key.astype(float) - array) ** 2).mean() <= (0 if tuned else 0.04 * (array.astype(float) ** 2).mean())


@pytest.mark.parametrize("tuned", [True, False])
def test_recorded_errors_are_true(tuned: bool, cpu: Device) -> None:
    batch = codecs.batch_of([codecs.numbers(300, 2, 40, seed=seed) for seed in range(2)])
    for preset in SHORT:
        codecs.check_errors(TurboQuant(preset=preset, tuned=tuned, **INNER), batch, cpu)


@pytest.mark.parametrize("tuned", [True, False])
def test_hostile_sections_are_reported(tuned: bool, device: Device) -> None:
    """A section of the wrong length, streams and widths that do not fit are errors; any index is a number."""
    arrays = [codecs.numbers(100, 2, 40, seed=seed) for seed in range(2)]
    arrays[0][7, 1, 3] = np.nan
    for preset in ("3bit_nc", "k8v4"):
        codec = TurboQuant(preset=preset, tuned=tuned, **INNER)
        assert codecs.check_hostile(codec, codecs.batch_of(arrays), device) > (30 if tuned else 15)


def test_a_forged_head_dim_is_damage() -> None:
    block = codecs.batch_of([gaussian(4, 1, 100)]).blocks[0]
    with pytest.raises(CorruptError, match="does not fit"):
        TurboQuant(head_dim=64, layers=1).bound(block)


# -------------------------------------------------------------------------------------------------------------- options


def test_configuration_round_trip() -> None:
    batch = codecs.batch_of([codecs.numbers(4, 1, 8)] * 24)
    options = {"skip_first_layers": 0, "skip_last_layers": 1, "block_size": 32, "head_dim": 8}
    for codec in (TurboQuant(), TurboQuant(preset="3bit_nc", tuned=False), TurboQuant(sinks=0), TurboQuant(**options)):
        codecs.check_config(codec, batch)
    bound = codecs.bind(TurboQuant(), batch).config()
    assert (bound["layers"], bound["sinks"], TurboQuant.from_config({}).sinks) == (12, 1, 0)


@pytest.mark.parametrize(
    "options",
    [
        *({"preset": "5bit"}, {"preset": ""}, {"tuned": 1}, {"sinks": -1}, {"sinks": 1, "tuned": False}),
        *({"skip_first_layers": -1}, {"block_size": 0}, {"head_dim": 1.5}),
    ],
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))} must be"):
        TurboQuant(**options)
