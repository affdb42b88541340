"""What a format's grammar lets a model write is read back as arguments that the tool's schema allows."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.core.tools import ToolDefinition
from samovar.errors import ValidationError
from samovar.text.formats import (
    deepseek_v4,
    deepseek_v32,
    functiongemma,
    gemma4,
    glm4,
    harmony,
    minimax_m2,
    qwen3_coder,
    seed_oss,
)
from samovar.text.formats.base import ToolFormat
from samovar.text.lark import Lark
from tests.text.formats.grammar_walk import Walks, check

FORMATS: dict[str, tuple[ToolFormat, tuple[str, ...]]] = {
    module.FORMAT.name: (module.FORMAT, specials)
    for module, specials in (
        (qwen3_coder, ("<tool_call>", "</tool_call>")),
        (seed_oss, ("<seed:tool_call>", "</seed:tool_call>")),
        (glm4, ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
        (minimax_m2, ("<minimax:tool_call>", "</minimax:tool_call>")),
        (deepseek_v32, ("｜DSML｜",)),
        (deepseek_v4, ("｜DSML｜",)),
        (gemma4, ("<|tool_call>", "<tool_call|>", '<|"|>')),
        (functiongemma, ("<start_function_call>", "<end_function_call>", "<escape>")),
        (harmony, harmony.MARKS),
    )
}
"""Each format with the special tokens of the tokenizers of its models."""


def tool(name: str, properties: dict[str, object], required: tuple[str, ...] = (), **words: object) -> ToolDefinition:
    schema = {"type": "object", "properties": properties, "required": list(required), **words}
    return ToolDefinition(name=name, parameters=schema)


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "label": {"type": "string"}},
    "required": ["x", "label"],
    "additionalProperties": False,
}
TOOLS = {
    "strings": tool("write_file", {"path": {"type": "string"}, "content": {"type": "string"}}, ("path", "content")),
    "optional": tool("search", {"query": {"type": "string"}, "limit": {"type": "integer"}}, additionalProperties=False),
    "scalars": tool(
        "set",
        {
            "n": {"type": "number"},
            "i": {"type": "integer", "minimum": 3},
            "b": {"type": "boolean"},
            "z": {"type": "null"},
        },
        ("n", "i", "b", "z"),
    ),
    "enum": tool(
        "turn",
        {"to": {"type": "string", "enum": ["left", "right\n", ""]}, "by": {"enum": [1, 2.5, None, "x"]}},
        ("by", "to"),
    ),
    "nested": tool("draw", {"at": POINT, "all": {"type": "array", "items": POINT, "maxItems": 3}}, ("at", "all")),
    "nullable": tool(
        "edit",
        {"text": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "size": {"type": ["string", "integer"]}},
        ("text", "size"),
    ),
    "unions": tool(
        "put",
        {
            "v": {"oneOf": [{"type": "string", "enum": ["a", "7"]}, {"type": "array", "items": {"type": "boolean"}}]},
            "w": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 100}, POINT]},
        },
        ("v", "w"),
    ),
    "bounded": tool(
        "code",
        {"zip": {"type": "string", "pattern": r"^\d{5}$"}, "short": {"type": "string", "minLength": 2, "maxLength": 9}},
        ("zip", "short"),
    ),
    "referred": tool(
        "link",
        {"a": {"$ref": "#/$defs/P"}, "k": {"allOf": [{"$ref": "#/$defs/K"}]}},
        ("a", "k"),
        **{"$defs": {"P": POINT, "K": {"type": "string", "enum": ["u", "v"]}}},
    ),
    "empty": tool("now", {}, additionalProperties=False),
    "anything": ToolDefinition(name="free", parameters={}),
    "untyped": tool("note", {"what": {}, "größe": {"type": "string"}}, ("what",)),
}


@pytest.mark.parametrize("format", FORMATS)
def test_every_text_of_the_grammar_is_a_valid_call(format: str) -> None:
    """B134 and F23: whatever the grammar lets a model write is read as arguments that the schema allows."""
    chosen, marks = FORMATS[format]
    assert sum(check(Walks(chosen, [tool], marks), range(3)) for tool in TOOLS.values()) > len(TOOLS)


@pytest.mark.slow
@pytest.mark.parametrize("are_special", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_many_texts_of_many_tools(format: str, are_special: bool) -> None:
    """All tools at once, and each alone; also where a tokenizer has the marks as ordinary tokens."""
    chosen, marks = FORMATS[format]
    if chosen.whole is not None and not are_special:
        pytest.skip("the models that write harmony have its marks as tokens")
    for tools in ([tool] for tool in TOOLS.values()):
        assert check(Walks(chosen, tools, marks, are_special=are_special), range(12)) >= 3
    assert check(Walks(chosen, list(TOOLS.values()), marks, are_special=are_special), range(30)) >= 8


PRINTED = {
    "qwen3_coder": "<tool_call>\n<function=write_file>\n<parameter=path>\na.txt\n</parameter>\n<parameter=content>\nx\n\n"
    "</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=write_file>\n<parameter=path>a.txt</parameter>\n<parameter=content>x\n"
    "</parameter>\n</function>\n</seed:tool_call>",
    "glm4": "<tool_call>write_file\n<arg_key>path</arg_key>\n<arg_value>a.txt</arg_value>\n<arg_key>content</arg_key>\n"
    "<arg_value>x\n</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="write_file">\n<parameter name="path">a.txt</parameter>\n'
    '<parameter name="content">x\n</parameter>\n</invoke>\n</minimax:tool_call>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write_file">\n<｜DSML｜parameter name="path" string="true">'
    'a.txt</｜DSML｜parameter>\n<｜DSML｜parameter name="content" string="true">x\n</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "gemma4": '<|tool_call>call:write_file{path:<|"|>a.txt<|"|>,content:<|"|>x\n<|"|>}<tool_call|>',
    "functiongemma": "<start_function_call>call:write_file{path:<escape>a.txt<escape>,content:<escape>x\n<escape>}"
    "<end_function_call>",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.write_file <|constrain|>json<|message|>"
    '{"path":"a.txt","content":"x\\n"}<|call|>',
}
PRINTED["deepseek_v4"] = PRINTED["deepseek_v32"].replace("function_calls", "tool_calls")


@pytest.mark.parametrize("format", FORMATS)
def test_the_grammar_has_what_templates_print(format: str) -> None:
    chosen, marks = FORMATS[format]
    text = PRINTED[format]
    for are_special in (True, False):
        walks = Walks(chosen, [TOOLS["strings"], TOOLS["empty"]], marks, are_special=are_special)
        assert walks.accepts(text)
        assert not walks.accepts("Hi! " + text) and not walks.accepts(text[:-3]) and not walks.accepts("")
        assert not walks.accepts(text.replace("write_file", "read_file"))
        assert not walks.accepts(text.replace("path", "paths"))


@pytest.mark.parametrize("format", FORMATS)
def test_one_call_unless_parallel(format: str) -> None:
    """With `parallel_tool_calls` off the grammar ends after the first call."""
    chosen, marks = FORMATS[format]
    several, one = (Walks(chosen, [TOOLS["empty"]], marks, parallel=parallel) for parallel in (True, False))
    texts = [several.text(ids) for seed in range(20) if (ids := several.walk(seed)) is not None]
    numbers = {text: len(several.read(several.tokens(text))[0]) for text in texts}
    assert set(numbers.values()) > {1}
    assert all(one.accepts(text) == (number == 1) for text, number in numbers.items())


@pytest.mark.parametrize("format", sorted(FORMATS.keys() - {"harmony"}))
def test_a_free_answer_may_call(format: str) -> None:
    """Content, then perhaps calls, which are enforced from their mark on."""
    chosen, marks = FORMATS[format]
    for are_special in (True, False):
        walks = Walks(chosen, [TOOLS["strings"]], marks, are_special=are_special, is_free=True)
        call = PRINTED[format]
        for text in ("Hi!", "", "I < look.\n\n" + call, call):
            assert walks.accepts(text), text
        for text in (call[:-9], call.replace("path", "paths"), "a" + chosen.opens[0] + "b", *(chosen.opens[1:])):
            assert not walks.accepts(text), text


def test_a_free_answer_in_harmony() -> None:
    """Thoughts, remarks, an answer or calls: all that a model may write when it chooses itself; its calls are enforced."""
    chosen, marks = FORMATS["harmony"]
    walks = Walks(chosen, [TOOLS["strings"]], marks, is_free=True)
    thought, remark = "<|channel|>analysis<|message|>Hm<|end|>", "<|channel|>commentary<|message|>I look.<|end|>"
    start, final, call = "<|start|>assistant", "<|channel|>final<|message|>", PRINTED["harmony"]
    for text in (
        final + "Hi!",
        thought + start + final + "Hi",
        thought + start + remark + call,
        call.removeprefix(start),
    ):
        assert walks.accepts(text), text
    for text in ("Hi!", thought, thought + call.replace("content", "contents"), call + "Hi!"):
        assert not walks.accepts(text), text


@pytest.mark.parametrize("format", sorted(FORMATS.keys() - {"harmony"}))
@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (tool("f", {"a": {"type": "string", "not": {"const": "x"}}}), "'not'"),
        (tool("f", {"a": {"type": "string"}}, anyOf=[{"required": ["a"]}]), "'anyOf'"),
        (tool("f", {"a": {"type": "string"}}, minProperties=1), "'minProperties'"),
        (tool("f", {"a <b>": {"type": "string"}}), "'a <b>'"),
        (tool("f g", {}), "'f g'"),
        (tool("f", {"a": {"allOf": [{"type": "string", "minLength": 1}, {"minLength": 2}]}}), "'minLength'"),
    ],
)
def test_what_cannot_be_enforced_is_refused(format: str, bad: ToolDefinition, named: str) -> None:
    with pytest.raises(ValidationError, match=named) as caught:
        FORMATS[format][0].grammar(Lark(lambda _: None), [bad], True)
    assert caught.value.parameter == "tools"


WORDS = (
    "type enum const anyOf oneOf allOf properties required items minItems maxItems minLength maxLength pattern $ref "
    "additionalProperties nullable format not minimum"
).split()
ODD = st.recursive(
    st.sampled_from(
        ["string", "integer", "object", "array", "null", "#/properties/a", "#/$defs/x", 3, -1, True, False, None, "^a$"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.just("a"), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=150)
@given(schema=st.dictionaries(st.sampled_from(WORDS), ODD, max_size=4), inner=ODD)
def test_any_schema_gives_a_grammar_or_a_refusal(schema: dict[str, object], inner: object) -> None:
    """What clients send as a schema may be anything; readers take their types from the same schema."""
    for parameters in ({"type": "object", "properties": {"a": schema, "b": inner}, "required": ["a"]}, schema):
        definition = ToolDefinition(name="f", parameters=parameters)
        for chosen, _ in FORMATS.values():
            reader = chosen.read({"f": definition})
            list(reader.feed("<function=f><parameter=a>1</parameter></function>"))
            with suppress(ValidationError):
                chosen.grammar(Lark(lambda _: None), [definition], True)


@pytest.mark.parametrize("format", ["gemma4", "functiongemma"])
@pytest.mark.parametrize(
    "schema",
    [{"type": "array", "uniqueItems": True}, {"$ref": "#/$defs/R"}, {"enum": [{"a": 1}]}, {"enum": ['<|"|><escape>']}],
)
def test_call_literals_refuse_what_they_cannot_write(format: str, schema: dict[str, object]) -> None:
    loop = {"R": {"type": "object", "properties": {"r": {"$ref": "#/$defs/R"}}}}
    with pytest.raises(ValidationError, match="tools: the call format"):
        FORMATS[format][0].grammar(Lark(lambda _: None), [tool("f", {"a": schema}, **{"$defs": loop})], True)
