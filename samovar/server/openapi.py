"""/openapi.json and /docs, made from the route table and the very types that check bodies: true by construction."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec

from samovar.server.error_shapes import error_type_for
from samovar.server.schema_words import REFERENCE, in_words
from samovar.server.version import version

if TYPE_CHECKING:
    from samovar.server.routing import Route

_ABOUT = (
    "Unknown fields of a body are ignored, with one warning in the server's log. Fields of capabilities that this server does not have are "
    "refused with 400 unless they ask for nothing. Null means absent. Streams are server-sent events ended by [DONE]."
)
_ERRORS = {
    "400": "The request is wrong; error.param names the field.",
    "401": "No valid key.",
    "404": "No such model or route.",
    "405": "The path takes another method.",
    "410": "An operator ended the request.",
    "413": "The body is too large.",
    "500": "Our fault.",
    "503": "Loading, asleep, paused, overloaded, shutting down, or without a living engine: retry later.",
}
_ADMIN_ERRORS = {
    "403": "The caller is no operator, or admin routes are closed here.",
    "409": "What is asked for does not fit what runs already.",
}


def describe(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document as plain values."""
    refs, components = _components(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Samovar", "version": version(), "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _components(routes: Sequence[Route]) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
    """Type -> how to refer to it; and every named object. Objects of one name in two modules get longer names."""
    types = {t for r in routes for t in (r.body, r.answer, r.chunk, error_type_for(r.path)) if not isinstance(t, str)}
    ordered = sorted(types - {None}, key=str)
    refs, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    return dict(zip(ordered, refs, strict=True)), components


def _operation(route: Route, refs: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(route.answer, str):
        content[route.answer] = {"schema": {"type": "object" if route.answer == "application/json" else "string"}}
    else:
        content["application/json"] = {"schema": refs[route.answer]}
    if route.chunk is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-chunk": refs[route.chunk]}
    error = {"application/json": {"schema": refs[error_type_for(route.path)]}}
    answers: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    errors = _ERRORS | (_ADMIN_ERRORS if route.is_admin else {})
    answers |= {code: {"description": text, "content": error} for code, text in errors.items()}
    if route.path == "/ready":
        answers["503"] = {"description": "Not now.", "content": content}
    if route.path == "/":
        answers["307"] = {"description": "The page is at /docs."}
    operation: dict[str, Any] = {"summary": route.summary, "responses": answers}
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": refs[route.body]}}}
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    """What is in the path and in the query."""
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.parameters
    ]
    if route.query is not None:
        fields = _described(route.query)
        for name, schema in fields["properties"].items():
            found.append(
                {"name": name, "in": "query", "required": name in fields.get("required", ()), "schema": schema}
            )
    return found


def _described(kind: type[Any]) -> dict[str, Any]:
    """The schema of one object whose fields are plain."""
    (_,), described = msgspec.json.schema_components([kind])
    schema: dict[str, Any] = described[kind.__name__]
    return schema


def document(routes: Sequence[Route]) -> bytes:
    """The OpenAPI document as JSON."""
    return msgspec.json.encode(describe(routes))


def page(routes: Sequence[Route]) -> bytes:
    """The same for people: one page without scripts or outside resources."""
    described = describe(routes)
    schemas = described["components"]["schemas"]
    refs, _ = _components(routes)
    bodies = {
        r.body: REFERENCE.findall(msgspec.json.encode(refs[r.body]).decode()) for r in routes if r.body is not None
    }
    parts = [
        "<!doctype html><meta charset=utf-8><title>Samovar API</title>",
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}",
        "td{padding:.15em .8em .15em 0;vertical-align:top}code{font-size:13px}</style>",
        f"<h1>Samovar {escape(described['info']['version'])}</h1><p>{escape(_ABOUT)}</p>",
        '<p>The same for programs: <a href="openapi.json">openapi.json</a></p>',
    ]
    for route in routes:
        parts.append(f"<h3><code>{route.method} {escape(route.path)}</code></h3><p>{escape(route.summary)}</p>")
        if route.query is not None:
            parts.append(_fields(_described(route.query)))
        if route.body is not None:
            parts += [_fields(schemas[name]) for name in bodies[route.body]]
    parts.append("<h2>Objects</h2>")
    for name in _named_by([name for names in bodies.values() for name in names], schemas):
        about = escape(schemas[name].get("description", ""))
        parts.append(f"<h3 id={name}><code>{name}</code></h3><p>{about}</p>{_fields(schemas[name])}")
    return "".join(parts).encode()


def _named_by(names: list[str], schemas: dict[str, Any]) -> list[str]:
    """The objects that fields of these objects hold, and those that those hold, each once."""
    found: list[str] = []
    for name in (waiting := list(names)):
        for other in REFERENCE.findall(msgspec.json.encode(schemas[name]).decode()):
            if other not in found:
                found.append(other)
                waiting.append(other)
    return found


def _fields(schema: dict[str, Any]) -> str:
    rows = []
    for name, field in schema.get("properties", {}).items():
        needed = " (required)" if name in schema.get("required", ()) else ""
        rows.append(f"<tr><td><code>{escape(name)}</code>{needed}<td>{escape(in_words(field))}")
    return f"<table>{''.join(rows)}</table>"
