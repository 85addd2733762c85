"""The tables of docs/gpu.md: every kernel is in them, and what is counted is what a turn of its loop takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvzip.devices import cuda_source
from tools import gpu_table
from tools.sass import Block, hot_loop

FAMILIES = {kernel for found in cuda_source._stems().values() for kernel in found}


def family(kernel: str) -> str:
    """The longest beginning of a kernel's name that its source has."""
    return max((stem for stem in FAMILIES if kernel.startswith(stem)), key=len)


def test_every_kernel_has_a_prediction_or_needs_none() -> None:
    """Promise: a new kernel is predicted, or said not to be hot; none that is gone is spoken of."""
    predicted = {family(hot.kernel) for hot in gpu_table.HOT_LOOPS}
    assert predicted | set(gpu_table.NOT_HOT) == FAMILIES
    assert not predicted & set(gpu_table.NOT_HOT)


def lines(*counts: tuple[int, str]) -> list[str]:
    return [name for count, name in counts for _ in range(count)]


LOOP = [
    Block(lines((5, "MOV")), [1]),
    Block(lines((1, "LDG"), (3, "IADD")), [2, 4]),  # the loop begins; the rare way leaves at once
    Block(lines((2, "FMUL"), (1, "STG")), [3, 4]),
    Block(lines((4, "FMUL"), (2, "STG")), [4]),
    Block(lines((2, "BRA")), [1, 5]),
    Block(lines((1, "EXIT")), []),
    Block(lines((50, "SHFL")), [4]),  # behind BRA.DIV: nothing leads there
]


@pytest.mark.parametrize(
    ("through", "way"), [((), 9), ((("STG", 1),), 9), ((("STG", 2),), 15), ((("LDG", 1),), 6), ((("FMUL", 6),), 15)]
)
def test_the_way_through_a_loop_passes_what_it_must(through: tuple[tuple[str, int], ...], way: int) -> None:
    """Promise: the fewest instructions of a turn that does what it has to do, none of code that is never reached."""
    loop = hot_loop(LOOP, "STG", 3, through)
    assert loop is not None
    assert (loop.instructions, loop.way, loop.markers) == (15, way, 3)


def test_a_loop_that_is_not_there_is_said() -> None:
    assert hot_loop(LOOP, "STG", 4) is None
    with pytest.raises(ValueError, match="no way through the loop"):
        hot_loop(LOOP, "STG", 3, (("LDG", 2),))


def test_predictions_are_read_from_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: gpu-check puts beside a measurement what the document says; parts of a kernel follow each other,
    and its other forms are others.
    """
    assert gpu_table.predicted()["cachegen_decode_bf16"] > 100
    rows = ("one_bf16, first | 2.00 (2.00) | 16 |  | 300 | **300**", "one_bf16, second | | **600**", "two | **7**")
    rows += ("one_bf16 option=1, first | **9**",)
    monkeypatch.setattr(gpu_table, "DOCUMENT", tmp_path / "gpu.md")
    gpu_table.DOCUMENT.write_text("".join(f"| {row} |\n" for row in rows))
    assert gpu_table.predicted() == {"one_bf16": pytest.approx(200)}
