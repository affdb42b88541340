"""A client's JSON Schema -> one that llguidance enforces completely. What cannot be enforced is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from samovar.errors import ValidationError
from samovar.grammar.limits import GrammarLimits
from samovar.grammar.regex_rules import translate
from samovar.grammar.schema_literals import check_literal, check_text
from samovar.grammar.schema_numbers import NUMERIC, check_multiple, numeric_rules
from samovar.grammar.schema_refs import References, Target, escaped
from samovar.grammar.schema_rules import (
    ANNOTATIONS,
    FORMAT_PATTERNS,
    HINTS,
    INTEGER_FORMATS,
    REFUSED,
    STRING_FORMATS,
    TYPES,
)

IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
LONGEST_STRING = 1_000_000
"""A larger `maxLength` is enforced as this one."""


@dataclass(frozen=True, slots=True)
class Place:
    """One schema of the document while it is rewritten."""

    schema: Mapping[str, Any]
    base: str
    pointer: str
    out: dict[str, Any] = field(default_factory=dict)

    @property
    def types(self) -> tuple[str, ...]:
        """The types the schema names; all where it names none."""
        named = self.schema.get("type", TYPES)
        return (named,) if isinstance(named, str) else tuple(named)

    def at(self, keyword: str) -> str:
        """The JSON pointer of a keyword."""
        return f"#{self.pointer}/{escaped(keyword)}"


class SchemaRewriter:
    """Rewrites one document: `field` names it in errors; `is_closed` leaves out properties nobody listed."""

    def __init__(self, root: Any, limits: GrammarLimits, *, field: str, is_closed: bool = False) -> None:
        self._root = root
        self._limits = limits
        self._field = field
        self._is_closed = is_closed
        self._references = References(root)
        self._names: dict[str, str] = {}
        self._definitions: dict[str, Any] = {}
        self._pending: list[tuple[str, Target]] = []
        self._nodes = 0

    def rewritten(self) -> dict[str, Any]:
        """The whole document. Raises `ValidationError` naming the keyword and where it is."""
        root = self.schema(self._root, self._references.base, "")
        while self._pending:
            name, target = self._pending.pop()
            self._definitions[name] = self.schema(target.schema, target.base, target.pointer)
        self._check_circles()
        if root is False:
            self.refuse("#", "the schema is false: nothing is valid", False)
        if not isinstance(root, dict):
            return {}
        return {**root, "$defs": self._definitions} if self._definitions else root

    def refuse(self, pointer: str, problem: str, value: Any) -> NoReturn:
        """Raise the `ValidationError` for a place in the document."""
        shown = str(value)
        raise ValidationError(f"{self._field}: {pointer[:300]}: {problem}", parameter=self._field, value=shown[:200])

    def schema(self, node: Any, base: str, pointer: str) -> Any:
        """One schema, with all that is inside it."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            self.refuse(f"#{pointer}", f"a schema is an object, true or false, got {_kind(node)}", node)
        self._nodes += 1
        if self._nodes > self._limits.nodes:
            self.refuse(f"#{pointer}", f"the schema has more than {self._limits.nodes} parts", self._nodes)
        place = Place(node, self._references.base_at(pointer, base), pointer)
        for keyword, value in node.items():
            if keyword in ANNOTATIONS or keyword.startswith("x-"):
                continue
            rule = RULES.get(keyword)
            if rule is None:
                self._refuse_keyword(place, keyword, value)
            rule(self, place, value)
        self._finish(place)
        return place.out

    def inner(self, place: Place, keyword: str, node: Any) -> Any:
        """The schema at a keyword (or deeper: the rest of a pointer) of `place`."""
        return self.schema(node, place.base, f"{place.pointer}/{keyword}")

    def _check_circles(self) -> None:
        """A reference that only leads to itself says nothing."""
        for start, node in self._definitions.items():
            seen = {start}
            while isinstance(node, dict) and set(node) == {"$ref"}:
                name = node["$ref"].rpartition("/")[2]
                if name in seen:
                    pointer = next(key for key, known in self._names.items() if known == start)
                    self.refuse(f"#{pointer}/$ref", "the reference leads to nothing but itself", None)
                seen.add(name)
                node = self._definitions[name]

    def _refuse_keyword(self, place: Place, keyword: str, value: Any) -> NoReturn:
        remedy = REFUSED.get(keyword)
        if remedy is not None:
            self.refuse(place.at(keyword), f"the keyword {keyword!r} cannot be enforced: {remedy}", value)
        shown = keyword[:100]
        self.refuse(place.at(shown), f"the keyword {shown!r} is not known; names of notes begin with x-", value)

    def _finish(self, place: Place) -> None:
        """What depends on several keywords together."""
        if any(keyword in place.schema for keyword in (*NUMERIC, "format")):
            numeric_rules(self, place)
        out = place.out
        for least, most in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
            if least in out and most in out and out[least] > out[most]:
                self.refuse(place.at(least), f"{least} {out[least]} is over {most} {out[most]}", out[least])
        if "propertyNames" in place.schema:
            self._property_names(place, place.schema["propertyNames"])
        missing = place.out.get("minProperties", 0) - len(place.out.get("required", ()))
        if missing > 1:
            # Nothing keeps a model from writing one name twice, and then there is one property, not two.
            problem = "minProperties is enforced up to one more than the required properties: list more as required"
            self.refuse(place.at("minProperties"), problem, place.out["minProperties"])
        self._close(place)

    def _close(self, place: Place) -> None:
        """`unevaluated...: false` beside nothing that evaluates elsewhere is `additional...: false`."""
        for keyword, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            value = place.schema.get(keyword, True)
            if value is True or value == {}:
                continue
            if value is not False or any(other in place.schema for other in IN_PLACE):
                problem = f"{keyword} is enforced only as false, and not beside {', '.join(IN_PLACE)}"
                self.refuse(place.at(keyword), f"{problem}: use {plain}", value)
            place.out.setdefault(plain, False)
        if not self._is_closed or "additionalProperties" in place.out:
            return
        has_names = "properties" in place.out or "patternProperties" in place.out
        if has_names and any(other in place.schema for other in IN_PLACE):
            problem = "disable_additional_properties cannot close an object that is also described by "
            self.refuse(f"#{place.pointer}", problem + ", ".join(IN_PLACE), None)
        if has_names or ("object" in place.types and "type" in place.schema):
            place.out["additionalProperties"] = False

    def _property_names(self, place: Place, value: Any) -> None:
        """Names as patterns of properties, where nothing else describes the properties."""
        where = place.at("propertyNames")
        if value is True or value in ({}, {"type": "string"}):
            return
        others = [k for k in ("properties", "patternProperties", "required") if place.out.get(k)]
        if others or not isinstance(value, Mapping) or not set(value) - ANNOTATIONS - {"type"}:
            self.refuse(where, "propertyNames is enforced only alone, as pattern, enum, minLength or maxLength", value)
        rules = {k: v for k, v in value.items() if k not in ANNOTATIONS}
        if rules.pop("type", "string") != "string":
            self.refuse(where, "names are strings", value)
        values = place.out.pop("additionalProperties", True)
        place.out["additionalProperties"] = False
        if set(rules) == {"enum"} or set(rules) == {"const"}:
            names = rules.get("enum", [rules.get("const")])
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                self.refuse(where, "names are strings", value)
            self._count(place, "propertyNames", len(names), self._limits.properties)
            place.out["properties"] = {self.text(name, where): values for name in names}
        elif set(rules) == {"pattern"}:
            place.out["patternProperties"] = {self.pattern(place, "propertyNames", rules["pattern"]): values}
        elif set(rules) <= {"minLength", "maxLength"}:
            least, most = (self.count(place, "propertyNames", rules.get(k, 0)) for k in ("minLength", "maxLength"))
            end = str(most) if "maxLength" in rules else ""
            place.out["patternProperties"] = {f"^(?s:.){{{least},{end}}}$": values}
        else:
            self.refuse(where, "propertyNames is enforced only alone, as pattern, enum, minLength or maxLength", value)

    def count(self, place: Place, keyword: str, value: Any) -> int:
        """A number of things."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.refuse(place.at(keyword), f"{keyword} must be an integer from 0 up, got {_shown(value)}", value)
        return value

    def text(self, value: Any, where: str) -> str:
        """A string that can be written in an answer."""
        problem = check_text(value)
        if problem is not None:
            self.refuse(where, problem, value)
        return str(value)

    def pattern(self, place: Place, keyword: str, value: Any) -> str:
        """A pattern in the dialect that is enforced."""
        if not isinstance(value, str):
            self.refuse(place.at(keyword), f"a pattern is a string, got {_kind(value)}", value)
        where = f"{self._field}: {place.at(keyword)}"
        try:
            return translate(value, where, is_whole=False, max_bytes=self._limits.pattern_bytes)
        except ValidationError as error:
            raise ValidationError(str(error), parameter=self._field, value=error.value) from None

    def reference(self, place: Place, value: Any) -> str:
        """The name of the definition a reference leads to, which is rewritten later."""
        where = place.at("$ref")
        if not isinstance(value, str):
            self.refuse(where, f"a $ref is a string, got {_kind(value)}", value)
        if place.pointer and isinstance(place.schema.get("$id", place.schema.get("id")), str):
            self.refuse(where, "drafts disagree about $ref beside $id: put the $ref into allOf", value)
        try:
            target = self._references.resolve(value, place.base, f"{self._field}: {where}")
        except ValidationError as error:
            raise ValidationError(str(error), parameter=self._field, value=error.value) from None
        except ValueError as error:  # urllib's word for a malformed URI
            self.refuse(where, f"$ref {value[:200]!r} is no URI: {error}", value)
        name = self._names.get(target.key)
        if name is None:
            name = self._names[target.key] = f"d{len(self._names)}"
            self._pending.append((name, target))
        return name

    def _count(self, place: Place, keyword: str, number: int, most: int) -> None:
        if number > most:
            self.refuse(place.at(keyword), f"{number} entries are more than the {most} that are compiled", number)

    def _type(self, place: Place, value: Any) -> None:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not all(isinstance(n, str) and n in TYPES for n in names):
            self.refuse(place.at("type"), f"type must be one of {', '.join(TYPES)}, or a list of them", value)
        place.out["type"] = value if isinstance(value, str) else list(dict.fromkeys(names))

    def _enum(self, place: Place, value: Any) -> None:
        if not isinstance(value, list) or not value:
            self.refuse(place.at("enum"), "enum must be a list with at least one value", value)
        self._count(place, "enum", len(value), self._limits.enum_values)
        for literal in value:
            problem = check_literal(literal)
            if problem is not None:
                self.refuse(place.at("enum"), problem, literal)
        place.out["enum"] = value

    def _const(self, place: Place, value: Any) -> None:
        problem = check_literal(value)
        if problem is not None:
            self.refuse(place.at("const"), problem, value)
        place.out["const"] = value

    def _reference(self, place: Place, value: Any) -> None:
        place.out["$ref"] = f"#/$defs/{self.reference(place, value)}"

    def _schemas(self, place: Place, value: Any, keyword: str) -> list[Any]:
        if not isinstance(value, list) or (not value and keyword != "prefixItems"):
            self.refuse(place.at(keyword), f"{keyword} must be a list with at least one schema", value)
        return [self.inner(place, f"{keyword}/{at}", node) for at, node in enumerate(value)]

    def _named(self, place: Place, value: Any, keyword: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self.refuse(place.at(keyword), f"{keyword} must be an object, got {_kind(value)}", value)
        self._count(place, keyword, len(value), self._limits.properties)
        return {name: self.inner(place, f"{keyword}/{escaped(name)}", node) for name, node in value.items()}

    def _properties(self, place: Place, value: Any) -> None:
        named = self._named(place, value, "properties")
        place.out["properties"] = {self.text(name, place.at("properties")): node for name, node in named.items()}

    def _pattern_properties(self, place: Place, value: Any) -> None:
        named = self._named(place, value, "patternProperties")
        written = {self.pattern(place, "patternProperties", name): node for name, node in named.items()}
        if len(written) < len(named):
            self.refuse(place.at("patternProperties"), "two patterns are the same one; join their schemas", value)
        place.out["patternProperties"] = written

    def _required(self, place: Place, value: Any) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self.refuse(place.at("required"), f"required must be a list of names, got {_shown(value)}", value)
        self._count(place, "required", len(value), self._limits.properties)
        place.out["required"] = [self.text(name, place.at("required")) for name in dict.fromkeys(value)]

    def _items(self, place: Place, value: Any) -> None:
        if not isinstance(value, list):
            place.out["items"] = self.inner(place, "items", value)
            return
        if "prefixItems" in place.schema:
            self.refuse(place.at("items"), "items is a list, and there is prefixItems, too", value)
        place.out["prefixItems"] = self._schemas(place, value, "items") if value else []
        if "additionalItems" in place.schema:
            place.out["items"] = self.inner(place, "additionalItems", place.schema["additionalItems"])

    def _unique(self, place: Place, value: Any) -> None:
        most = place.schema.get("maxItems")
        if value is not False and not (value is True and isinstance(most, int) and most <= 1):
            self.refuse(place.at("uniqueItems"), "the keyword 'uniqueItems' cannot be enforced: leave it out", value)

    def _length(self, place: Place, value: Any, keyword: str) -> None:
        number = self.count(place, keyword, value)
        if number > LONGEST_STRING:
            if keyword == "minLength":
                self.refuse(place.at(keyword), f"strings of at least {number} characters are not made here", value)
            number = LONGEST_STRING
        place.out[keyword] = number

    def _number_of_items(self, place: Place, value: Any, keyword: str) -> None:
        number = self.count(place, keyword, value)
        if number > self._limits.items:
            if keyword == "minItems":
                problem = f"{number} items are more than the {self._limits.items} that are compiled"
                self.refuse(place.at(keyword), problem, value)
            number = self._limits.items
        place.out[keyword] = number

    def _number_of_properties(self, place: Place, value: Any, keyword: str) -> None:
        number = self.count(place, keyword, value)
        if number or keyword == "maxProperties":
            place.out[keyword] = number

    def _format(self, place: Place, value: Any) -> None:
        if not isinstance(value, str):
            self.refuse(place.at("format"), f"a format is a string, got {_kind(value)}", value)
        if "string" not in place.types or value in HINTS or ("type" not in place.schema and value in INTEGER_FORMATS):
            return
        if value not in STRING_FORMATS:
            known = ", ".join(sorted(STRING_FORMATS))
            problem = f"the format {value[:100]!r} cannot be enforced: use one of {known}, or a pattern"
            self.refuse(place.at("format"), problem, value)
        if value in FORMAT_PATTERNS:
            place.out.setdefault("allOf", []).append({"pattern": FORMAT_PATTERNS[value]})
        else:
            place.out["format"] = value

    def _multiple(self, place: Place, value: Any) -> None:
        problem = check_multiple(value)
        if problem is not None:
            self.refuse(place.at("multipleOf"), problem, value)
        place.out["multipleOf"] = value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _shown(value: Any) -> str:
    return repr(value)[:100]


Rule: TypeAlias = Callable[[SchemaRewriter, Place, Any], None]


def _schemas_of(keyword: str) -> Rule:
    def rule(rewriter: SchemaRewriter, place: Place, value: Any) -> None:
        place.out.setdefault(keyword, []).extend(rewriter._schemas(place, value, keyword))

    return rule


def _later(rewriter: SchemaRewriter, place: Place, value: Any) -> None:
    """For keywords that are read together with others, when all of them are known."""


RULES: dict[str, Rule] = {
    "type": SchemaRewriter._type,
    "enum": SchemaRewriter._enum,
    "const": SchemaRewriter._const,
    "$ref": SchemaRewriter._reference,
    "allOf": _schemas_of("allOf"),
    "anyOf": _schemas_of("anyOf"),
    "oneOf": _schemas_of("oneOf"),
    "prefixItems": _schemas_of("prefixItems"),
    "items": SchemaRewriter._items,
    "additionalItems": _later,
    "minItems": lambda r, p, v: r._number_of_items(p, v, "minItems"),
    "maxItems": lambda r, p, v: r._number_of_items(p, v, "maxItems"),
    "uniqueItems": SchemaRewriter._unique,
    "unevaluatedItems": _later,
    "properties": SchemaRewriter._properties,
    "patternProperties": SchemaRewriter._pattern_properties,
    "additionalProperties": lambda r, p, v: p.out.__setitem__(
        "additionalProperties", r.inner(p, "additionalProperties", v)
    ),
    "unevaluatedProperties": _later,
    "propertyNames": _later,
    "required": SchemaRewriter._required,
    "minProperties": lambda r, p, v: r._number_of_properties(p, v, "minProperties"),
    "maxProperties": lambda r, p, v: r._number_of_properties(p, v, "maxProperties"),
    "minLength": lambda r, p, v: r._length(p, v, "minLength"),
    "maxLength": lambda r, p, v: r._length(p, v, "maxLength"),
    "pattern": lambda r, p, v: p.out.__setitem__("pattern", r.pattern(p, "pattern", v)),
    "format": SchemaRewriter._format,
    "minimum": _later,
    "maximum": _later,
    "exclusiveMinimum": _later,
    "exclusiveMaximum": _later,
    "multipleOf": SchemaRewriter._multiple,
}
