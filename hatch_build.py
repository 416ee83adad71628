"""Compiles the native loops and the CPU kernel into what is installed; called by hatchling.

Without a compiler the build succeeds and says so: tierkv runs on its loops in Python then, and
attention on torch.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARIES = (
    ("tierkv/native", "tierkv/native", "its native loops"),
    ("kernels/tierkv_kernels/cpu", "tierkv_kernels/cpu", "its attention kernel for CPUs"),
)
"""Where the build module of each lies, where a wheel has it, and what is missing without it."""


class NativeLibraries(BuildHookInterface[Any]):
    """An editable install gets each library beside its sources, a wheel has them inside."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See BuildHookInterface."""
        if self.target_name != "wheel":
            return
        self._scratch = tempfile.TemporaryDirectory()
        for home, installed, what in LIBRARIES:
            module = _build_module(Path(self.root, home))
            in_place = version == "editable"
            library = module.LIBRARY if in_place else Path(self._scratch.name, module.LIBRARY.name)
            try:
                module.build(library)
            except module.CannotCompile as error:
                self.app.display_warning(f"tierkv is built without {what}, slower: {error}")
                continue
            if not in_place:
                build_data["force_include"][str(library)] = f"{installed}/{library.name}"
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """See BuildHookInterface."""
        if hasattr(self, "_scratch"):
            self._scratch.cleanup()


def _build_module(home: Path) -> ModuleType:
    """The build module there, without importing its package, whose needs are not installed yet."""
    spec = importlib.util.spec_from_file_location("build", home / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
