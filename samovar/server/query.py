"""The query of a URL -> one typed record, or a 400 that names the field."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar, get_args, get_origin
from urllib.parse import parse_qsl

import msgspec

from samovar.errors import ValidationError
from samovar.server.allowed import must_be
from samovar.server.exchange import Exchange

T = TypeVar("T", bound=msgspec.Struct)

MAX_FIELDS = 64


def read_query(exchange: Exchange, kind: type[T]) -> T:
    """Check the query against `kind`; raises `ValidationError`. Lists are given by repeating their field.

    Unlike in a body, a field that is not known is refused: a misspelt option must not be taken for the default.
    """
    try:
        text = exchange.scope.get("query_string", b"").decode("ascii")
        pairs = parse_qsl(
            text, keep_blank_values=True, strict_parsing=bool(text), errors="strict", max_num_fields=MAX_FIELDS
        )
    except ValueError as error:
        raise ValidationError(f"the query is not valid: {error}; write name=value&name=value") from None
    lists = {f.encode_name: _is_list(f.type) for f in msgspec.structs.fields(kind)}
    values: dict[str, str | list[str]] = {}
    for name, value in pairs:
        if name not in lists:
            known = ", ".join(lists) or "no fields"
            raise ValidationError(f"{name[:64]}: is no field of this query; it takes {known}", parameter=name[:64])
        if lists[name]:
            found = values.setdefault(name, [])
            assert isinstance(found, list)
            found.append(value)
        elif name in values:
            raise ValidationError(f"{name}: is given twice; give it once", parameter=name)
        else:
            values[name] = value
    for name, value in values.items():
        try:
            # One field at a time, so that the message can name it.
            msgspec.convert({name: value}, type=kind, strict=False)
        except msgspec.ValidationError as error:
            rule = str(error).partition(" - at ")[0]
            if not rule.startswith("Object missing required field"):
                told = must_be(rule, kind, f"{name}[...]" if lists[name] else name)
                got = f", got {str(value)[:100]!r}" if told == rule else ""
                raise ValidationError(f"{name}: {told}{got}", parameter=name) from None
    try:
        return msgspec.convert(values, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValidationError(f"the query is not complete: {error}") from None


def _is_list(kind: Any) -> bool:
    return get_origin(get_args(kind)[0] if get_origin(kind) is Annotated else kind) is list
