"""Launches past Triton's own code start the same compiled kernels, on the same arguments, whatever changes between them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from samovar.kernels import triton_launch
from samovar.kernels.direct_launch import why_not_direct
from tests.kernels.triton.processes import in_process


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a driver that only writes down was asked to start."""
    printed = in_process("tests.kernels.triton.direct_process", cache=tmp_path_factory.mktemp("cache"))
    return json.loads(printed)


def test_the_same_kernels_and_arguments(found: dict[str, Any]) -> None:
    """Whichever kind of launch came before: grid, stream, function, metadata and every argument."""
    for name, launches in found["variations"].items():
        for by_triton, *direct in launches:
            assert all(one == by_triton for one in direct), name
    started = {launches[0][0][4] for launches in found["variations"].values()}
    assert 20 < len(started) < len(found["variations"]), "variations must differ in their code, but not all of them"
    assert found["kinds"] >= len(started)


def test_only_the_first_launch_of_a_kind_is_tritons(found: dict[str, Any]) -> None:
    """Unless something listens to launches: then Triton calls it."""
    assert found["through_triton"] == {"first": 1, "second": 0, "watched": 1, "unwatched": 0}


def test_interpreted_kernels_go_the_old_way() -> None:
    """Which is how the tests of this folder run."""
    assert triton_launch.settle_launches() is not None
    assert triton_launch.settle_launches(direct=False) == "switched off"


def test_another_triton() -> None:
    """What does not look as expected is left to Triton, with the reason."""

    class Kernel:
        """What Triton makes of a function."""

        pre_run_hooks = ()
        params = ()

    class CompiledKernel:
        """Compiled code, as another Triton may have it."""

        run = function = None

    assert "packed_metadata" in (why_not_direct(Kernel, CompiledKernel(), 0, {}) or "")
    assert "NoneType" in (why_not_direct(Kernel, None, 0, {}) or "")
