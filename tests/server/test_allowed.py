"""A word that is none of the allowed ones: the message names those, in bodies and in queries, wherever the field is."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
import pytest

from samovar.errors import ValidationError
from samovar.server.admin.schema import PauseQuery
from samovar.server.exchange import Exchange
from samovar.server.openai.schema import ChatCompletionRequest
from samovar.server.parsing import decode_body
from samovar.server.query import read_query


class Inner(msgspec.Struct):
    """What lists and objects below hold."""

    word: Literal["a", "b"] | None = None


class Outer(msgspec.Struct):
    """A field in each place."""

    here: Annotated[Literal[1, 2], msgspec.Meta(description="noted")] = 1
    either: Literal["x"] | Inner | None = None
    many: list[Inner] | None = None
    named: dict[str, Inner] | None = None
    number: Annotated[int, msgspec.Meta(ge=0)] = 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"here": 3}, "here: must be one of 1, 2, got 3"),
        ({"either": "y"}, "either: must be 'x', got 'y'"),
        ({"either": {"word": "y"}}, "either.word: must be one of 'a', 'b', got 'y'"),
        ({"many": [{}, {"word": "y"}]}, "many[1].word: must be one of 'a', 'b', got 'y'"),
        ({"named": {"k.[0]": {"word": "y"}}}, "named[...].word: must be one of 'a', 'b', got 'y'"),
        ({"number": -1}, "number: Expected `int` >= 0"),
    ],
)
def test_bodies(body: dict[str, Any], message: str) -> None:
    """Whatever stands around the field."""
    with pytest.raises(ValidationError) as caught:
        decode_body(json.dumps(body).encode(), Outer, {})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort: must be one of 'high', 'low', 'max', "),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: must be 'function', got 'web_search'"),
        ({"response_format": {"type": "xml"}}, "response_format.type: must be one of 'json_object', 'json_schema', "),
        ({"truncation_side": "y" * 1000}, "truncation_side: must be one of 'left', 'right', got 'yyy"),
    ],
)
def test_chat(field: dict[str, Any], message: str) -> None:
    """Fields that clients get wrong."""
    body = {"messages": [{"role": "user", "content": "hi"}], **field}
    with pytest.raises(ValidationError) as caught:
        decode_body(json.dumps(body).encode(), ChatCompletionRequest, {})
    assert str(caught.value).startswith(message) and len(str(caught.value)) < 250


def test_queries() -> None:
    """The value is named once."""
    scope = {"type": "http", "headers": [], "query_string": b"mode=keeps"}
    with pytest.raises(ValidationError) as caught:
        read_query(Exchange(scope, None, None), PauseQuery)  # type: ignore[arg-type]
    assert str(caught.value) == "mode: must be one of 'abort', 'keep', 'wait', got 'keeps'"
