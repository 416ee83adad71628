"""The loops under test: in Python, and native as built here for each kind of processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.native.build import build
from tierkv.native.library import load
from tierkv.native.loops import Loops, NativeLoops, PythonLoops

KINDS = {
    "python": None,
    "native": (),
    "native-256": ("-DVECTOR_BITS_MAX=256",),
    "native-portable": ("-DVECTOR_BITS_MAX=0",),
}


@pytest.fixture(scope="session", params=KINDS)
def loops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """Every implementation in turn. The wider vectors run where the processor has them."""
    options = KINDS[request.param]
    if options is None:
        return PythonLoops("the test asks for Python")
    library = Path(tmp_path_factory.mktemp("native"), "library.so")
    build(library, *options, "-Werror")
    return NativeLoops(load({}, library))
