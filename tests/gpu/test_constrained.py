"""Masks of constrained sequences on the device under test: greedy decoding within them says what the CPU says."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from samovar import LLM
from samovar.schedule.constrained import Constraints
from tests.gpu.tiny_models import VOCAB
from tests.gpu.workload import OPTIONS, params
from tests.schedule.scripted import Script, ScriptedEnforcer

MakeLLM = Callable[..., LLM]


def run_constrained(llm: LLM, count: int) -> dict[int, tuple[list[int], str]]:
    """Half of the requests constrained by scripts, a quarter of them with log-probabilities: case -> (ids, end)."""
    rng, engine = random.Random(5), llm._engine
    engine.scheduler._constraints = Constraints(ScriptedEnforcer())
    cases: dict[str, int] = {}
    for i in range(count):
        ids = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 60))]
        asked = params(max_tokens=rng.randint(4, 40), logprobs=2 if i % 4 == 0 else None)
        one = llm._preparer.from_ids(ids, asked)
        script = Script(i, rng.randint(3, 60), free=rng.choice([0, 0, 5]), vocab=VOCAB)
        engine.add(replace(one, constraint=script.constraint()) if i % 2 else one)
        cases[one.request_id] = i
    found: dict[int, tuple[list[int], str]] = {i: ([], "") for i in range(count)}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            i = cases[output.request_id]
            found[i] = (found[i][0] + output.token_ids, output.finish_reason or "")
    return found


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_constrained_greedy_is_that_of_the_cpu(
    engines: MakeLLM, folders: dict[str, Path], device: str, eager: bool
) -> None:
    """64 requests at once, 32 of them constrained. Scripts depend on every token, so one that differs changes the rest."""
    count = 64 if device == "cuda" else 12
    with LLM(str(folders["llama"]), **{**OPTIONS, "device": "cpu", "threads": 1}) as cpu:
        expected = run_constrained(cpu, count)
    got = run_constrained(engines("llama", enforce_eager=eager), count)
    differing = [i for i in expected if expected[i] != got[i]]
    assert len(differing) <= (3 if device == "cuda" else 0), differing
    assert {end for _, end in expected.values()} == {"stop", "length"}
