"""Structural tags, in the older shape and the newer one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from samovar.core.structured import StructuredOutputsParams
from samovar.errors import ValidationError
from samovar.grammar.compiler import GrammarCompiler
from tests.grammar.matching import accepts

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
F = {"type": "tag", "begin": "<f>", "content": JSON, "end": "</f>"}
G = {"begin": "<g>", "content": {"type": "any_text"}, "end": ["</g>", "</h>"]}
T = {"begin": "<tool>", "content": JSON, "end": "</tool>"}


def old(triggers: list[str], *structures: tuple[str, str]) -> dict[str, Any]:
    return {
        "type": "structural_tag",
        "triggers": triggers,
        "structures": [{"begin": begin, "schema": SCHEMA, "end": end} for begin, end in structures],
    }


def new(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": kind, **fields}}


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        old(["<f"], ("<f1>", "</f1>"), ("<f2>", "")),
        ["", "hi", 'hi <f1>{"a":1}</f1> and <f2>{"a": 2}!', "< f"],
        ["<f", "<f3>", "<f1>{}", '<f1>{"a":1}</f2>'],
    ),
    (old(["<tool>"], ("<tool>", "</tool>")), ["x", 'x<tool>{"a":1}</tool>y'], ["<tool>", "<tool>x</tool>"]),
    (new("const_string", value='a"\n<tool>'), ['a"\n<tool>'], ["a", ""]),
    (new("json_schema", json_schema=SCHEMA), ['{"a":1}'], ["{}"]),
    (new("regex", pattern="^[ab]{2}$"), ["ab"], ["a"]),
    (new("any_text"), ["", "a\nb"], []),
    (new("sequence", elements=[{"type": "const_string", "value": "A: "}, JSON]), ['A: {"a":1}'], ['{"a":1}']),
    (new("or", elements=[{"type": "const_string", "value": "no"}, F]), ["no", '<f>{"a":1}</f>'], ["", "nono"]),
    (new("tag", begin="<g>", content={"type": "any_text"}, end="</g>"), ["<g>a<b</g>"], ["<g>a", "<g>a</g>b</g>"]),
    (
        new("triggered_tags", triggers=["<f", "<g", "<tool>"], tags=[F, G, T]),
        ["", 'a<f>{"a":1}</f>b', "<g>x</h>", 'x<tool>{"a":1}</tool><g></g>'],
        ["<f", "<g>", "<f>{}</f>", "<tool>{}</tool>"],
    ),
    (
        new("triggered_tags", triggers=["<f>"], tags=[F], at_least_one=True, stop_after_first=True),
        ['<f>{"a":1}</f>', 'so: <f>{"a":1}</f>'],
        ["", "so", '<f>{"a":1}</f>.', '<f>{"a":1}</f><f>{"a":1}</f>'],
    ),
    (
        new("tags_with_separator", tags=[F, T], separator=", ", at_least_one=True),
        ['<f>{"a":1}</f>', '<tool>{"a":1}</tool>, <f>{"a":2}</f>'],
        ["", '<f>{"a":1}</f><f>{"a":1}</f>', "x"],
    ),
    (
        new("tags_with_separator", tags=[F], separator=",", stop_after_first=True),
        ["", '<f>{"a":1}</f>'],
        ['<f>{"a":1}</f>,<f>{"a":1}</f>'],
    ),
]


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_tags(compiler: GrammarCompiler, case: int, as_text: bool) -> None:
    tag, yes, no = CASES[case]
    grammar = compiler.structured(StructuredOutputsParams(structural_tag=json.dumps(tag) if as_text else tag))
    compiler.check(grammar)
    assert [text for text in yes if not accepts(grammar, text)] == []
    assert [text for text in no if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("tag", "word"),
    [
        ({"type": "other"}, "structural_tag"),
        ("{", "JSON"),
        ("[]", "object"),
        ({"structures": [], "triggers": ["x"]}, "structures"),
        (old([], ("<f>", "")), "triggers"),
        (old(["<x"], ("<f>", "")), "trigger"),
        (old(["<f", "<f>"], ("<f>", "")), "exactly one"),
        (old(["<f"], ("", "")), "begin"),
        ({**old(["<f"], ("<f>", "")), "more": 1}, "more"),
        ({"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {"not": {}}, "end": ""}]}, "not"),
        ({"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": 3, "end": ""}]}, "schema"),
        (new("qwen_xml_parameter", json_schema={}), "qwen_xml_parameter"),
        (new("grammar", grammar="x"), "grammar"),
        (new("const_string", value=""), "value"),
        (new("const_string", value="a", more=1), "more"),
        (new("json_schema", json_schema=SCHEMA, style="qwen_xml"), "qwen_xml"),
        (new("regex", pattern="("), "pattern"),
        (new("sequence", elements=[{"type": "any_text"}, F]), "any_text"),
        (new("tags_with_separator", tags=[3], separator=","), "tag"),
        (new("triggered_tags", triggers=["<f>"], tags=[F], at_least_one=1), "at_least_one"),
        ({"type": "structural_tag", "format": 3}, "object"),
        (new("triggered_tags", triggers=["<f>"], tags=[F] * 1_000), "tags"),
    ],
)
def test_bad_tags_are_refused(compiler: GrammarCompiler, tag: Any, word: str) -> None:
    with pytest.raises(ValidationError, match="structural_tag") as caught:
        compiler.structured(StructuredOutputsParams(structural_tag=tag))
    assert word in str(caught.value)


def test_tags_inside_tags_have_an_end(compiler: GrammarCompiler) -> None:
    tag: Any = JSON
    for _ in range(12):
        tag = {"type": "tag", "begin": "<", "content": tag, "end": ">"}
    grammar = compiler.structured(StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": tag}))
    assert accepts(grammar, "<" * 12 + '{"a":1}' + ">" * 12)
    for _ in range(100):
        tag = {"type": "sequence", "elements": [tag]}
    with pytest.raises(ValidationError, match="nested"):
        compiler.structured(StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": tag}))
