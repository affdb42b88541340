"""The many fields by which clients ask for a form of the answer -> one `StructuredOutputsParams`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from samovar.core.structured import StructuredOutputsParams
from samovar.errors import ValidationError
from samovar.server.openai.schema import GenerateFields, ResponseFormat, StructuredOutputs


class Wanted(NamedTuple):
    """The form an answer must have. `spelling`: our names in refusals -> the fields that asked for it."""

    params: StructuredOutputsParams
    spelling: dict[str, str]


def structured_of(asked: GenerateFields) -> Wanted | None:
    """What the answer must look like; None: anything. Raises `ValidationError`, also if two fields say it."""
    found = [(name, made) for name, make in _READERS.items() if (made := make(asked)) is not None]
    if len(found) > 1:
        message = f"{found[1][0]}: the form of the answer is asked for by {found[0][0]} already; send one of them"
        raise ValidationError(message, parameter=found[1][0])
    if not found:
        if asked.guided_whitespace_pattern is not None:
            message = "guided_whitespace_pattern needs guided_json, or another field that asks for JSON"
            raise ValidationError(message, parameter="guided_whitespace_pattern")
        return None
    name, values = found[0]
    if asked.guided_whitespace_pattern is not None:
        values.setdefault("whitespace_pattern", asked.guided_whitespace_pattern)
    try:
        return Wanted(StructuredOutputsParams(**values), _spelling(asked, name, values))
    except ValidationError as error:
        message = str(error)
        if message.startswith("structured_outputs"):
            message = name + message.removeprefix("structured_outputs")
        raise ValidationError(message, parameter=name, value=error.value) from None


def _spelling(asked: GenerateFields, field: str, values: dict[str, Any]) -> dict[str, str]:
    if field == "structured_outputs":
        return {}
    places = dict.fromkeys((f"structured_outputs.{name}" for name in values), field)
    if field == "response_format" and asked.response_format is not None:
        within = "schema" if asked.response_format.json_schema is None else "json_schema.schema"
        places["structured_outputs.json"] = f"{field}.{within}"
    return {"structured_outputs": field} | places


def _response_format(asked: GenerateFields) -> dict[str, Any] | None:
    return None if asked.response_format is None else read_response_format(asked.response_format)


def read_response_format(wanted: ResponseFormat, *, parameter: str = "response_format") -> dict[str, Any] | None:
    """Arguments of `StructuredOutputsParams`; None for text. Raises `ValidationError`."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True} if wanted.schema is None else {"json": wanted.schema}
    if wanted.type == "json_schema":
        inner = wanted.json_schema
        schema = wanted.schema if inner is None else inner.schema
        if schema is None:
            message = f"{parameter}.json_schema.schema is required with type json_schema"
            raise ValidationError(message, parameter=f"{parameter}.json_schema.schema")
        return {"json": schema}
    if wanted.format is None and wanted.structures is None:
        message = f"{parameter}: type structural_tag needs a format, or structures and triggers"
        raise ValidationError(message, parameter=parameter)
    said = {"type": wanted.type, "format": wanted.format, "structures": wanted.structures, "triggers": wanted.triggers}
    return {"structural_tag": {name: value for name, value in said.items() if value is not None}}


def _structured_outputs(asked: GenerateFields) -> dict[str, Any] | None:
    return None if asked.structured_outputs is None else given_values(asked.structured_outputs)


def given_values(wanted: StructuredOutputs) -> dict[str, Any]:
    """Arguments of `StructuredOutputsParams`: only what was sent; "disable_fallback" asks for nothing, because nothing ever falls back."""
    values: dict[str, Any] = msgspec.structs.asdict(wanted)
    del values["disable_fallback"]
    return {name: value for name, value in values.items() if value is not None}


def _as(name: str, field: str) -> Callable[[GenerateFields], dict[str, Any] | None]:
    def read(asked: GenerateFields) -> dict[str, Any] | None:
        value = getattr(asked, field)
        return None if value is None else {name: value}

    return read


_READERS: dict[str, Callable[[GenerateFields], dict[str, Any] | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _as("json", "guided_json"),
    "guided_regex": _as("regex", "guided_regex"),
    "guided_choice": _as("choice", "guided_choice"),
    "guided_grammar": _as("grammar", "guided_grammar"),
    "grammar": _as("grammar", "grammar"),
    "json_schema": _as("json", "json_schema"),
}
"""Field -> the arguments of `StructuredOutputsParams` that it stands for; None if it asks for nothing."""
