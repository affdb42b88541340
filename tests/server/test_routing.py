"""Finding routes: path values, precedence, methods; and queries as typed records."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlencode

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.errors import ValidationError
from samovar.server.exchange import Exchange
from samovar.server.problems import RequestError
from samovar.server.query import read_query
from samovar.server.routes import PRIVATE_ROUTES, ROUTES
from samovar.server.routing import Route, Router, WrongMethodError


def _route(path: str, method: str = "GET", *, takes_rest: bool = False) -> Route:
    return Route(path=path, method=method, summary=f"{method} {path}", takes_rest=takes_rest)


ROUTER = Router(
    [
        _route("/a"), _route("/a/{id}"), _route("/a/{id}", "DELETE"), _route("/a/{id}/cancel", "POST"), _route("/a/fixed"),
        _route("/a/{id}/b/{name}"), _route("/m/{model}", takes_rest=True), _route("/odd.{id}+"),
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "found", "values"),
    [
        ("GET", "/a", "/a", {}),
        ("HEAD", "/a", "/a", {}),
        ("GET", "/a/x", "/a/{id}", {"id": "x"}),
        ("DELETE", "/a/x", "/a/{id}", {"id": "x"}),
        ("GET", "/a/fixed", "/a/fixed", {}),
        ("GET", "/a/fixed ", "/a/{id}", {"id": "fixed "}),
        ("POST", "/a/x/cancel", "/a/{id}/cancel", {"id": "x"}),
        ("GET", "/a/x\n/b/\0", "/a/{id}/b/{name}", {"id": "x\n", "name": "\0"}),
        ("GET", "/m/org/name", "/m/{model}", {"model": "org/name"}),
        ("GET", "/m//", "/m/{model}", {"model": "/"}),
        ("GET", "/m/a\nb", "/m/{model}", {"model": "a\nb"}),
        ("GET", "/odd.x+", "/odd.{id}+", {"id": "x"}),
    ],
)
def test_found(method: str, path: str, found: str, values: dict[str, str]) -> None:
    """A fixed path wins; a value is one segment that is not empty, or all that follows."""
    route, taken = ROUTER.find(method, path)
    assert route.path == found and taken == values


@pytest.mark.parametrize(
    "path",
    ["", "/", "/a/", "/a//cancel", "/a/x/", "/a/x/y", "/m", "/m/", "/oddxx+", "/odd.+", "/A", "a", "/a/x/cancel\n"],
)
def test_not_found(path: str) -> None:
    """Nothing is matched nearly."""
    with pytest.raises(RequestError) as caught:
        ROUTER.find("GET", path)
    assert caught.value.status == 404


def test_methods() -> None:
    """A path with other methods says which; the same route twice is our own mistake."""
    with pytest.raises(WrongMethodError) as caught:
        ROUTER.find("PUT", "/a/x")
    assert caught.value.status == 405 and caught.value.allowed == "DELETE, GET"
    with pytest.raises(ValueError, match="two routes"):
        Router([_route("/x"), _route("/x")])


@given(st.text(min_size=1).filter(lambda text: "/" not in text))
def test_any_segment_is_a_value(text: str) -> None:
    """Whatever a client calls a thing, it gets back what it sent, or the route of exactly that path."""
    route, values = ROUTER.find("GET", f"/a/{text}")
    assert values == ({} if text == "fixed" else {"id": text}) and route.path in ("/a/fixed", "/a/{id}")
    assert ROUTER.find("GET", f"/m/{text}/{text}")[1] == {"model": f"{text}/{text}"}


def test_the_table() -> None:
    """Every route does something, and the second listener has no route that the first one lacks."""
    Router(ROUTES)
    for route in ROUTES:
        assert (route.call is None) != (route.look is None), route.path
        assert (route.body is None) == (route.call is None), route.path
    assert set(PRIVATE_ROUTES) < set(ROUTES)


class Query(msgspec.Struct):
    """A query."""

    level: Annotated[int, msgspec.Meta(ge=0, le=2)] = 1
    on: bool = False
    mode: Literal["a", "b"] = "a"
    tags: list[str] = msgspec.field(default_factory=list)
    text: str = ""


def _read(query: str) -> Query:
    scope = {"type": "http", "headers": [], "query_string": query.encode()}
    return read_query(Exchange(scope, None, None), Query)  # type: ignore[arg-type]


@given(
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from("ab"),
    st.lists(st.text(max_size=5), max_size=5),
    st.text(max_size=20),
)
def test_queries(level: int, on: bool, mode: Literal["a", "b"], tags: list[str], text: str) -> None:
    """What is written is read; lists are repeated fields."""
    pairs = [
        ("level", str(level)),
        ("on", str(on).lower()),
        ("mode", mode),
        *(("tags", tag) for tag in tags),
        ("text", text),
    ]
    assert _read(urlencode(pairs)) == Query(level, on, mode, tags, text)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("level=3", "level"), ("level=", "level"), ("level=x", "level"), ("on=maybe", "on"), ("mode=c", "mode"),
        ("levle=1", "levle"), ("level=1&level=2", "level"), ("level", None), ("text=%ff", None), ("&".join(["tags=x"] * 65), None),
    ],
)  # fmt: skip
def test_wrong_queries(query: str, named: str | None) -> None:
    """Refused, with the field's name where there is one."""
    with pytest.raises(ValidationError) as caught:
        _read(query)
    assert caught.value.parameter == named
    assert _read("") == Query()
