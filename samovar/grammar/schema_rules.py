"""Every keyword of JSON Schema: enforced, without effect on what is valid, or refused. There is nothing in between."""

from __future__ import annotations

from typing import Final

ANNOTATIONS: Final = frozenset(
    {
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
        "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$defs", "definitions",
        "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml",
        "markdownDescription", "enumNames", "enumDescriptions", "markdownEnumDescriptions", "propertyOrdering",
        "defaultSnippets", "errorMessage", "patternErrorMessage", "deprecationMessage", "doNotSuggest",
        "suggestSortText", "allowComments", "allowTrailingCommas",
    }
)  # fmt: skip
"""Keywords that say nothing about what is valid, by the specifications of JSON Schema and of OpenAPI and by custom.

Names that begin with `x-` are annotations, too.
"""

ENFORCED: Final = frozenset(
    {
        "type", "enum", "const", "allOf", "anyOf", "oneOf", "$ref",
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
        "propertyNames", "unevaluatedProperties",
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems",
        "minLength", "maxLength", "pattern", "format",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    }
)  # fmt: skip
"""Keywords that are enforced, some only in part: the rest of their uses is refused."""

REFUSED: Final = {
    "not": "say what is allowed instead",
    "if": "write the cases as anyOf",
    "then": "write the cases as anyOf",
    "else": "write the cases as anyOf",
    "contains": "describe the items with items or prefixItems",
    "minContains": "describe the items with items or prefixItems",
    "maxContains": "describe the items with items or prefixItems",
    "dependentRequired": "write the cases as anyOf",
    "dependentSchemas": "write the cases as anyOf",
    "dependencies": "write the cases as anyOf",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "$recursiveAnchor": "use $ref",
    "$vocabulary": "leave it out",
    "nullable": 'add "null" to the type',
    "extends": "use allOf",
    "disallow": "say what is allowed instead",
    "divisibleBy": "use multipleOf",
}
"""Keywords that cannot be enforced while text is made from left to right -> what to do instead."""

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:[.][0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

FORMAT_PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
"""Formats enforced by patterns of our own: real days, no leap seconds (llguidance would allow both on any day)."""

STRING_FORMATS: Final = frozenset({*FORMAT_PATTERNS, "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats of strings that are enforced. Any other one that could apply to a string is refused."""

HINTS: Final = frozenset({"password", "textarea", "markdown", "html", "multiline"})
"""Formats that only say how to show a string."""

INTEGER_FORMATS: Final = {
    "int8": (-(2**7), 2**7 - 1),
    "uint8": (0, 2**8 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "uint16": (0, 2**16 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint32": (0, 2**32 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint64": (0, 2**63 - 1),
}
"""Formats of integers -> the bounds they are enforced as. llguidance counts in 64 bits with a sign."""
