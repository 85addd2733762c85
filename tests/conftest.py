"""Fixtures that many tests share: the devices on which every codec must give the same bytes."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvzip.devices import get_device
from kvzip.devices.base import Device
from kvzip.devices.build import Target
from kvzip.devices.cpu import Cpu
from kvzip.devices.cuda_setup import driver_version
from kvzip.devices.levels import runnable_levels

LINUX = sys.platform == "linux"
"""The emulator builds shared objects and loads NVRTC as on Linux."""

CPU_LEVELS = runnable_levels(Target.host())
DEVICES = [*CPU_LEVELS, *(["cuda"] if driver_version() is not None else [])]
OFTEN, SELDOM = (["emulated", "ptx-sm_90"], ["ptx-sm_80", "ptx-sm_100", "cuda-emulated"]) if LINUX else ([], [])

LONG = 1000
"""Tokens."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of a device run on the CPU's levels, on a GPU, and in the emulator: on all its kinds if the name says
    "every device".
    """
    if "device" in metafunc.fixturenames:
        names = DEVICES + OFTEN + (SELDOM if "every_device" in metafunc.function.__name__ else [])
        metafunc.parametrize("device", names, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long in the emulator runs there on the two devices that run everything: long planes, other orders."""
    dropped = {item for item in items if hasattr(item, "callspec") and _takes_long(item.callspec.params)}
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=list(dropped))


def _takes_long(params: dict[str, Any]) -> bool:
    long = params.get("geometry", (0,))[0] > LONG or params.get("order", "token-major") != "token-major"
    return long and params.get("device") in SELDOM


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Device:
    """Every device here: the CPU at each instruction-set level that this processor has, CUDA's semantics emulated for
    the kernels' C++ and for their compiled PTX, the cuda device on such kernels, and a GPU where there is one.
    """
    if request.param in CPU_LEVELS:
        return Cpu(threads=2, level=request.param)
    if request.param == "cuda":
        return get_device("cuda")
    from tests.emulator import devices

    match request.param.split("-"):
        case ["emulated"]:
            return devices.Emulated()
        case ["ptx", arch]:
            return devices.Ptx(arch)
    return devices.cuda_on_emulator()


@pytest.fixture(scope="session")
def cpu() -> Device:
    """The CPU at its best level, one thread: what the other devices are compared with."""
    return Cpu(threads=1, level=CPU_LEVELS[-1])
