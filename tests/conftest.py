"""Fixtures that many tests share: the devices on which every codec must give the same bytes."""

from __future__ import annotations

import pytest

from kvzip.devices.base import Device
from kvzip.devices.build import Target
from kvzip.devices.cpu import Cpu
from kvzip.devices.levels import runnable_levels

CPU_LEVELS = runnable_levels(Target.host())


@pytest.fixture(scope="session", params=CPU_LEVELS)
def device(request: pytest.FixtureRequest) -> Device:
    """Every device here: the CPU at each instruction-set level that this processor has."""
    return Cpu(threads=2, level=request.param)


@pytest.fixture(scope="session")
def cpu() -> Device:
    """The CPU at its best level, one thread: what the other devices are compared with."""
    return Cpu(threads=1, level=CPU_LEVELS[-1])
