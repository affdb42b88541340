"""/openapi.json is true: every route is in it, answers fit it, and random requests made from it never give a 5xx."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import checks

from samovar.server.openai.schema import ChatCompletionRequest, CompletionRequest
from samovar.server.routes import ROUTES
from tests.server.live import LiveServer


def test_document(http: httpx.Client) -> None:
    """Every route and method is described, and every field of the chat body."""
    document = http.get("/openapi.json").json()
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.path, route.method) for route in ROUTES}
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert set(fields) == set(ChatCompletionRequest.__struct_fields__)
    seed = next(kind for kind in fields["seed"]["anyOf"] if kind["type"] == "integer")
    assert (seed["minimum"], seed["maximum"]) == (-(2**63), 2**63 - 1)


def test_page(http: httpx.Client) -> None:
    """/docs names every path and loads nothing from anywhere."""
    answer = http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert all(route.path in answer.text for route in ROUTES)
    assert "<script" not in answer.text and "http://" not in answer.text and "https://" not in answer.text


def test_the_page_is_in_words(http: httpx.Client) -> None:
    """Types and ranges as people say them, and every object that a field holds."""
    text = html.unescape(re.sub(r"<[^>]*>", " ", http.get("/docs").text))
    lines = [
        "temperature  number, 0 to 2", "top_p  number, above 0, at most 1", "n  integer, at least 1", "seed  integer",
        'truncation_side  one of "left", "right"', "stop  string or list of strings", "logit_bias  object of numbers",
        "stop_token_ids  list of (integer, 0 to 2147483647)", "messages  (required) list of ChatMessages, not empty",
        "cache_salt  string, 1 to 1024 characters", "include_usage  boolean", "content  string or list of ContentParts",
    ]  # fmt: skip
    for line in lines:
        assert line in text, line
    assert "{" not in text.replace("/v1/models/{model}", "").partition("Samovar 0")[2]


def test_the_root_leads_to_the_page(http: httpx.Client) -> None:
    answer = http.get("/", follow_redirects=False)
    assert answer.status_code == 307 and answer.headers["location"] == "docs"
    assert http.get("/", follow_redirects=True).url.path == "/docs"


def test_the_page_on_the_api_names_everything() -> None:
    """docs/api.md has every path and every field that OpenAI does not have."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    named = set(re.findall(r"`([^`\n]+)`", page))
    assert {route.path for route in ROUTES} <= named
    openai = {
        "model", "n", "stream", "stream_options", "max_tokens", "temperature", "top_p", "presence_penalty", "seed", "stop",
        "frequency_penalty", "logit_bias", "user", "messages", "max_completion_tokens", "logprobs", "top_logprobs", "prompt",
    }  # fmt: skip
    fields = {*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert fields - openai <= named
    assert openai <= fields


def test_version_and_load(http: httpx.Client) -> None:
    """The small endpoints."""
    assert set(http.get("/version").json()) == {"version"}
    assert http.get("/load").json() == {"server_load": 0}
    assert http.post("/ping").status_code == 200 and http.head("/health").status_code == 200
    assert http.get("/v1/models/default").json()["id"] == "tiny"


def test_tokenize_round_trip(http: httpx.Client) -> None:
    """Tokens of a text give the text back; special tokens are shown; strings go with ids."""
    text = "Grüße\0 🙂 <|im_end|>"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) and answer["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


def _fuzz(server: LiveServer, examples: int) -> None:
    schema: Any = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    wanted = [
        checks.CHECKS.get_one(name)
        for name in (
            "not_a_server_error",
            "status_code_conformance",
            "content_type_conformance",
            "response_schema_conformance",
        )
    ]
    for result in schema.get_all_operations():
        _run(result.ok().as_strategy(), wanted, examples)


def _run(strategy: Any, wanted: list[Any], examples: int) -> None:
    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    @given(case=strategy)
    def attempt(case: Any) -> None:
        answer = case.call()
        case.validate_response(answer, checks=wanted)

    attempt()


def test_random_requests_from_the_document(server: LiveServer) -> None:
    """Schemathesis: no 5xx, no undocumented status or content type, no answer that breaks its own schema."""
    _fuzz(server, 8)


@pytest.mark.slow
def test_more_random_requests_from_the_document(server: LiveServer) -> None:
    """The same, for longer."""
    _fuzz(server, 400)
