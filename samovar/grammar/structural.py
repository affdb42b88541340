"""Structural tags: free text in which certain marks begin text of a certain form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from samovar.errors import ValidationError
from samovar.grammar.json_source import parse_schema
from samovar.grammar.limits import GrammarLimits
from samovar.text.lark import ANY_TEXT, Lark

MORE_DEPTH = 16
"""Levels that structural tags may add to those of the schemas inside."""

MAX_TAGS = 256

_KNOWN = "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags and tags_with_separator"


class StructuralTags:
    """Writes structural tags as an expression of `lark`. `pattern` checks and translates a client's regex."""

    def __init__(self, lark: Lark, limits: GrammarLimits, *, field: str, pattern: Callable[[str], str]) -> None:
        self._lark = lark
        self._limits = limits
        self._field = field
        self._pattern = pattern
        self._formats: dict[str, Callable[[Mapping[str, Any], str], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def expression(self, raw: Any) -> str:
        """The expression for what a client sent, as an object or as its JSON text. Raises `ValidationError`."""
        value = parse_schema(raw, self._limits, field=self._field) if isinstance(raw, str) else raw
        if not isinstance(value, Mapping) or value.get("type", "structural_tag") != "structural_tag":
            self._refuse("", 'must be an object with type "structural_tag"', value)
        if "format" in value:
            self._only(value, "", {"type", "format"})
            return self._format(value["format"], "format", 0)
        self._only(value, "", {"type", "structures", "triggers"})
        tags = []
        for at, structure in enumerate(self._list(value, "structures", "")):
            where = f"structures[{at}]"
            if not isinstance(structure, Mapping):
                self._refuse(where, "must be an object", structure)
            self._only(structure, where, {"begin", "schema", "end"})
            end = self._text(structure, "end", where)
            tags.append((self._text(structure, "begin", where), self._json(structure.get("schema"), where), [end]))
        return self._free_with(self._texts(value, "triggers", ""), tags, "triggers")

    def _refuse(self, where: str, problem: str, value: Any = None) -> NoReturn:
        place = f"{self._field}.{where}" if where else self._field
        raise ValidationError(f"{place}: {problem}"[:600], parameter=self._field, value=str(value)[:200])

    def _only(self, value: Mapping[str, Any], where: str, known: set[str]) -> None:
        unknown = sorted(str(key) for key in set(value) - known)
        if unknown:
            self._refuse(where, f"does not know the field {unknown[0][:100]!r}", unknown)

    def _list(self, value: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
        items = value.get(key)
        if not isinstance(items, list) or not 0 < len(items) <= MAX_TAGS:
            self._refuse(where, f"{key} must be a list of 1 to {MAX_TAGS} entries", items)
        return items

    def _text(self, value: Mapping[str, Any], key: str, where: str) -> str:
        text = value.get(key, "")
        if not isinstance(text, str) or (key != "end" and not text):
            self._refuse(where, f"{key} must be a string{'' if key == 'end' else ' that is not empty'}", text)
        return text

    def _texts(self, value: Mapping[str, Any], key: str, where: str) -> list[str]:
        texts = self._list(value, key, where)
        if not all(isinstance(text, str) and text for text in texts):
            self._refuse(where, f"{key} must be strings that are not empty", texts)
        return list(dict.fromkeys(texts))

    def _flag(self, value: Mapping[str, Any], key: str, where: str) -> bool:
        flag = value.get(key, False)
        if not isinstance(flag, bool):
            self._refuse(where, f"{key} must be true or false", flag)
        return flag

    def _json(self, schema: Any, where: str) -> str:
        if not isinstance(schema, Mapping | bool):
            self._refuse(where, "the schema must be a JSON Schema", schema)
        return self._lark.json(schema)

    def _format(self, value: Any, where: str, depth: int) -> str:
        if depth > MORE_DEPTH:
            self._refuse(where, f"formats are nested deeper than {MORE_DEPTH} levels")
        if not isinstance(value, Mapping):
            self._refuse(where, "a format must be an object", value)
        kind = value.get("type")
        write = self._formats.get(kind) if isinstance(kind, str) else None
        if write is None:
            self._refuse(where, f"the format {str(kind)[:100]!r} is not available here; these are: {_KNOWN}", kind)
        self._depth = depth
        return write(value, where)

    def _inside(self, value: Any, where: str) -> str:
        depth = self._depth
        try:
            return self._format(value, where, depth + 1)
        finally:
            self._depth = depth

    _depth = 0

    def _const_string(self, value: Mapping[str, Any], where: str) -> str:
        self._only(value, where, {"type", "value"})
        return self._lark.text(self._text(value, "value", where))

    def _json_schema(self, value: Mapping[str, Any], where: str) -> str:
        self._only(value, where, {"type", "json_schema", "style"})
        if value.get("style", "json") != "json":
            self._refuse(where, f"the style {value['style']!r} is not available here; json is", value["style"])
        return self._json(value.get("json_schema"), where)

    def _regex(self, value: Mapping[str, Any], where: str) -> str:
        self._only(value, where, {"type", "pattern"})
        return self._lark.regex(self._pattern(self._text(value, "pattern", where)))

    def _any_text(self, value: Mapping[str, Any], where: str) -> str:
        self._only(value, where, {"type"})
        return ANY_TEXT

    def _sequence(self, value: Mapping[str, Any], where: str) -> str:
        self._only(value, where, {"type", "elements"})
        elements = self._list(value, "elements", where)
        free = [at for at, e in enumerate(elements) if isinstance(e, Mapping) and e.get("type") == "any_text"]
        if free and free != [len(elements) - 1]:
            self._refuse(where, "any_text may only be the last element: nothing says where it ends", None)
        return self._lark.seq(*(self._inside(e, f"{where}.elements[{at}]") for at, e in enumerate(elements)))

    def _or(self, value: Mapping[str, Any], where: str) -> str:
        self._only(value, where, {"type", "elements"})
        elements = self._list(value, "elements", where)
        return self._lark.any_of(*(self._inside(e, f"{where}.elements[{at}]") for at, e in enumerate(elements)))

    def _tag_parts(self, value: Any, where: str) -> tuple[str, str, list[str]]:
        if not isinstance(value, Mapping) or value.get("type", "tag") != "tag":
            self._refuse(where, "must be a tag", value)
        self._only(value, where, {"type", "begin", "content", "end"})
        raw_ends = value.get("end", "")
        ends = raw_ends if isinstance(raw_ends, list) else [raw_ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            self._refuse(where, "end must be a string or a list of strings", raw_ends)
        content = value.get("content")
        if isinstance(content, Mapping) and content.get("type") == "any_text" and all(ends):
            self._only(content, f"{where}.content", {"type"})
            return self._text(value, "begin", where), self._lark.free_until_any(ends), [""]
        return self._text(value, "begin", where), self._inside(content, f"{where}.content"), ends

    def _written(self, content: str, ends: list[str]) -> str:
        return self._lark.seq(content, self._lark.any_of(*(self._lark.text(end) for end in ends)))

    def _tag(self, value: Mapping[str, Any], where: str) -> str:
        begin, content, ends = self._tag_parts(value, where)
        return self._lark.seq(self._lark.text(begin), self._written(content, ends))

    def _tags(self, value: Mapping[str, Any], where: str) -> list[tuple[str, str, list[str]]]:
        tags = self._list(value, "tags", where)
        return [self._tag_parts(tag, f"{where}.tags[{at}]") for at, tag in enumerate(tags)]

    def _triggered_tags(self, value: Mapping[str, Any], where: str) -> str:
        self._only(value, where, {"type", "triggers", "tags", "at_least_one", "stop_after_first"})
        return self._free_with(
            self._texts(value, "triggers", where),
            self._tags(value, where),
            f"{where}.triggers",
            is_required=self._flag(value, "at_least_one", where),
            is_single=self._flag(value, "stop_after_first", where),
        )

    def _tags_with_separator(self, value: Mapping[str, Any], where: str) -> str:
        self._only(value, where, {"type", "tags", "separator", "at_least_one", "stop_after_first"})
        tags = self._tags(value, where)
        one = self._lark.any_of(*(self._lark.seq(self._lark.text(b), self._written(c, e)) for b, c, e in tags))
        least = int(self._flag(value, "at_least_one", where))
        most = 1 if self._flag(value, "stop_after_first", where) else None
        separator = value.get("separator", "")
        if not isinstance(separator, str):
            self._refuse(where, "separator must be a string", separator)
        return self._lark.many(
            self._lark.rule("tag", one),
            least=least,
            most=most,
            separator=self._lark.text(separator) if separator else None,
        )

    def _free_with(
        self,
        triggers: list[str],
        tags: list[tuple[str, str, list[str]]],
        where: str,
        *,
        is_required: bool = False,
        is_single: bool = False,
    ) -> str:
        """Free text, and after each trigger the rest of one of the tags that begin with it."""
        options, used = [], 0
        for trigger in triggers:
            begun = [(begin[len(trigger) :], body, ends) for begin, body, ends in tags if begin.startswith(trigger)]
            used += len(begun)
            if not begun:
                self._refuse(where, f"no tag begins with the trigger {trigger[:100]!r}", trigger)
            rests = [self._lark.seq(self._lark.text(rest), self._written(body, ends)) for rest, body, ends in begun]
            options.append(self._lark.seq(self._lark.until(trigger), self._lark.any_of(*rests)))
        if used != len(tags):
            self._refuse(where, "each tag must begin with exactly one trigger", triggers)
        some = self._lark.rule("tagged", self._lark.any_of(*options))
        if is_single:
            return some if is_required else self._lark.any_of(some, ANY_TEXT)
        return self._lark.seq(self._lark.many(some, least=int(is_required)), ANY_TEXT)
