"""Think x schema x tools x stream: reasoning, text and calls land in items of their own, and the grammar is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.responses.checker import check_stream, events_of, said_by, shape_of
from tests.server.responses.conftest import PATH
from tests.server.truth_table import CASES, SCHEMA, TOOLS, Case, TruthServer, check_constraint, truth_server


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TruthServer, httpx.Client]]:
    """The server that answers every case."""
    with (
        truth_server(tmp_path_factory.mktemp("truth")) as server,
        httpx.Client(base_url=server.live.url, timeout=60, verify=False) as http,
    ):
        yield server, http


def body_of(case: Case) -> dict[str, Any]:
    """The request of a case."""
    body: dict[str, Any] = {"input": case.question}
    if case.think != "absent":
        body["reasoning"] = {"effort": "high" if case.think == "on" else "none"}
    if case.schema:
        body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
    if case.tools != "absent":
        body["tools"] = [{"type": "function", "name": n, "description": d, "parameters": p} for n, d, p in TOOLS]
        body["tool_choice"] = {"type": "function", "name": TOOLS[0][0]} if case.tools == "named" else case.tools
    return body


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(truth: tuple[TruthServer, httpx.Client], case: Case) -> None:
    """B139: the same place and the same guarantee as in chat, in every combination, streamed and whole."""
    server, http = truth
    whole = http.post(PATH, json=body_of(case))
    assert whole.status_code == 200, whole.text
    check_constraint(case, server.last)
    streamed = http.post(PATH, json=body_of(case) | {"stream": True})
    check_constraint(case, server.last)
    response = whole.json()
    assert shape_of(check_stream(events_of(streamed.content))) == shape_of(response)
    output = response["output"]
    assert "".join(said_by(item) for item in output if item["type"] == "reasoning").strip() == case.reasoning
    assert "".join(said_by(item) for item in output if item["type"] == "message").strip() == case.text
    calls = tuple((item["name"], item["arguments"]) for item in output if item["type"] == "function_call")
    assert calls == case.calls
    assert response["status"] == "completed"
    kinds = [item["type"] for item in output]
    order = ["reasoning"] * bool(case.reasoning) + ["message"] * bool(case.text) + ["function_call"] * len(calls)
    assert kinds == order
