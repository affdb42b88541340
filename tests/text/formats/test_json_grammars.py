"""What the grammars of the JSON and Python formats let a model write is read back as calls that the schema allows."""

from __future__ import annotations

import pytest

from samovar.core.tools import ToolDefinition
from samovar.errors import ValidationError
from samovar.text.answer import AnswerPlan
from samovar.text.formats.choose import names, tool_format
from samovar.text.lark import Lark
from samovar.text.regions import marks_in
from tests.text.formats.grammar_walk import Walks, check

FORMATS = (
    *("hermes", "longcat", "llama3_json", "mistral", "mistral-list", "granite", "phi4_mini", "kimi_k2", "deepseek_v3"),
    *("deepseek_v31", "jamba", "minimax", "nemotron", "internlm", "pythonic", "llama4_pythonic", "lfm2", "olmo3"),
)
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "label": {"type": "string"}},
    "required": ["x", "label"],
    "additionalProperties": False,
}


def tool(name: str, properties: dict[str, object], required: tuple[str, ...] = (), **words: object) -> ToolDefinition:
    schema = {"type": "object", "properties": properties, "required": list(required), **words}
    return ToolDefinition(name=name, parameters=schema)


SETS = {
    "strings": [tool("write_file", {"path": {"type": "string"}, "content": {"type": "string"}}, ("path", "content"))],
    "optional": [tool("find", {"q": {"type": "string"}, "n": {"type": "integer"}}, additionalProperties=False)],
    "mixed": [
        tool("draw", {"at": POINT, "all": {"type": "array", "items": POINT, "maxItems": 2}}, ("at",)),
        tool("turn", {"to": {"enum": ["left", "right", None]}, "on": {"type": "boolean"}}, ("to", "on")),
    ],
    "referred": [tool("link", {"a": {"$ref": "#/$defs/P"}}, ("a",), **{"$defs": {"P": POINT}})],
    "empty": [tool("now", {}, additionalProperties=False)],
}


@pytest.mark.parametrize("are_special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_text_of_the_grammar_is_a_valid_call(format: str, name: str, are_special: bool) -> None:
    """F23: required and named choices give calls whose arguments their tools allow."""
    chosen = tool_format(format)
    marks = [mark for mark in marks_in(AnswerPlan(tools=chosen)) if len(mark) > 1]
    walks = Walks(chosen, SETS[name], marks, are_special=are_special)
    assert check(walks, range(6)) >= 1


def test_all_formats_are_walked() -> None:
    """Formats that are not here are those with tags, which have a test of their own."""
    assert set(FORMATS) <= set(names()[0])


def test_names_that_python_has_not_are_refused() -> None:
    """A grammar that cannot say an argument's name is an error that names it."""
    bad = tool("f", {"a b": {"type": "string"}})
    with pytest.raises(ValidationError, match="'a b'"):
        tool_format("pythonic").grammar(Lark(lambda _: None), [bad], True)
