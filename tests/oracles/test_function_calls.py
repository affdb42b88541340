"""bfcl-eval's cases against random weights: with `required` and strict tools each call is valid, or the answer was cut."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from samovar.text.formats.choose import names
from tests.oracles.function_calls import GROUPS, FunctionCase, function_cases
from tests.oracles.random_server import RandomServer, random_server, spread
from tests.server.wire import CHAT

MAX_TOKENS = 250
SAMPLE = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RandomServer]:
    with random_server(tmp_path_factory.mktemp("functions") / "model") as running:
        yield running


def run(server: RandomServer, cases: Sequence[FunctionCase], name: str, **more: Any) -> Counter[str]:
    """Asks each case, checks every call, prints and returns counts."""
    usual: dict[str, Any] = {"temperature": 1.0, "max_tokens": MAX_TOKENS, "tool_choice": "required"}
    usual |= {"logit_bias": server.bias(4), **more}
    bodies = [usual | {"messages": case.messages, "tools": case.tools, "seed": i} for i, case in enumerate(cases)]
    counts, wrong = Counter[str](), []
    for case, (status, answer) in zip(cases, server.ask(CHAT, bodies)):
        if status != 200:
            counts["refused"] += 1
            wrong.append((case.name, status, answer))
            continue
        choice = answer["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        counts["cut" if finish == "length" else "ended"] += 1
        problems = problems_of(case, calls, is_cut=finish == "length")
        counts["valid calls"] += len(calls) - len(problems) - (finish == "length" and not _is_whole(calls))
        if finish not in ("length", "tool_calls") or (finish == "tool_calls" and not calls):
            problems.append(f"ends with {finish} after {len(calls)} calls")
        if finish == "tool_calls" and message["content"]:
            problems.append("content beside the calls")
        wrong += [(case.name, problem, message) for problem in problems]
    print(f"\n{name}: {len(cases)} cases: {spread(counts)}")
    assert wrong == [], f"{len(wrong)}: {wrong[:4]}"
    return counts


def problems_of(case: FunctionCase, calls: Sequence[tuple[str, str]], *, is_cut: bool) -> list[str]:
    """What is wrong with calls. The last one of an answer that was cut may be incomplete."""
    found = []
    for at, (called, arguments) in enumerate(calls):
        if called not in case.parameters:
            found.append(f"there is no function {called}")
            continue
        try:
            value = json.loads(arguments)
        except ValueError as error:
            if not (is_cut and at == len(calls) - 1):
                found.append(f"{called}: {error}: {arguments}")
            continue
        validator = jsonschema.Draft202012Validator(case.parameters[called])
        found += [f"{called}: {error.message}: {arguments}" for error in list(validator.iter_errors(value))[:1]]
    return found


def _is_whole(calls: Sequence[tuple[str, str]]) -> bool:
    """Whether the last call is complete."""
    try:
        json.loads(calls[-1][1] if calls else "{}")
    except ValueError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_all_cases(server: RandomServer, group: str, capsys: pytest.CaptureFixture[str]) -> None:
    """F23, B124, B131: every case, in the format of most models."""
    cases = list(function_cases(group))
    server.write_calls_as("hermes")
    with capsys.disabled():
        counts = run(server, cases, group)
    assert len(cases) in (200, 400) and counts["valid calls"] > len(cases) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", names()[0])
def test_each_format(server: RandomServer, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for some cases of each group, in every format."""
    cases = [
        case for group in GROUPS for case in list(function_cases(group))[:: 60 if group == "simple_python" else 30]
    ]
    server.write_calls_as(name)
    with capsys.disabled():
        counts = run(server, cases[:SAMPLE], name, thinking_token_budget=20)  # harmony would think to the end
    assert counts["valid calls"] > SAMPLE / 5


@pytest.mark.slow
def test_a_real_vocabulary(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some cases with 49,152 tokens, which cut calls in every place."""
    cases = [case for group in GROUPS for case in list(function_cases(group))[5::25]]
    with random_server(tmp_path / "model", tokenizer=smollm2) as running, capsys.disabled():
        running.write_calls_as("hermes")
        counts = run(running, cases, "SmolLM2's vocabulary")
    assert counts["valid calls"] > len(cases) / 3
