"""Route: one endpoint, said once. Router: method and path -> the endpoint and the values in its path."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from types import UnionType
from typing import Any

from samovar.server.exchange import Exchange
from samovar.server.problems import RequestError
from samovar.server.state import ServingState

TEXT = "text/plain"
HTML = "text/html"
JSON = "application/json"

Look = Callable[[ServingState, Exchange], Awaitable[None]]
Call = Callable[[ServingState, Exchange, bytes], Coroutine[Any, Any, None]]

_PARAMETER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path and method. `call` takes a JSON body of type `body`; `look` takes none. `chunk` is what a stream holds.

    "{name}" in the path stands for one segment that is not empty, found in `scope["path_params"]`; with `takes_rest` the
    last one stands for all that follows, slashes included. `query` has the query's fields. `is_admin` closes the route
    to everybody but operators (`server.auth`).
    """

    path: str
    summary: str
    method: str = "GET"
    look: Look | None = None
    call: Call | None = None
    body: type[Any] | None = None
    query: type[Any] | None = None
    answer: type[Any] | str = JSON
    chunk: type[Any] | UnionType | None = None
    is_doc: bool = False
    is_admin: bool = False
    takes_rest: bool = False

    @property
    def parameters(self) -> list[str]:
        """Names of the values in the path."""
        return _PARAMETER.findall(self.path)


class WrongMethodError(RequestError):
    """The path exists and takes only `allowed`."""

    def __init__(self, allowed: str) -> None:
        super().__init__(405, "MethodNotAllowedError", f"this path takes {allowed}")
        self.allowed = allowed


class Router:
    """Finds routes. A path without parameters goes before one with them, a longer pattern before a shorter one."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._plain: dict[str, dict[str, Route]] = {}
        patterns: dict[str, dict[str, Route]] = {}
        for route in routes:
            table = patterns if route.parameters else self._plain
            methods = table.setdefault(route.path, {})
            if route.method in methods:
                raise ValueError(f"{route.method} {route.path} has two routes")
            methods[route.method] = route
        ordered = sorted(patterns.items(), key=lambda item: -len(_PARAMETER.sub("", item[0])))
        self._patterns = [(_compile(path, methods), methods) for path, methods in ordered]

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """The route and its path's values. Raises `RequestError` for no such path, `WrongMethodError`."""
        methods, values = self._plain.get(path), dict[str, str]()
        if methods is None:
            for pattern, candidates in self._patterns:
                if (match := pattern.fullmatch(path)) is not None:
                    methods, values = candidates, match.groupdict()
                    break
            else:
                raise RequestError(404, "NotFoundError", "no such path; see /docs")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            raise WrongMethodError(", ".join(sorted(methods)))
        return route, values


def _compile(path: str, methods: dict[str, Route]) -> re.Pattern[str]:
    """The pattern of a path with parameters."""
    takes_rest = any(route.takes_rest for route in methods.values())
    parts = _PARAMETER.split(path)  # text, name, text, name, ..., text
    last = len(parts) - 2
    pieces = []
    for at, part in enumerate(parts):
        if at % 2 == 0:
            pieces.append(re.escape(part))
        else:
            pieces.append(f"(?P<{part}>{'.+' if takes_rest and at == last else '[^/]+'})")
    return re.compile("".join(pieces), re.DOTALL)
