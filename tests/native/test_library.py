"""Finding and loading the library, teams from Python, and what is said when something is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from samovar.native import library
from samovar.native.abi import CInstruction, Count, CRegister, CStep, Op
from samovar.native.library import Library, NativeError, find
from samovar.native.team import Team, make_team

needs_library = pytest.mark.skipif(find() is None, reason="the library is not built: no C++ compiler")


def test_a_named_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAMOVAR_NATIVE_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(NativeError, match="SAMOVAR_NATIVE_LIBRARY: there is no file .*none.so"):
        library.load.__wrapped__()


def test_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SAMOVAR_NATIVE_LIBRARY", raising=False)
    monkeypatch.setattr(library.samovar.native, "__path__", [str(tmp_path)])
    assert find() is None
    with pytest.raises(NativeError, match="install a C\\+\\+ compiler"):
        library.load.__wrapped__()


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "libsamovar.so"
    path.write_text("not a library")
    with pytest.raises(NativeError, match="is no library of this version"):
        Library(path)


@needs_library
def test_usable_sets_are_compiled_and_end_with_the_best() -> None:
    loaded = library.load()
    usable = loaded.usable_isas()
    assert usable[0] == "generic" and usable[-1] == loaded.best_isa
    assert set(usable) <= set(loaded.compiled_isas)
    for isa in usable:
        with make_team(1, isa) as team:
            assert team.isa == isa


@needs_library
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_threads": 2, "isa": "sse9"}, "instruction set sse9 is unknown; there are: generic"),
        ({"num_threads": -1}, "num_threads is -1; a team has 1 to 1024 threads"),
        ({"num_threads": 5000}, "num_threads is 5000"),
        ({"num_threads": 2, "cpus": [0]}, "cpus names 1 processors for 2 threads"),
    ],
)
def test_a_team_that_cannot_be(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(NativeError, match=message):
        Team(**arguments)  # type: ignore[arg-type]


@needs_library
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_list_of_instructions_from_python(threads: int) -> None:
    rng = np.random.default_rng(threads)
    x = rng.standard_normal((5, 70), dtype=np.float32)
    y = np.zeros_like(x)
    registers = (CRegister * 2)(CRegister(x.ctypes.data, 70), CRegister(y.ctypes.data, 70))
    step = CStep(registers=registers, num_registers=2)
    step.counts[Count.TOKENS] = 5
    instructions = (CInstruction * 3)()
    for instruction, source in zip(instructions, (0, 1, 1), strict=True):
        instruction.op, instruction.rows = Op.ADD, Count.TOKENS
        instruction.input[:] = [0, source, -1, -1]
        instruction.output[:] = [1, -1]
        instruction.i[0] = 70
    with Team(threads, cpus=list(range(threads)) if threads == 1 else None) as team:
        team.run(instructions, step)
        assert np.array_equal(y, (x + x) + x + x)  # float32 sums in this order are exact copies of the kernel's
        report = team.report()
        assert report["runs"] == 1 and 0 <= report["waited"] <= report["ran"]
        instructions[2].op = 77
        with pytest.raises(NativeError, match="instruction 2: there is no operation 77"):
            team.run(instructions, step)
        team.forget()
    team.close()
    with pytest.raises(NativeError, match="closed"):
        team.run(instructions, step)
