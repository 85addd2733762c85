"""CUDA without a GPU: kernels run on the CPU, from their C++ and from the PTX that NVRTC makes of it.

``runtime.cpp`` runs CUDA's threads as fibers and checks what they do: every access against the launch's buffers, its
alignment and the other threads' accesses; every warp operation for lanes that do not come. Two ways lead to it:

- ``cuda.h`` is CUDA C++ for a CPU's compiler, which is told to announce every load and store: an address sanitizer that
  knows the launch's own buffers;
- ``ptx.py`` translates PTX to C++ on ``ptx.h``.

``devices.py`` makes test devices of both, and one of the cuda device itself, with ``fake_cupy.py`` under it, whose work
is done in any order that ``fake_streams.py`` allows.

What it cannot show: speed, caches, which copies share an engine, what threads of different blocks may see of each
other's writes, and the hardware's own mistakes. Warp operations take full masks, blocks and grids have one dimension.
"""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":
    # Whatever imports the emulator, a module or a test, is skipped there.
    pytest.skip("the emulator builds shared objects as on Linux", allow_module_level=True)
