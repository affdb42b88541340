"""Body bytes -> one typed request record, or a 400 that names the field.

Order: UTF-8, JSON object, fields of capabilities this build refuses, types and ranges. Nothing here knows the model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from samovar.core.once import Once
from samovar.errors import ValidationError
from samovar.server.allowed import must_be
from samovar.server.refusal import Refusal

T = TypeVar("T", bound=msgspec.Struct)

_once = Once(logging.getLogger(__name__))
_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])
_location = re.compile(r"^(?P<rule>.*?)(?: - at (?:`key` in )?`(?:key in )?\$(?P<path>[^`]*)`)?$", re.DOTALL)
_missing = re.compile(r"^Object missing required field `(?P<field>[^`]+)`")


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
        raise _explain(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise ValidationError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise ValidationError("the body is nested too deeply") from None
    for name in fields.keys() - refusals.keys() - set(kind.__struct_fields__):
        _once.warn(f"request field {name[:64]!r} is unknown and ignored")
    return record


def _explain(text: str, kind: type[msgspec.Struct]) -> ValidationError:
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
    return ValidationError(f"{parameter}: {must_be(rule, kind, parameter)}", parameter=parameter)
