"""StructuredOutputsParams: what an answer must look like. vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from samovar.errors import ValidationError

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of which exactly one is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of: a JSON Schema (object or text), a regex, a list of choices, a grammar (EBNF or Lark), any JSON
    object, or structural tags. Raises `ValidationError` naming the field for anything else.

    `disable_any_whitespace` leaves no blanks between JSON tokens; `disable_additional_properties` treats objects that do
    not say otherwise as closed; `whitespace_pattern` is the regex of what may stand between JSON tokens.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            message = f"structured_outputs: give exactly one of {', '.join(KINDS)}; got {found}"
            raise ValidationError(message, parameter="structured_outputs", value=given)
        if self.json_object is False:
            message = "structured_outputs.json_object may only be true"
            raise ValidationError(message, parameter="structured_outputs", value=False)
        choices = self.choice
        if choices is not None and not (
            isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)
        ):
            message = "structured_outputs.choice must be a non-empty list of non-empty strings"
            raise ValidationError(message, parameter="structured_outputs", value=choices)

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)
