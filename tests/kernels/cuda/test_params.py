"""The parameters as Python fills them against those that the C compiler sees."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from tierkv_kernels.cuda import params
from tierkv_kernels.cuda.images import SOURCES
from tierkv_kernels.work import NO_MASK, RECORD_DTYPE

STRUCTURES = (
    params.AttentionParams,
    params.MergeParams,
    params.MovePiece,
    params.MoveParams,
    params.WriteParams,
)
NAMES_IN_C = {"source": "from", "target": "to"}


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Offsets by "Struct.field" and sizes by "Struct", from a compiled probe."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    facts = [
        *(f"sizeof(struct {structure.__name__})" for structure in STRUCTURES),
        "sizeof(struct WorkRecord)",
        *(
            f"offsetof(struct {structure.__name__}, {NAMES_IN_C.get(name, name)})"
            for structure in STRUCTURES
            for name, _ in structure._fields_
        ),
        *(f"offsetof(struct WorkRecord, {name})" for name in RECORD_DTYPE.names or ()),
        "TKV_NO_MASK",
    ]
    lines = "\n".join(f'printf("%s\\t%lld\\n", "{fact}", (long long)({fact}));' for fact in facts)
    folder = tmp_path_factory.mktemp("probe")
    source = folder / "probe.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n"
        f'#include "params.h"\nint main(void) {{\n{lines}\nreturn 0; }}\n'
    )
    command = ["gcc", f"-I{SOURCES}", "-o", str(folder / "probe"), str(source)]
    subprocess.run(command, check=True)
    told = subprocess.run([folder / "probe"], check=True, capture_output=True, text=True).stdout
    return {fact: int(value) for fact, value in (line.split("\t") for line in told.splitlines())}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures_are_laid_out_alike(
    structure: type[ctypes.Structure], layout: dict[str, int]
) -> None:
    name = structure.__name__
    assert ctypes.sizeof(structure) == layout[f"sizeof(struct {name})"]
    for field, _ in structure._fields_:
        in_c = NAMES_IN_C.get(field, field)
        assert getattr(structure, field).offset == layout[f"offsetof(struct {name}, {in_c})"]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_fields_have_the_types_of_the_header(structure: type[ctypes.Structure]) -> None:
    header = (Path(SOURCES) / "params.h").read_text()
    body = header.split(f"struct {structure.__name__} {{")[1].split("};")[0]
    in_python = {
        ctypes.c_ulonglong: "unsigned long long",
        ctypes.c_longlong: "long long",
        ctypes.c_int: "int",
        ctypes.c_float: "float",
    }
    found = []
    for declaration in body.split(";"):
        words = declaration.split("*/")[-1].split()
        kind = " ".join(word for word in words if word in ("unsigned", "long", "int", "float"))
        names = " ".join(words)[len(kind) :].split(",")
        found += [(name.strip(), kind) for name in names if kind]
    assert found == [
        (NAMES_IN_C.get(name, name), in_python[kind]) for name, kind in structure._fields_
    ]


def test_records_are_laid_out_alike(layout: dict[str, int]) -> None:
    assert layout["sizeof(struct WorkRecord)"] == RECORD_DTYPE.itemsize
    for name in RECORD_DTYPE.names or ():
        assert RECORD_DTYPE.fields is not None
        assert RECORD_DTYPE.fields[name][1] == layout[f"offsetof(struct WorkRecord, {name})"]
    assert layout["TKV_NO_MASK"] == NO_MASK
