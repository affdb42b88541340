"""The keyword table: every keyword is enforced, without effect, or refused by name and place; nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from samovar.core.structured import StructuredOutputsParams
from samovar.errors import ValidationError
from samovar.grammar.json_source import JsonStyle, enforced_schema
from samovar.grammar.limits import GrammarLimits
from samovar.grammar.schema_rules import ANNOTATIONS, ENFORCED, REFUSED
from tests.grammar.matching import accepts, start

LIMITS = GrammarLimits()


def grammar_of(schema: Any, style: JsonStyle | None = None) -> str:
    return "start: %json " + json.dumps(enforced_schema(schema, LIMITS, style or JsonStyle(), field="json"))


def check(schema: Any, yes: list[Any], no: list[Any], style: JsonStyle | None = None) -> None:
    grammar = grammar_of(schema, style)

    def written(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    assert [v for v in yes if not accepts(grammar, written(v))] == []
    assert [v for v in no if accepts(grammar, written(v))] == []


def refused(schema: Any, *words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        grammar = grammar_of(schema)
        if (error := start(grammar).error) is not None:  # llguidance's own refusals
            raise ValidationError(f"json: {error}", parameter="json")
    assert caught.value.parameter == "json"
    for word in words:
        assert word in str(caught.value), str(caught.value)


CLOSED = {"type": "object", "additionalProperties": False}

ENFORCED_CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "type": ({"type": ["integer", "null"]}, [1, None], ["1.5", "\"a\"", []]),
    "enum": ({"enum": [1, "a", [2]]}, [1, '"a"', [2]], [2, '"b"', []]),
    "const": ({"const": {"a": 1.5}}, [{"a": 1.5}], [{}, {"a": 1}]),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 5}, {"maximum": 7}]}, [5, 7], [4, 8]),
    "anyOf": ({"anyOf": [{"type": "null"}, {"const": 3}]}, [None, 3], [4]),
    "oneOf": ({"oneOf": [{"type": "null"}, {"const": 3}]}, [None, 3], [4]),
    "$ref": ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}}, [None], [1]),
    "properties": ({**CLOSED, "properties": {"a": {"type": "null"}}}, [{}, {"a": None}], [{"a": 1}, {"b": None}]),
    "required": ({"type": "object", "required": ["a"]}, [{"a": 1}, {"a": 1, "b": 2}], [{}, {"b": 2}]),
    "additionalProperties": ({"type": "object", "additionalProperties": {"const": 1}}, [{}, {"x": 1}], [{"x": 2}]),
    "patternProperties": ({**CLOSED, "patternProperties": {"^x": {"const": 1}}}, [{"xy": 1}], [{"xy": 2}, {"y": 1}]),
    "minProperties": ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    "maxProperties": ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"ab": 1}, {}], [{"b": 1}]),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"a": True}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]
    ),
    "items": ({"type": "array", "items": {"const": 1}}, [[], [1, 1]], [[2]]),
    "prefixItems": ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, [[1], []], [[2], [1, 1]]),
    "additionalItems": ({"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}}, [[1, 2]], [[1, 1]]),
    "minItems": ({"type": "array", "minItems": 2}, [[1, 2]], [[1]]),
    "maxItems": ({"type": "array", "maxItems": 2}, [[1, 2]], [[1, 2, 3]]),
    "uniqueItems": ({"type": "array", "uniqueItems": False}, [[1, 1]], [{}]),
    "unevaluatedItems": ({"type": "array", "prefixItems": [True], "unevaluatedItems": False}, [[1]], [[1, 2]]),
    "minLength": ({"type": "string", "minLength": 2}, ['"éé"', '"😀😀"', '"\\n\\n"'], ['"a"', '"😀"']),
    "maxLength": ({"type": "string", "maxLength": 2}, ['"éé"', '"\\n\\""', '""'], ['"abc"']),
    "pattern": ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ['"b"']),
    "format": ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-2-1"', '"2024-04-31"']),
    "minimum": ({"type": "number", "minimum": 1.5}, [1.5, 2, 17], [1.4, 0, -2]),
    "maximum": ({"type": "integer", "maximum": 12}, [12, 0, -5], [13, 100]),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 1000, "maximum": 1000.5}, [1000.1, 1000.5], [1000, 1001]),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 12}, [11, -3], [12]),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, [0, 49, -7], [1, 48]),
}  # fmt: skip


@pytest.mark.parametrize("keyword", sorted(ENFORCED))
def test_enforced_keywords(keyword: str) -> None:
    schema, yes, no = ENFORCED_CASES[keyword]
    assert keyword in schema
    check(schema, yes, no)
    nested = {"type": "object", "properties": {"p": schema}, "required": ["p"], "additionalProperties": False}
    nested["$defs"] = schema.get("$defs", {})
    text = yes[0] if isinstance(yes[0], str) else json.dumps(yes[0])
    bad = no[0] if isinstance(no[0], str) else json.dumps(no[0])
    check(nested, [f'{{"p": {text}}}'], [f'{{"p": {bad}}}'])


@pytest.mark.parametrize("keyword", sorted(REFUSED))
@pytest.mark.parametrize("value", [{}, True, [], {"a": ["b"]}, 0])
def test_refused_keywords(keyword: str, value: Any) -> None:
    """B118: what cannot be enforced is refused, with its name and place."""
    refused({"type": "object", "properties": {"a/b": {keyword: value}}}, f"'{keyword}'", f"#/properties/a~1b/{keyword}")


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS))
def test_annotations_change_nothing(keyword: str) -> None:
    value = {"$defs": {"x": {"uniqueItems": True}}, "definitions": {"x": {"not": {}}}}.get(keyword, "note")
    check({"type": "null", keyword: value, "x-note": {"not": 1}}, [None], [1])


def test_unknown_keywords_are_refused() -> None:
    refused({"type": "string", "minLenght": 3}, "minLenght", "not known")


def test_names_of_properties_are_no_keywords() -> None:
    names = ["not", "if", "uniqueItems", "minLenght", "$ref", "x-guidance", "description"]
    schema = {**CLOSED, "properties": {name: {"const": 1} for name in names}, "required": names}
    check(schema, [dict.fromkeys(names, 1)], [dict.fromkeys(names, 2)])


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "uniqueItems": True}, ["uniqueItems"]),
        ({"type": "any"}, ["#/type"]),
        ({"type": []}, ["#/type"]),
        ({"enum": []}, ["#/enum"]),
        ({"anyOf": []}, ["#/anyOf"]),
        ({"properties": []}, ["#/properties"]),
        ({"required": "a"}, ["#/required"]),
        ({"required": True}, ["#/required"]),
        ({"items": 3}, ["#/items"]),
        ({"minLength": -1}, ["minLength"]),
        ({"minLength": "3"}, ["minLength"]),
        ({"maxItems": True}, ["maxItems"]),
        ({"minItems": 100_000}, ["minItems"]),
        ({"minLength": 3, "maxLength": 2}, ["minLength"]),
        ({"minItems": 3, "maxItems": 2}, ["minItems"]),
        ({"minProperties": 2, "type": "object"}, ["minProperties"]),
        ({"pattern": "("}, ["#/pattern"]),
        ({"pattern": 3}, ["#/pattern"]),
        ({"patternProperties": {"(?=x)": True}}, ["patternProperties", "look-around"]),
        ({"type": "string", "format": "iri"}, ["#/format", "iri", "uuid"]),
        ({"format": "color"}, ["color"]),
        ({"type": "integer", "minimum": 5, "maximum": 3}, ["minimum"]),
        ({"type": "number", "minimum": 5, "exclusiveMaximum": 5}, ["minimum"]),
        ({"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 5}, ["minimum"]),
        ({"type": "integer", "minimum": 1, "maximum": 6, "multipleOf": 7}, ["multipleOf"]),
        ({"type": "integer", "minimum": 2**63}, ["64 bits"]),
        ({"type": "integer", "minimum": 10**400}, ["bits"]),
        ({"minimum": 1e300, "type": "number"}, ["1e+15"]),
        ({"minimum": float("inf")}, ["minimum"]),
        ({"minimum": float("nan")}, ["minimum"]),
        ({"multipleOf": 0}, ["multipleOf"]),
        ({"multipleOf": -1}, ["multipleOf"]),
        ({"multipleOf": 999983}, ["multipleOf"]),
        ({"const": 2**53 + 1}, ["#/const"]),
        ({"enum": [1, [2**64]]}, ["#/enum"]),
        ({"const": "\x00"}, ["U+0000"]),
        ({"const": "\ud800"}, ["U+D800"]),
        ({"properties": {"\x7f": {}}}, ["U+007F"]),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"]),
        ({"unevaluatedProperties": False, "allOf": [{}]}, ["unevaluatedProperties"]),
        ({"type": "object", "propertyNames": {"not": {}}}, ["propertyNames"]),
        ({"type": "object", "propertyNames": {"pattern": "a"}, "required": ["b"]}, ["propertyNames"]),
        (False, ["false"]),
        (3, ["schema is an object"]),
        ("{", ["not JSON"]),
        ("[NaN]", ["NaN"]),
        ('{"minimum": 1e999}', ["minimum"]),
        ({1: 2}, ["1"]),
        ({"type": "string", "enum": ["a"], "maxLength": 0}, ["nsatisfiable"]),
    ],
)
def test_values_that_cannot_be_enforced_are_refused(schema: Any, words: list[str]) -> None:
    """B107, B109, B110, B118."""
    refused(schema, *words)


@pytest.mark.parametrize("bound", [2**31, 2**53, 2**53 + 1, 2**62 + 3, 2**63 - 1, 2**63, 2**64 - 1, 10**30])
def test_large_integer_bounds_hold(bound: int) -> None:
    """B109: enforced exactly, or a little inside of where floats can tell integers apart."""
    exact = bound <= 2**53 or bound == 2**63 - 1
    check({"type": "integer", "minimum": 0, "maximum": bound}, [0, *([bound] if exact else [])], [bound + 1, -1])
    check({"type": "integer", "exclusiveMaximum": bound, "minimum": 0}, [1], [bound, bound + 1])
    check({"type": "integer", "minimum": -bound, "maximum": 0}, [-1], [-bound - 1, 1])
    if bound < 2**62:
        check({"type": "integer", "exclusiveMinimum": bound}, [bound * 2], [bound, bound - 1])


def test_booleans_of_draft_4() -> None:
    check({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3])
    check({"type": "number", "maximum": 3, "exclusiveMaximum": True}, [2], [3])
    check({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, [3], [2])


def test_formats_of_numbers() -> None:
    check({"type": "integer", "format": "int32"}, [2**31 - 1, -(2**31)], [2**31])
    check({"type": "integer", "format": "uint8", "minimum": 3}, [3, 255], [2, 256])
    check({"type": "number", "format": "double"}, [1.5], ['"a"'])
    check({"type": "string", "format": "password"}, ['"x"'], [1])


FORMATS = {
    "date-time": (
        ["2024-02-29T23:59:59Z", "1999-12-31T00:00:00.123+05:30"],
        ["2023-02-29T00:00:00Z", "2024-01-01", "24T"],
    ),
    "time": (["00:00:00Z", "23:59:59.5-12:00"], ["24:00:00Z", "12:60:00Z", "12:00:60Z", "12:00:00"]),
    "ipv4": (["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    "ipv6": (["::1", "fe80::1:2"], [":::", "12345::"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "email": (["a.b@example.org"], ["a@", "@b"]),
    "hostname": (["a-b.example"], ["-a", "a..b"]),
    "uri": (["https://example.org/a?b#c"], ["a b", "//x"]),
    "duration": (["P1DT2H"], ["P", "1D"]),
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats(name: str) -> None:
    yes, no = FORMATS[name]
    check({"type": "string", "format": name}, [f'"{t}"' for t in yes], [f'"{t}"' for t in no])
    check({"type": "string", "format": name, "pattern": "^[a-zA-Z0-9:/-]"}, [], ['"' + t + '"' for t in no])


def test_names_have_one_spelling() -> None:
    """With an escape in it, a name would get around what the schema says about it."""
    schema = {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^b": {"type": "null"}}}
    check(
        schema,
        ['{"a":1}', '{"b":null}', '{"c":"x"}'],
        ['{"\\u0061":"x"}', '{"\\u0062":1}', '{"a":1,"a":"x"}', '{"\\/":1}'],
    )
    check({"type": "string"}, ['"é😀"', '"\\n\\"\\\\"'], ['"\\u0061"', '"\\ud83d"', '"\\/"', '"\n"', '"\x7f"'])


def test_options_of_the_library_are_not_the_clients() -> None:
    refused({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "uniqueItems")
    check({"x-guidance": {"whitespace_pattern": "x"}, "const": [1]}, ["[ 1]"], ["[x1]"])


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ("#/properties/a/anyOf/0", 1),
        ("#/properties/a/anyOf/1", 2),
        ("#/properties/b~1c~0d%20e%25", 3),
        ("#/properties/", 4),
        ("#/properties/list/items/0", 5),
        ("#here", 6),
        ("#/$defs/named", 6),
        ("http://x/y.json#/$defs/z", 7),
    ],
)
def test_references(reference: str, value: int) -> None:
    """B116: pointers with numeric steps, ~0, ~1 and percent signs, anchors and resources of the same document."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"anyOf": [{"const": 1}, {"const": 2}]},
            "b/c~d e%": {"const": 3},
            "": {"const": 4},
            "list": {"items": [{"const": 5}]},
            "it": {"$ref": reference},
        },
        "required": ["it"],
        "$defs": {
            "named": {"$anchor": "here", "const": 6},
            "own": {"$id": "http://x/y.json", "$defs": {"z": {"const": 7}}},
        },
    }
    check(schema, [{"it": value}], [{"it": value + 1}])


def test_recursion() -> None:
    tree = {
        "type": "object",
        "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
        "additionalProperties": False,
    }
    check(tree, ['{"kids":[{"kids":[]},{}]}'], ['{"kids":[{"kids":[1]}]}'])
    mutual = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}}, "b": {"enum": [1, 2]}},
    }
    check(mutual, [[1, 2]], [[3]])


@pytest.mark.parametrize(
    ("reference", "word"),
    [
        ("http://example.org/x.json", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("other.json#/a", "nothing is fetched"),
        ("#/nowhere", "nowhere"),
        ("#/$defs/l/9", "'9'"),
        ("#/$defs/l/-1", "'-1'"),
        ("#nowhere", "anchor"),
        ("#", "nothing but itself"),
        ("#/$defs/loop", "nothing but itself"),
        ("http://[", "$ref"),
        (7, "string"),
    ],
)
def test_references_that_lead_nowhere(reference: Any, word: str) -> None:
    """B116: no network, no guess."""
    refused({"$ref": reference, "$defs": {"l": [{}], "loop": {"$ref": "#/$defs/loop"}}}, word, "$ref")


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("length", [1, 1_999, 2_000, 100_000])
def test_long_strings_are_counted_without_being_written_out(length: int, depth: int) -> None:
    """B115."""
    schema: Any = {"type": "string", "maxLength": length}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"s": schema}, "required": ["s"], "additionalProperties": False}
    grammar = grammar_of(schema)
    assert len(grammar) < 1_000
    written = min(length, 3_000)
    opened, closed = '{"s":' * depth + '"', '"' + "}" * depth
    assert accepts(grammar, opened + "é" * written + closed)
    assert accepts(grammar, opened + "é" * (length + 1) + closed) is False if length < 3_000 else True


def test_whitespace_is_bounded() -> None:
    """B112: no blanks without end."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    check(
        schema,
        ['{"a":1}', '{"a": 1}', '{\n  "a": 1\n}'],
        ['{"a":  1}', ' {"a":1}', '{"a":1\n\n}', '{"a":\n' + " " * 21 + "1}"],
    )
    check(schema, ['{"a":1}'], ['{"a": 1}'], JsonStyle(whitespace=None))


@pytest.mark.parametrize("pattern", ["[ ]*", " {0,}", "[\\s]*", "( |\\n)+", "\\s?", ""])
def test_whitespace_of_clients(compiler: Any, pattern: str) -> None:
    params = StructuredOutputsParams(json={"const": [1]}, whitespace_pattern=pattern)
    grammar = compiler.structured(params)
    compiler.check(grammar)
    assert accepts(grammar, "[1]") or pattern == "( |\\n)+"
    assert accepts(grammar, "[ 1]") == (pattern != "")
    assert not accepts(grammar, "[" + " " * 500 + "1]") and not accepts(grammar, "[x1]")


@pytest.mark.parametrize("pattern", ["x", "[^ ]", ".", "\\S", "[a\\s]", "(", " {0,999999999}"])
def test_whitespace_that_is_none_is_refused(compiler: Any, pattern: str) -> None:
    with pytest.raises(ValidationError, match="whitespace_pattern"):
        compiler.structured(StructuredOutputsParams(json_object=True, whitespace_pattern=pattern))


def test_objects_can_be_closed() -> None:
    closed = JsonStyle(is_closed=True)
    inner = {"type": "object", "properties": {"b": {"const": 1}}}
    check({"type": "object", "properties": {"a": inner}}, [{}, {"a": {"b": 1}}], [{"c": 1}, {"a": {"c": 1}}], closed)
    check({**inner, "additionalProperties": True}, [{"c": 1}], [], closed)
    with pytest.raises(ValidationError, match="disable_additional_properties"):
        grammar_of({**inner, "allOf": [{"required": ["c"]}]}, closed)


def test_sizes_and_depths() -> None:
    def deep(levels: int) -> Any:
        schema: Any = {}
        for _ in range(levels):
            schema = {"items": schema}
        return schema

    assert start(grammar_of(deep(60))).error is None
    for bad in (deep(80), "[" * 100_000, {"enum": list(range(20_000))}, {"enum": ["x" * 600_000]},
                {"properties": {str(n): {} for n in range(2_000)}}, {"allOf": [{"type": "null"}] * 60_000}):  # fmt: skip
        refused(bad)


def test_a_schema_may_be_text_or_a_boolean() -> None:
    check('{"const": 1}', [1], [2])
    check(True, [1, {"a": [None]}], ["x"])
    check('{"const": "é"}', ['"é"'], ['"e"'])
