"""A cuda device whose every array is an allocation of its own, so that a memory checker sees each end."""

from __future__ import annotations

from typing import Any

from kvzip.devices.cuda import Cuda


class Unpooled(Cuda):
    def _allocate(self, nbytes: int) -> Any:
        memory = self.xp.cuda.memory
        return memory.MemoryPointer(memory.Memory(nbytes), 0)
