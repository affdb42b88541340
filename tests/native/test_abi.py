"""The ctypes structures and constants are those of native/abi.h, as the machine's C compiler sees them."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from samovar.native import abi

ROOT = Path(__file__).parents[2]
HEADER = (ROOT / "native" / "abi.h").read_text()
STRUCTURES = {
    "SamovarMatrix": abi.CMatrix,
    "SamovarInstruction": abi.CInstruction,
    "SamovarRegister": abi.CRegister,
    "SamovarStep": abi.CStep,
}
C_NAMES = {"input": "in", "output": "out"}


def expected() -> dict[str, int]:
    """Every size, offset and constant as Python has it, under its C name."""
    values = {"SAMOVAR_ABI_VERSION": abi.ABI_VERSION, "SAMOVAR_PANEL": abi.PANEL, "SAMOVAR_GROUP": abi.GROUP}
    for name, structure in STRUCTURES.items():
        values[f"sizeof({name})"] = ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            values[f"offsetof({name}, {C_NAMES.get(field, field)})"] = getattr(structure, field).offset
    values |= {f"SAMOVAR_{member.name}": member.value for member in abi.Format}
    values |= {f"SAMOVAR_{member.name}": member.value for member in abi.Op}
    values |= {f"SAMOVAR_COUNT_{member.name}": member.value for member in abi.Count}
    values |= {"SAMOVAR_NUM_OPS": len(abi.Op), "SAMOVAR_NUM_COUNTS": len(abi.Count)}
    return values


def test_structures_and_constants_match_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    names = expected()
    lines = [f'printf("%lld\\n", (long long)({name}));' for name in names]
    source = tmp_path / "sizes.c"
    source.write_text('#include <stdio.h>\n#include "abi.h"\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0; }\n")
    subprocess.run([compiler, f"-I{ROOT / 'native'}", str(source), "-o", str(tmp_path / "sizes")], check=True)
    printed = subprocess.run([str(tmp_path / "sizes")], check=True, capture_output=True, text=True).stdout.split()
    assert dict(zip(names, map(int, printed), strict=True)) == names


def test_every_constant_and_function_of_the_header_is_mirrored() -> None:
    code = re.sub(r"//.*", "", HEADER)
    constants = set(re.findall(r"\b(SAMOVAR_[A-Z0-9_]+)\b", code))
    assert constants == {name for name in expected() if name.startswith("SAMOVAR_")}
    assert set(re.findall(r"\b(samovar_[a-z_]+)\(", code)) == set(abi.FUNCTIONS)
