"""The build hook: puts the compiled kernels and their sources into the wheel."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def load_build_module(root: Path) -> ModuleType:
    """``kvzip/devices/build.py`` by its path: ``import kvzip`` needs what a build environment lacks."""
    spec = importlib.util.spec_from_file_location("kvzip_build", root / "kvzip/devices/build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class NativeLibraries(BuildHookInterface[Any]):
    """Compiles one library per instruction-set level.

    They are for this machine, or for the one that ``KVZIP_TARGET`` names: ``aarch64-linux``, ``x86_64-windows``...
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        build = load_build_module(Path(self.root))
        sources = Path(self.root) / "kernels"
        name = os.environ.get("KVZIP_TARGET")
        target = build.Target.parse(name) if name else build.Target.host()
        self.output = tempfile.TemporaryDirectory(prefix="kvzip-wheel-")
        libraries = build.build_libraries(sources, target, target.levels, Path(self.output.name))
        for path in libraries:
            build_data["force_include"][str(path)] = f"kvzip/_native/{path.name}"
        for path in build.kernel_files(sources):
            build_data["force_include"][str(path)] = f"kvzip/_native/kernels/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{target.wheel_tag}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "output"):
            self.output.cleanup()
