"""Real grammars and thinking budgets through `LLM`: alone == in a mixed batch == preempted, and the exact borders of thinking."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from samovar import LLM, SamplingParams, StructuredOutputsParams
from samovar.core.constraint import Constraint, ReasoningSpan
from samovar.core.outputs import SequenceOutput
from samovar.core.request import Request
from samovar.core.sequence import FinishReason
from tests.oracles.workload import OPTIONS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="module")
def roomy(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), **OPTIONS) as llm:
        yield llm


def requests_of(llm: LLM, count: int) -> list[Request]:
    """Free and constrained ones, greedy and seeded, by regex, choice and schema."""
    rng, compiler = random.Random(6), llm._preparer.needed_grammar()
    wanted = [
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(regex=r"[a-f]{3,9}-[0-9]+(x|y)z"),
        StructuredOutputsParams(choice=["Paris", "Par", "London bridge"]),
    ]
    grammars = [compiler.structured(one) for one in wanted]
    requests = []
    for i in range(count):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.9]), seed=i, max_tokens=rng.randint(8, 60), logprobs=i % 2
        )
        one = llm._preparer.from_ids([rng.randrange(3, 300) for _ in range(rng.randint(1, 40))], params)
        grammar = grammars[i // 2 % 3]
        requests.append(replace(one, constraint=Constraint(grammar=grammar)) if i % 2 else one)
    return requests


def run(llm: LLM, requests: list[Request]) -> list[tuple[list[int], str]]:
    """All at once: (ids, end) of each."""
    engine, news = llm._engine, dict[str, list[SequenceOutput]]()
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            news.setdefault(output.request_id, []).append(output)
    return [
        ([t for output in news[r.request_id] for t in output.token_ids], str(news[r.request_id][-1].finish_reason.value))
        for r in requests
    ]  # fmt: skip


def again(requests: list[Request]) -> list[Request]:
    return [replace(one, request_id=f"{one.request_id}+") for one in requests]


def test_alone_is_in_a_batch_is_preempted(roomy: LLM, tiny_model: Path) -> None:
    """The same tokens alone, all at once, and on a pool in which they take each other's blocks; ended ones are valid."""
    requests = requests_of(roomy, 24)
    alone = [run(roomy, [one])[0] for one in requests]
    assert run(roomy, again(requests)) == alone
    tight = {"num_gpu_blocks_override": 15, "block_size": 8, "max_model_len": 110, "max_num_batched_tokens": 64}
    with LLM(str(tiny_model), **{**OPTIONS, **tight}) as llm:
        assert run(llm, again(requests)) == alone
        assert llm._engine.stats().num_preemptions > 3
    tokenizer = roomy.get_tokenizer()
    texts = [(i, tokenizer.decode(ids)) for i, (ids, end) in enumerate(alone) if i % 2 and end == "stop"]
    assert {i // 2 % 3 for i, _ in texts} >= {1, 2}
    for i, text in texts:
        if i // 2 % 3 == 0:
            assert set(json.loads(text)) == {"name", "ages"}
        elif i // 2 % 3 == 1:
            assert re.fullmatch(r"[a-f]{3,9}-[0-9]+(x|y)z", text)
        else:
            assert text in ("Paris", "Par", "London bridge")


def test_structured_outputs_through_generate_and_chat(roomy: LLM) -> None:
    """vLLM's way to ask; several choices, each on its own path; `stop` and logprobs as ever."""
    choice = StructuredOutputsParams(choice=["alpha", "beta", "gamma"])
    params = SamplingParams(temperature=1.0, seed=1, n=4, max_tokens=20, structured_outputs=choice, logprobs=2)
    output = roomy.generate("Say:", params, use_tqdm=False)[0]
    assert {c.text for c in output.outputs} <= {"alpha", "beta", "gamma"} and len(output.outputs) == 4
    assert all(c.finish_reason == "stop" and len(c.logprobs or []) == len(c.token_ids) for c in output.outputs)
    message = [{"role": "user", "content": "hi"}]
    answer = roomy.chat(message, params.clone(n=1, temperature=0.0, stop=["et", "lph", "amm"]), use_tqdm=False)[0]
    assert answer.outputs[0].stop_reason in ("et", "lph", "amm")
    answer = roomy.chat(
        message, SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=choice), use_tqdm=False
    )[0]
    assert answer.outputs[0].text in ("alpha", "beta", "gamma") and "assistant" in (answer.prompt or "")


@pytest.mark.parametrize("budget", [0, 1, 7, None])
def test_the_grammar_begins_where_reasoning_ends(roomy: LLM, budget: int | None) -> None:
    """E42: free while it thinks, the end forced after `budget` tokens, and from the very next token on the grammar holds."""
    end = roomy.get_tokenizer().encode(" the answer", add_special_tokens=False)
    digits = roomy._preparer.needed_grammar().structured(StructuredOutputsParams(regex="[0-9]{4}"))
    one = roomy._preparer.from_ids([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    span = ReasoningSpan(is_open=True, end_ids=end, budget=budget)
    ids, reason = run(roomy, [replace(one, constraint=Constraint(grammar=digits, reasoning=span))])[0]
    if budget is None:
        # A random model never ends it by itself: all of it is thought, and nothing is forced.
        assert reason == "length" and ids == run(roomy, again([one]))[0][0]
        return
    thought = ids[:budget]
    assert thought == run(roomy, again([one]))[0][0][:budget]
    assert ids[budget : budget + len(end)] == end
    assert re.fullmatch("[0-9]{4}", roomy.get_tokenizer().decode(ids[budget + len(end) :])) and reason == "stop"


def test_a_budget_alone(roomy: LLM) -> None:
    """Constraint without a grammar: the end comes, and what follows is free again."""
    end = roomy.get_tokenizer().encode(" the answer", add_special_tokens=False)
    one = roomy._preparer.from_ids([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    span = ReasoningSpan(is_open=True, end_ids=end, budget=5)
    ids, reason = run(roomy, [replace(one, constraint=Constraint(reasoning=span))])[0]
    assert ids[5 : 5 + len(end)] == end and len(ids) == 40 and reason == "length"


def test_a_grammar_that_breaks_ends_one_sequence_only(roomy: LLM) -> None:
    """What the engine is given unchecked: an error of that request, and the others do not notice."""
    good = requests_of(roomy, 4)
    bad = replace(again(good[:1])[0], constraint=Constraint(grammar="start: (", reasoning=None))
    expected = run(roomy, good)
    engine = roomy._engine
    engine.add(bad)
    for one in (twins := again(again(good))):
        engine.add(one)
    ends: dict[str, SequenceOutput] = {}
    ids: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            ids.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = output
    assert ends[bad.request_id].finish_reason is FinishReason.ERROR and ends[bad.request_id].error
    assert [ids[one.request_id] for one in twins] == [tokens for tokens, _ in expected]
