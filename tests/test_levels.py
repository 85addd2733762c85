"""Several qualities in one file share what they can, may be left out by chunk, and a client can choose in time."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvzip
from kvzip import streaming
from kvzip.codecs.cachegen import CacheGen
from kvzip.devices.base import Device
from kvzip.errors import CorruptError, UsageError
from tests import cli, codecs
from tests.reference import cachegen as oracle


@pytest.mark.parametrize("coder", ["rans", "range"])
@pytest.mark.parametrize("dtype", codecs.DTYPES)
def test_every_level_is_as_fine_as_it_says(dtype: str, coder: str, device: Device) -> None:
    """The coarsest is the file without levels; each finer one is within half of its step."""
    array = codecs.numbers(103, 2, 40, dtype)
    array[3], array[7, 1, 5] = 0, np.nan
    batch = codecs.batch_of([array])
    plain, codec = (codecs.bind(CacheGen(coder=coder, levels=levels), batch) for levels in (1, 3))
    sections = codecs.encode(codec, batch, device)
    assert set(sections[0]) == {*codecs.encode(plain, batch, device)[0], "REF1", "REF2"}
    (alone,) = codecs.decode(plain, batch, codecs.encode(plain, batch, device), device)
    x = array.astype(np.float64)
    top = np.abs(np.where(np.isfinite(x), x, 0)).max(axis=(1, 2), keepdims=True)
    for level in range(3):
        (restored,) = codecs.decode(codec.at_level(level), batch, sections, device)
        np.testing.assert_array_equal(codecs.bits(restored[[0, 7]]), codecs.bits(array[[0, 7]]))
        if level == 0:
            np.testing.assert_array_equal(codecs.bits(restored), codecs.bits(alone))
        half_step = top / (15 * 3**level) / 2
        rounding = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24}[dtype] * (np.abs(x) + half_step)
        error = np.abs(restored.astype(np.float64) - x)
        assert (error <= half_step * 1.001 + rounding * 1.001)[np.isfinite(x)].all()


def test_a_level_is_worth_the_quantizer_of_its_step(cpu: Device) -> None:
    """Refining costs no quality: the mean squared error is that of quantizing at once."""
    array = codecs.numbers(500, 2, 64, "float32")
    batch = codecs.batch_of([array])
    codec = codecs.bind(CacheGen(levels=3, sinks=0), batch)
    sections = codecs.encode(codec, batch, cpu)
    flat = array.reshape(500, -1)
    for level, bins in enumerate((32, 92, 272)):
        (restored,) = codecs.decode(codec.at_level(level), batch, sections, cpu)
        half = np.float32(bins // 2 - 1)
        top = oracle.max_tensor(flat)
        at_once = np.rint(flat * (half / top)) / half * top
        found = np.mean((restored.reshape(flat.shape) - flat) ** 2)
        assert found == pytest.approx(np.mean((at_once - flat) ** 2), rel=1e-3)


@pytest.mark.parametrize("geometry", codecs.GEOMETRIES, ids=str)
def test_same_bytes_on_every_device(geometry: tuple[int, int, int], device: Device, cpu: Device) -> None:
    for dtype in codecs.DTYPES:
        for order in codecs.ORDERS.values():
            arrays = [order(codecs.numbers(*geometry, dtype, seed)) for seed in range(2)]
            codecs.check_same_bytes(CacheGen(levels=3), codecs.batch_of(arrays), device, cpu)


def test_recorded_errors_are_those_of_the_finest(cpu: Device) -> None:
    arrays = [codecs.numbers(300, 2, 40, seed=seed) for seed in range(2)]
    codecs.check_errors(CacheGen(levels=2), codecs.batch_of(arrays), cpu)


def test_hostile_refinements_do_no_harm(device: Device) -> None:
    batch = codecs.batch_of([codecs.numbers(100, 2, 40, seed=seed) for seed in range(2)])
    assert codecs.check_hostile(CacheGen(levels=3), batch, device) > 30


def test_a_refinement_of_what_is_not_there_is_an_error(cpu: Device) -> None:
    batch = codecs.batch_of([codecs.numbers(10, 1, 32)])
    codec = codecs.bind(CacheGen(levels=3), batch)
    (sections,) = codecs.encode(codec, batch, cpu)
    del sections["REF1"]
    with pytest.raises(CorruptError, match="REF2 refines what is not there"):
        codecs.decode(codec, batch, [sections], cpu)


def test_options() -> None:
    batch = codecs.batch_of([codecs.numbers(4, 1, 8)] * 4)
    codecs.check_config(CacheGen(levels=3), batch)
    assert "levels" not in codecs.bind(CacheGen(), batch).config()
    for levels in (0, 4):
        with pytest.raises(UsageError, match="levels must be 1 to 3"):
            CacheGen(levels=levels)
    with pytest.raises(UsageError, match="cannot be refined"):
        codecs.bind(CacheGen(levels=2, level=7), batch)


# ------------------------------------------------------------------------------------------- files


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of three levels and four chunks."""
    path = tmp_path_factory.mktemp("levels") / "kv.kvz"
    arrays = {
        f"layers.{i}.{kind}": codecs.numbers(200, 2, 64, seed=i).swapaxes(0, 1).copy()
        for i in range(2)
        for kind in ("key", "value")
    }
    kvzip.compress(arrays, path, codec="cachegen", levels=3, block_tokens=64)
    return path


def test_a_file_is_read_at_any_of_its_levels(packed: Path) -> None:
    tensors = [kvzip.decompress(packed, level=level)["layers.1.key"].astype(np.float64) for level in range(3)]
    original = codecs.numbers(200, 2, 64, seed=1).swapaxes(0, 1).astype(np.float64)
    errors = [np.mean((x - original) ** 2) for x in tensors]
    assert errors[0] > 8 * errors[1] > 50 * errors[2]
    np.testing.assert_array_equal(kvzip.decompress(packed)["layers.1.key"].astype(np.float64), tensors[2])
    with pytest.raises(UsageError, match="levels 0 to 2"):
        kvzip.decompress(packed, level=3)
    with pytest.raises(UsageError, match="one quality level"):
        kvzip.decompress(kvzip.compress(kvzip.decompress(packed), codec="raw"), level=1)


def test_the_command_line_chooses_a_level(packed: Path, tmp_path: Path) -> None:
    for level in range(3):
        assert cli.kvzip("decompress", packed, "--level", level, "-o", tmp_path / f"{level}.safetensors", "-q") == 0
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 3
    assert cli.kvzip("decompress", packed, "--level", 3, "-o", tmp_path / "none") == 2


def test_chunks_may_have_levels_of_their_own(packed: Path) -> None:
    """A thinned file is a sound file: each chunk as at its level, in the bytes that were promised."""
    sizes = streaming.level_sizes(packed)
    assert sizes.shape == (4, 3)
    levels = (2, 0, 1, 0)
    target = io.BytesIO()
    streaming.thin(packed, target, levels)
    assert kvzip.decompress(target.getvalue()).keys() == kvzip.decompress(packed).keys()
    np.testing.assert_array_equal(
        streaming.level_sizes(io.BytesIO(target.getvalue())).max(axis=1), sizes[range(4), levels]
    )
    restored = kvzip.decompress(target.getvalue())
    for chunk, level in enumerate(levels):
        tokens = slice(64 * chunk, 64 * (chunk + 1))
        for name, array in kvzip.decompress(packed, level=level).items():
            np.testing.assert_array_equal(codecs.bits(restored[name][:, tokens]), codecs.bits(array[:, tokens]))
    with pytest.raises(UsageError, match="4 chunks"):
        streaming.thin(packed, io.BytesIO(), (0, 1))


def test_levels_share_the_coarser_ones(packed: Path, tmp_path: Path) -> None:
    """A file of three levels is smaller than two files, of its middle and its finest level."""
    sizes = streaming.level_sizes(packed).sum(axis=0)
    assert (np.diff(sizes) < 1.7 / 8 * 4 * 200 * 128).all()
    alone = len(kvzip.compress(kvzip.decompress(packed), codec="cachegen", k_bins="92", v_bins="92", block_tokens=64))
    assert sizes[1] < 1.06 * alone


# ------------------------------------------------------------------------------------------- the rule


def test_the_finest_level_in_time_is_chosen() -> None:
    remaining = np.array([[10, 20, 40], [10, 20, 40]])
    assert [streaming.choose_level(remaining, 1.0, speed) for speed in (10, 20, 39, 40, 79, 80, 1e9)] == [
        0,
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    assert streaming.choose_level(remaining, -1.0, 100) == 0


def test_a_trace_carries_what_it_says() -> None:
    trace = streaming.Trace([0, 2, 3], [10, 0, 5])
    assert trace.arrival(0, 10) == 1
    assert trace.arrival(0, 20) == 2
    assert trace.arrival(1, 20) == 5
    assert trace.arrival(7, 10) == 9
    for seconds, speeds in (([1], [1]), ([0, 0], [1, 1]), ([0], [0]), ([0], []), ([0, 1], [-1, 1])):
        with pytest.raises(UsageError):
            streaming.Trace(seconds, speeds)


def test_a_drop_costs_quality_and_not_the_deadline() -> None:
    """The link falls to a third: the rule steps down and is in time, where the finest level would be late."""
    sizes = np.array([[20.0, 32.0, 45.0]] * 10)
    trace = streaming.Trace([0, 3], [60, 22])
    result = streaming.simulate(sizes, trace, 12.0, first_guess=60)
    assert result.seconds <= 12.0
    assert max(result.levels[:3]) > min(result.levels[4:])
    assert trace.arrival(0, sizes[:, 2].sum()) > 12.0


@given(
    speeds=st.lists(st.floats(1, 1000), min_size=1, max_size=6),
    deadline=st.floats(0.1, 100),
    chunks=st.integers(1, 12),
)
def test_on_a_steady_link_the_rule_is_the_best_constant_level(
    speeds: list[float], deadline: float, chunks: int
) -> None:
    """With a true guess it sends everything at the finest level that fits, and is late only if the coarsest is."""
    sizes = np.array([[20.0, 32.0, 45.0]] * chunks)
    result = streaming.simulate(sizes, streaming.Trace([0], speeds[:1]), deadline, first_guess=speeds[0])
    in_time = [level for level in range(3) if sizes[:, level].sum() / speeds[0] <= deadline * (1 - 1e-9)]
    assert min(result.levels) >= (max(in_time) if in_time else 0)
    assert result.seconds <= max(deadline * (1 + 1e-9), sizes[:, 0].sum() / speeds[0] * (1 + 1e-9))


@pytest.mark.parametrize("levels", [2, 3])
def test_the_smallest_halves_keep_their_errors_true(levels: int, device: Device) -> None:
    """Promise: where float16 has fewer units than a quantizer has steps, no coarse symbol is guessed from them."""
    units = np.array([1, 5, 10, 14, 20, 31, 32, 40, 100])[:, None, None] * np.linspace(-1, 1, 23)
    array = (np.rint(units) * 2.0**-24).astype(np.float16)
    codecs.check_errors(CacheGen(levels=levels, sinks=0), codecs.batch_of([array, array]), device)
