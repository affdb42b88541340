"""Raw text of parameters to JSON, by the types of a tool's schema."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.core.tools import ToolDefinition
from samovar.text.formats.argument_values import ANY, ArgumentValue, ParameterKinds, json_text, kinds_of

DEFS = {"$defs": {"S": {"type": "string"}, "N": {"$ref": "#/$defs/S"}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/N"}]}, {"integer", "string"}),
        ({"oneOf": [{"type": "array"}, {"const": None}]}, {"array", "null"}),
        ({"allOf": [{"$ref": "#/$defs/S"}], "description": "d"}, {"string"}),
        ({"allOf": [{"type": "number"}, {"type": ["integer", "string"]}]}, {"integer"}),
        ({"enum": ["a", 1, None, True, 2.5]}, {"string", "integer", "null", "boolean", "number"}),
        ({"type": "string", "enum": ["a", 1]}, {"string"}),
        ({"const": {"a": 1}}, {"object"}),
        ({}, ANY),
        (True, ANY),
        ({"$ref": "#/$defs/none"}, ANY),
        ({"$ref": "#/$defs/loop"}, ANY),
        ({"$ref": "http://elsewhere"}, ANY),
        ({"type": 7, "anyOf": "x", "enum": 3, "allOf": {}}, ANY),
        ({"type": "any"}, ANY),
    ],
)
def test_kinds(schema: Any, kinds: set[str]) -> None:
    assert kinds_of(schema, DEFS) == kinds


def test_parameters_that_are_not_named_follow_additional_properties() -> None:
    tool = ToolDefinition(
        name="f", parameters={"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}}
    )
    kinds = ParameterKinds(tool)
    assert kinds.of("a") == {"null"} and kinds.of("b") == {"integer"} and ParameterKinds(None).of("x") == ANY


@pytest.mark.parametrize(
    ("text", "kinds", "expected"),
    [
        ("42", "integer", "42"),
        ("42", "string", '"42"'),
        ("42", "string integer", "42"),
        ("42.0", "integer", "42.0"),
        ("42.5", "integer", '"42.5"'),
        ("42.5", "integer string", '"42.5"'),
        ("1e3", "number", "1e3"),
        ("-0", "number", "-0"),
        ("9" * 5000, "integer", "9" * 5000),
        ("+1", "number", '"+1"'),
        ("NaN", "number", '"NaN"'),
        ("Infinity", "number", '"Infinity"'),
        ("true", "boolean", "true"),
        ("False", "boolean", "false"),
        ("yes", "boolean", '"yes"'),
        ("null", "string null", "null"),
        ("None", "null", "null"),
        ("nullify", "string null", '"nullify"'),
        ("null", "string", '"null"'),
        ("", "integer", '""'),
        ("  7\n", "integer", "7"),
        ("[1, 2]", "array", "[1, 2]"),
        ("[1, 2]", "object", '"[1, 2]"'),
        ("[1, 2]", "string", '"[1, 2]"'),
        ("[1, 2", "array", '"[1, 2"'),
        ('{"a": "x\ny"}', "object", '{"a": "x\\ny"}'),
        ("[" * 100_000, "array", json.dumps("[" * 100_000)),
        ("{'a': [True, None, 'it\\'s']}", "object", '{"a": [true, null, "it\'s"]}'),
        ("{'a': print(1)}", "object", "\"{'a': print(1)}\""),
        ("{'a': 1} + {}", "object", "\"{'a': 1} + {}\""),
        ('"quoted"', "integer", '"quoted"'),
        ('"quoted"', "string", '"\\"quoted\\""'),
        ('"quoted"', "string array", '"\\"quoted\\""'),
    ],
)
def test_values(text: str, kinds: str, expected: str) -> None:
    """What does not parse as one of its types is a string; text goes through as it is written."""
    assert json_text(text, frozenset(kinds.split())) == expected
    assert in_pieces(list(text), frozenset(kinds.split())) == expected


def in_pieces(pieces: list[str], kinds: frozenset[str]) -> str:
    value = ArgumentValue(kinds)
    return value.begin() + "".join(map(value.feed, pieces)) + value.end()


KINDS = st.frozensets(st.sampled_from(sorted(ANY)), min_size=1)
HARD = st.text('0123456789+-.eEtruefalsnNo {[]}"\\:,\n', max_size=80) | st.text(max_size=20)


@settings(deadline=None, max_examples=400)
@given(text=HARD, kinds=KINDS, seed=st.integers(0, 99))
def test_pieces_give_the_whole(text: str, kinds: frozenset[str], seed: int) -> None:
    """However a value is cut, the result is the same JSON, and it never takes back what it gave out."""
    rng, pieces, at = random.Random(seed), [], 0
    while at < len(text):
        size = rng.choice((1, 2, 7))
        pieces.append(text[at : at + size])
        at += size
    assert in_pieces(pieces, kinds) == json_text(text, kinds)
    json.loads(json_text(text, kinds))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=400)
@given(value=VALUES)
def test_what_a_template_writes_is_read_back(value: Any) -> None:
    """A string as it is, everything else as JSON: with the value's own type in the schema nothing is lost."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    schema = {"enum": [value]} if value is None else {"type": sorted(kinds_of({"const": value}, {}))}
    assert json.loads(json_text(text, kinds_of(schema, {}))) == value
