"""Compiles the native loops into what is installed; called by hatchling.

Without a compiler the build succeeds and says so: tierkv runs on its loops in Python then.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HOME = "tierkv/native"


class NativeLoops(BuildHookInterface[Any]):
    """An editable install gets the library beside its sources, a wheel has it inside."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See BuildHookInterface."""
        if self.target_name != "wheel":
            return
        native = _build_module(Path(self.root))
        try:
            if version == "editable":
                native.build()
                return
            self._scratch = tempfile.TemporaryDirectory()
            library = Path(self._scratch.name, native.LIBRARY.name)
            native.build(library)
        except native.CannotCompile as error:
            self.app.display_warning(f"tierkv is built without its native loops, slower: {error}")
            return
        build_data["force_include"][str(library)] = f"{HOME}/{library.name}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """See BuildHookInterface."""
        if hasattr(self, "_scratch"):
            self._scratch.cleanup()


def _build_module(root: Path) -> ModuleType:
    """``tierkv.native.build``, without importing tierkv: what it needs is not installed yet."""
    spec = importlib.util.spec_from_file_location("build", root / HOME / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
