"""Body bytes -> one typed request record, or a 400 that names the field.

Order: UTF-8, JSON object, fields of capabilities this build refuses, types and ranges. Nothing here knows the model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from samovar.errors import ValidationError
from samovar.server.openai.refusals import Refusal

T = TypeVar("T", bound=msgspec.Struct)

_logger = logging.getLogger(__name__)
_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])
_location = re.compile(r"^(?P<rule>.*?)(?: - at `(?:key in )?\$(?P<path>[^`]*)`)?$", re.DOTALL)
_missing = re.compile(r"^Object missing required field `(?P<field>[^`]+)`")

MAX_REMEMBERED_FIELDS = 256
_seen_unknown: set[str] = set()


def decode_body(body: bytes, kind: type[T], refusals: Mapping[str, Refusal]) -> T:
    """Check `body` against `kind`; raises `ValidationError`. Unknown fields are accepted and logged once by name."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValidationError(f"the body is not valid UTF-8 (byte {error.start}); encode it as UTF-8") from None
    try:
        fields = _top_level.decode(body)
        for name in fields.keys() & refusals.keys():
            refusals[name].check(name, msgspec.json.decode(fields[name]), fields)
        record = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except msgspec.DecodeError as error:
        raise ValidationError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise ValidationError("the body is nested too deeply") from None
    _note_unknown(fields.keys() - refusals.keys() - set(kind.__struct_fields__))
    return record


def _explain(text: str) -> ValidationError:
    """msgspec's "rule - at `$.field`" -> our error with the field as `parameter`."""
    match = _location.match(text)
    rule, path = (match["rule"], match["path"]) if match else (text, None)
    parameter = path.lstrip(".") if path else None
    missing = _missing.match(rule)
    if missing is not None:
        parameter = f"{parameter}.{missing['field']}" if parameter else missing["field"]
        return ValidationError(f"{parameter} is required", parameter=parameter)
    if parameter is None:
        return ValidationError(f"the body must be a JSON object: {rule}")
    return ValidationError(f"{parameter}: {rule}", parameter=parameter)


def _note_unknown(names: set[str]) -> None:
    for name in names:
        if name not in _seen_unknown and len(_seen_unknown) < MAX_REMEMBERED_FIELDS:
            _seen_unknown.add(name)
            _logger.warning("request field %r is unknown and ignored (said once)", name[:64])
