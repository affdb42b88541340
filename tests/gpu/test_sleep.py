"""Sleep gives the device's memory back, and what is said after waking is what was said before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from samovar import LLM
from samovar.errors import ConflictError
from tests.gpu.workload import check_ids, greedy_cases, run

MakeLLM = Callable[..., LLM]
NUM_BLOCKS = {"cpu": 200, "cuda": 8000}
"""Enough on a GPU for a cache that is missed."""


def reserved(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved()


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_awake_again_it_says_the_same(fresh_llm: MakeLLM, device: str, kind: str, eager: bool) -> None:
    """Levels 0, 1 and 2, waking whole and in parts; twice, so that nothing of the first time is left over."""
    if device == "cpu" and (eager or kind != "llama"):
        pytest.skip("nothing of that matters on a CPU")
    before = reserved(device)
    llm = fresh_llm(kind, enforce_eager=eager, num_gpu_blocks_override=NUM_BLOCKS[device])
    cases = greedy_cases(12 if device == "cuda" else 4)
    expected = run(llm, cases)
    awake = reserved(device)
    for level in (1, 2, 0, 1, 2):
        llm.sleep(level=level)
        assert llm._engine.call("is_sleeping")
        with pytest.raises(ConflictError, match="call wake_up"):
            run(llm, cases[:1])
        asleep = reserved(device)
        if device == "cuda" and level:
            cache = dict(llm.info.memory_plan)["kv cache"]
            assert asleep < awake - cache, f"{awake >> 20} MiB awake, {asleep >> 20} asleep"
            assert asleep - before < 160 << 20, f"{(asleep - before) >> 20} MiB are left"
        if level == 2:
            llm.wake_up(["weights"])
            llm.wake_up(["kv_cache"])
        else:
            llm.wake_up()
        check_ids(llm, cases, expected, run(llm, cases), flips=1)
        assert reserved(device) < awake + (64 << 20)


def test_release_of_the_cache_alone(fresh_llm: MakeLLM, device: str) -> None:
    llm = fresh_llm("llama", num_gpu_blocks_override=NUM_BLOCKS[device])
    cases = greedy_cases(4)
    expected, awake = run(llm, cases), reserved(device)
    freed = llm._engine.call("release_kv_cache_memory")
    assert freed == dict(llm.info.memory_plan)["kv cache"]
    if device == "cuda":
        assert reserved(device) < awake - freed
    llm.wake_up(["kv_cache"])
    check_ids(llm, cases, expected, run(llm, cases), flips=1)
