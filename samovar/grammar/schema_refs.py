"""References inside one JSON Schema document: `$id`, anchors and JSON pointers. Nothing is ever fetched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from samovar.errors import ValidationError

ONE_SCHEMA = (
    "additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "contentSchema",
)  # fmt: skip
MANY_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


@dataclass(frozen=True, slots=True)
class Target:
    """A schema some reference leads to. `key` is the same for the same place, however it was written."""

    schema: Any
    base: str
    pointer: str

    @property
    def key(self) -> str:
        return self.pointer


class References:
    """Finds what the references of a document point to."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._resources: dict[str, Target] = {}
        self._anchors: dict[tuple[str, str], Target] = {}
        self._bases: dict[str, str] = {}
        self.base = self._index(root)

    def resolve(self, reference: str, base: str, where: str) -> Target:
        """The schema that `reference`, written where `base` is the base URI, leads to. Raises `ValidationError`."""
        uri, fragment = urldefrag(urljoin(base, reference) if not reference.startswith("#") else base + reference)
        resource = self._resources.get(uri)
        if resource is None:
            message = (
                f"{where}: $ref {reference[:200]!r} leads out of the schema; nothing is fetched, so copy it into $defs"
            )
            raise ValidationError(message, parameter=where, value=reference[:200])
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((uri, fragment))
            if found is None:
                message = f"{where}: $ref {reference[:200]!r}: the schema has no anchor {fragment[:200]!r}"
                raise ValidationError(message, parameter=where, value=reference[:200])
            return found
        return self._descend(resource, fragment, reference, where)

    def base_at(self, pointer: str, inherited: str) -> str:
        """The base URI inside the schema at `pointer`, whose parent's is `inherited`."""
        return self._bases.get(pointer, inherited)

    def _descend(self, start: Target, path: str, reference: str, where: str) -> Target:
        node, pointer, base = start.schema, start.pointer, start.base
        for part in path.split("/")[1:]:
            step = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and step in node:
                node = node[step]
            elif isinstance(node, list) and step.isascii() and step.isdecimal() and int(step[:9]) < len(node):
                node = node[int(step)]
            else:
                message = f"{where}: $ref {reference[:200]!r}: there is nothing at {step[:200]!r}"
                raise ValidationError(message, parameter=where, value=reference[:200])
            pointer = f"{pointer}/{part}"
            base = self.base_at(pointer, base)
        return Target(node, base, pointer)

    def _index(self, root: Any) -> str:
        """Notes every `$id` and anchor at a place where a schema is."""
        first = ""
        pending = [(root, "", "")]
        while pending:
            node, pointer, base = pending.pop()
            if not isinstance(node, Mapping):
                if pointer == "":
                    self._resources[""] = Target(node, "", "")
                continue
            base = self._note(node, pointer, base)
            first = first if pointer else base
            pending += [(child, f"{pointer}/{step}", base) for step, child in subschemas(node)]
        return first

    def _note(self, node: Mapping[str, Any], pointer: str, base: str) -> str:
        name = node.get("$id", node.get("id"))
        if isinstance(name, str) and not name.startswith("#"):
            base = urldefrag(urljoin(base, name))[0]
            self._bases[pointer] = base
            self._resources[base] = Target(node, base, pointer)
        elif isinstance(name, str):
            self._anchors[base, name[1:]] = Target(node, base, pointer)
        if not pointer:
            self._resources.setdefault(base, Target(node, base, pointer))
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(keyword), str):
                self._anchors[base, node[keyword]] = Target(node, base, pointer)
        return base


def subschemas(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, each with its JSON pointer from there."""
    for keyword in ONE_SCHEMA:
        if isinstance(node.get(keyword), Mapping):
            yield keyword, node[keyword]
    for keyword in MANY_SCHEMAS:
        if isinstance(node.get(keyword), list):
            yield from ((f"{keyword}/{at}", child) for at, child in enumerate(node[keyword]))
    for keyword in NAMED_SCHEMAS:
        if isinstance(node.get(keyword), Mapping):
            yield from ((f"{keyword}/{escaped(name)}", child) for name, child in node[keyword].items())


def escaped(name: str) -> str:
    """A property's name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
