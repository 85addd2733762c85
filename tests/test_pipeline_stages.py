"""Three stages at once: in order, in bounded memory, and an error of any of them is raised once, promptly."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvzip.errors import LimitError
from kvzip.pipeline.stages import BufferPool, run_stages


def numbers(pool: BufferPool) -> Iterator[int]:
    yield from range(200)


def test_items_pass_in_order() -> None:
    seen: list[int] = []
    run_stages(numbers, lambda item: item * 2, lambda pool, result: seen.append(result), budget=1)
    assert seen == list(range(0, 400, 2))


@pytest.mark.parametrize("stage", ["read", "code", "write"])
@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()])
def test_an_error_of_any_stage_stops_the_others_and_comes_out(stage: str, error: BaseException) -> None:
    def fail(name: str, item: int) -> int:
        if name == stage and item == 7:
            raise error
        return item

    def read(pool: BufferPool) -> Iterator[int]:
        item = 0
        while True:  # an endless source: only the error of another stage ends it
            yield fail("read", item)
            item += 1

    before = threading.active_count()
    with pytest.raises(type(error)) as caught:
        run_stages(read, lambda item: fail("code", item), lambda pool, item: fail("write", item), budget=1)
    assert caught.value is error
    assert threading.active_count() == before


def test_a_reader_stuck_in_a_pipe_does_not_hold_back_an_error() -> None:
    release = threading.Event()

    def read(pool: BufferPool) -> Iterator[int]:
        yield 1
        release.wait(60)

    def code(item: int) -> int:
        raise ValueError("boom")

    start = time.monotonic()
    with pytest.raises(ValueError, match="boom"):
        run_stages(read, code, lambda pool, item: None, budget=1)
    assert time.monotonic() - start < 30
    release.set()


def test_an_item_is_prepared_and_the_one_after_it_before_it_is_coded() -> None:
    """The one after it as far as it has been read: the coding stage does not wait for that."""
    log: list[str] = []
    all_read = threading.Event()

    def read(pool: BufferPool) -> Iterator[int]:
        yield from range(3)
        all_read.set()

    def code(item: int) -> None:
        all_read.wait(30)
        log.append(f"code {item}")

    run_stages(read, code, lambda pool, item: None, budget=1, prepare=lambda item: log.append(f"prepare {item}"))
    assert log[0] == "prepare 0" and log[-6:] == [
        "code 0", "prepare 1", "prepare 2", "code 1", "prepare 2", "code 2",
    ]  # fmt: skip


@pytest.mark.parametrize("stage", ["read", "code"])
def test_memory_that_ran_out_is_a_limit_error(stage: str) -> None:
    def read(pool: BufferPool) -> Iterator[int]:
        if stage == "read":
            raise MemoryError
        yield 1

    def code(item: int) -> int:
        raise MemoryError

    with pytest.raises(LimitError) as caught:
        run_stages(read, code, lambda pool, item: None, budget=1)
    assert caught.value.exit_code == 7


def test_buffers_out_at_once_stay_within_the_budget_and_are_used_again() -> None:
    out: list[int] = []
    peaks: list[int] = []
    owners: set[int] = set()

    def read(pool: BufferPool) -> Iterator[np.ndarray]:
        for _ in range(50):
            buffer = pool.take(1000)
            out.append(buffer.size)
            peaks.append(sum(out))
            owners.add(buffer.ctypes.data)
            yield buffer

    def write(pool: BufferPool, buffer: np.ndarray) -> None:
        out.pop()
        pool.give(buffer)

    run_stages(read, lambda item: item, write, budget=3000)
    assert max(peaks) <= 3000
    assert len(owners) <= 3


def test_a_request_beyond_the_budget_is_served_alone() -> None:
    alive: list[int] = []

    def read(pool: BufferPool) -> Iterator[np.ndarray]:
        for nbytes in (10, 500, 10, 500):
            buffer = pool.take(nbytes)
            alive.append(nbytes)
            assert nbytes == 10 or alive == [500]
            yield buffer

    def write(pool: BufferPool, buffer: np.ndarray) -> None:
        alive.remove(buffer.size)
        pool.give(buffer)

    run_stages(read, lambda item: item, write, budget=100)
    assert not alive
