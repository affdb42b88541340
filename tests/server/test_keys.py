"""Keys and their owners: the keys file, salts and priorities, and which routes an operator has for himself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from samovar.config.groups import SchedulerConfig, ServerConfig
from samovar.errors import ConfigError, ValidationError
from samovar.server.keys import CALLER, KeyRing, caller_of, routing_of
from samovar.server.routes import PRIVATE_ROUTES, ROUTES
from samovar.server.routing import Route
from samovar.text.prepare import Preparer
from tests.server.live import LiveServer, live_server
from tests.server.scripted_engine import ScriptedEngine, engine_facts, saying
from tests.server.wire import CHAT, HELLO, error_of, raw_request

OPEN = {"/health", "/ready", "/ping"}
ADMIN = [route for route in ROUTES if route.is_admin]
KEYS = f"""
- name: alice
  key: ka
  priority: -5
  salt: own
- name: bob
  key: kb
- name: carol
  sha256: {hashlib.sha256(b"kc").hexdigest()}
  trusted: true
  salt: shared
"""


def _path(route: Route) -> str:
    return re.sub(r"{\w+}", "tiny", route.path)


def _file(folder: Path, text: str) -> str:
    path = folder / "keys.yaml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def _scope(ring: KeyRing, key: str, **headers: str) -> dict[str, Any]:
    pairs = [
        (b"authorization", f"Bearer {key}".encode()),
        *((k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()),
    ]
    scope: dict[str, Any] = {"type": "http", "headers": pairs}
    return scope | {CALLER: ring.find(scope)}


def test_the_keys_file(tmp_path: Path) -> None:
    """H12: what a key gives its owner: a name, a priority, a salt of its own, trust."""
    ring = KeyRing.load(ServerConfig(api_key=["plain"], api_keys_file=_file(tmp_path, KEYS)))
    alice, bob, carol, plain = (caller_of(_scope(ring, key)) for key in ("ka", "kb", "kc", "plain"))
    assert (alice.name, alice.priority, alice.is_trusted, alice.is_admin) == ("alice", -5, False, False)
    assert (bob.priority, bob.salt, bob.is_trusted) == (None, None, False)
    assert carol.is_trusted and carol.salt is None and plain.is_trusted and plain.salt is None
    assert ring.find(_scope(ring, "nobody")) is None
    ring.check(SchedulerConfig(scheduling_policy="priority"))
    with pytest.raises(ConfigError, match="alice has a priority.*--scheduling-policy priority"):
        ring.check(SchedulerConfig())


def test_salts(tmp_path: Path) -> None:
    """H11: own salts differ by key, cannot be computed from what clients see, and divide further by the client's salt."""
    ring = KeyRing.load(ServerConfig(api_key=["p", "q"], api_keys_file=_file(tmp_path, KEYS), salt_by_key=True))
    scopes = [_scope(ring, key) for key in ("p", "q", "ka", "kb")]
    salts = [routing_of(scope)["cache_salt"] for scope in scopes]
    salts += [routing_of(scope, cache_salt=salt)["cache_salt"] for scope in scopes for salt in ("x", salts[0])]
    assert len(set(salts)) == 12 and all(1 <= len(salt) <= 1024 for salt in salts)
    assert routing_of(_scope(ring, "kc"))["cache_salt"] is None  # "shared" in the file goes before the flag
    assert routing_of(_scope(ring, "kc"), cache_salt="x")["cache_salt"] == "x"
    assert (
        routing_of(scopes[0], cache_salt="y" * 2000)["cache_salt"] == "y" * 2000
    )  # too long, for the check that says so


@pytest.mark.parametrize(
    ("key", "body", "header", "expected"),
    [
        ("ka", None, None, -5), ("ka", -5, None, -5), ("ka", 0, None, "priority"), ("ka", None, "-6", "x-vllm-priority"),
        ("kb", None, None, 0), ("kb", 0, "7", 0), ("kb", -1, None, "priority"), ("kb", None, "1", "x-vllm-priority"),
        ("kc", 4, None, 4), ("kc", None, "4", 4), ("kc", 3, "4", 3), ("kc", None, " -4 ", -4), ("plain", None, "4", 4),
        ("kc", None, "4.0", "x-vllm-priority"), ("kc", None, "", "x-vllm-priority"), ("kc", None, "9" * 30, "x-vllm-priority"),
        ("kc", None, "٣", "x-vllm-priority"), ("kc", None, "--4", "x-vllm-priority"),
    ],
)  # fmt: skip
def test_priorities(tmp_path: Path, key: str, body: int | None, header: str | None, expected: int | str) -> None:
    """H12: only a trusted key chooses; what another one asks for is refused by name, never dropped."""
    ring = KeyRing.load(ServerConfig(api_key=["plain"], api_keys_file=_file(tmp_path, KEYS)))
    scope = _scope(ring, key, **({} if header is None else {"x_vllm_priority": header}))
    if isinstance(expected, int):
        assert routing_of(scope, priority=body)["priority"] == expected
    else:
        with pytest.raises(ValidationError) as caught:
            routing_of(scope, priority=body)
        assert caught.value.parameter == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "a: b", "[]", "- 1", "- {name: x}", "- {name: x, key: ''}", "- {name: x, key: a, sha256: %s}" % ("0" * 64),
        "- {name: x, sha256: zz}", "- {name: x, key: a, admin: true}", "- {name: x, key: a, salt: mine}",
        "- {name: x, key: a, priority: 1.5}", "- {name: '', key: a}", "- {name: x, key: ' a'}", "- {name: x, key: 5}",
        "- {name: x, key: a}\n- {name: x, key: b}", "- {name: x, key: a}\n- {name: y, key: a}", "{", "- {name: x, key: root}",
    ],
)  # fmt: skip
def test_wrong_files(tmp_path: Path, text: str) -> None:
    """A file that is not plain is refused when the server starts, without showing a key."""
    secret = text.replace("key: a", "key: hush-hush") if "key: a}" in text else text
    with pytest.raises(ConfigError) as caught:
        KeyRing.load(ServerConfig(admin_api_key=["root"], api_keys_file=_file(tmp_path, secret)))
    assert "hush" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing.load(ServerConfig(api_keys_file=str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("name", "flags"), [("admin", {"admin_api_key": ["boss"]}), ("key-1", {"api_key": ["p0", "p1"]})]
)
def test_names_of_the_command_line_are_taken(tmp_path: Path, name: str, flags: dict[str, Any]) -> None:
    """Stored answers belong to a name: a user called like the operator would read the operator's."""
    file = _file(tmp_path, f"- name: {name}\n  key: x\n")
    with pytest.raises(ConfigError, match=f"{name}.*choose another"):
        KeyRing.load(ServerConfig(api_keys_file=file, **flags))
    KeyRing.load(ServerConfig(api_keys_file=file))


def test_a_readable_file_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys that other users can read are worth a warning."""
    path = _file(tmp_path, "- {name: x, key: a}")
    KeyRing.load(ServerConfig(api_keys_file=path))
    assert not caplog.records
    Path(path).chmod(0o644)
    KeyRing.load(ServerConfig(api_keys_file=path))
    assert "chmod 600" in caplog.text


# --- over HTTP


@contextmanager
def _serving(preparer: Preparer, **settings: Any) -> Iterator[LiveServer]:
    def make() -> ScriptedEngine:
        return ScriptedEngine(saying("abc"), info=engine_facts(scheduling_policy="priority"))

    with live_server(make, preparer, ServerConfig(port=0, **settings)) as running:
        yield running


def _statuses(server: LiveServer, key: str | None, routes: list[Route] = ADMIN) -> dict[tuple[str, str], int]:
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    with httpx.Client(base_url=server.url, headers=headers, verify=False, timeout=30) as http:
        return {(r.method, r.path): http.request(r.method, _path(r)).status_code for r in routes}


def test_nothing_without_a_key(preparer: Preparer) -> None:
    """H1: with a user key configured, a sweep of the whole table finds the probes open and nothing else."""
    with _serving(preparer, api_key=["user"], admin_api_key=["root"]) as server:
        for key in (None, "wrong", "käse"):
            statuses = _statuses(server, key, list(ROUTES))
            assert {path for (_, path), status in statuses.items() if status != 401} == OPEN
        assert server.engine.calls == [] and server.engine.requests == []


def test_a_user_is_no_operator(preparer: Preparer) -> None:
    """H2: admin routes answer 403 to a user's key, and serve an admin key, which opens everything else as well."""
    with _serving(preparer, api_key=["user"], admin_api_key=["root"]) as server:
        assert set(_statuses(server, "user").values()) == {403}
        assert server.engine.calls == []
        assert not {401, 403, 404} & set(_statuses(server, "root", list(ROUTES)).values()) - {404}
        assert httpx.post(server.url + CHAT, json={"messages": HELLO}, headers={"x-api-key": "root"}).status_code == 200
        assert {name for name, _ in server.engine.calls} >= {"sleep", "wake_up", "pause", "resume"}


def test_an_admin_key_alone(preparer: Preparer) -> None:
    """With only an admin key the API is open, and the admin routes are not."""
    with _serving(preparer, admin_api_key=["root"]) as server:
        assert httpx.post(server.url + CHAT, json={"messages": HELLO}).status_code == 200
        for key in (None, "wrong"):
            assert set(_statuses(server, key).values()) == {401}
        assert httpx.get(server.url + "/is_paused", headers={"x-api-key": "root"}).status_code == 200


def test_closed_without_an_admin_key(preparer: Preparer) -> None:
    """Without an admin key the public port never serves an admin route, and says how to get there."""
    for settings in ({}, {"api_key": ["user"]}, {"admin_port": 0}):
        with _serving(preparer, **settings) as server:
            assert set(_statuses(server, "user").values()) == {403}
            answer = httpx.post(server.url + "/sleep", headers={"x-api-key": "user"})
            assert "--admin-api-key" in error_of(answer)["message"] and "--admin-port" in error_of(answer)["message"]
            assert server.engine.calls == []


def test_the_table_of_the_second_listener() -> None:
    """It has the admin routes and the probes, and no generation."""
    paths = {route.path for route in PRIVATE_ROUTES}
    assert {route.path for route in ADMIN} | OPEN | {"/metrics", "/version", "/load"} == paths


def test_errors_in_the_shape_of_the_path(preparer: Preparer) -> None:
    """What is refused before any endpoint runs has the body that the path's clients read."""
    with _serving(preparer, api_key=["user"], max_body_bytes=2000) as server:
        known = {"x-api-key": "user"}
        for path, shape in (("/v1/messages", "type"), ("/v1/messages/count_tokens", "type"), (CHAT, "code")):
            big = json.dumps({"x": "y" * 3000})
            answers = [
                httpx.post(server.url + path, json={}),
                httpx.get(server.url + path, headers=known),
                httpx.post(server.url + path, content=b"{}", headers=known | {"content-type": "text/plain"}),
                httpx.post(server.url + path, content=big, headers=known | {"content-type": "application/json"}),
            ]
            assert [a.status_code for a in answers] == [401, 405, 400, 413]
            for answer in answers:
                body = answer.json()
                assert (body.get("type") == "error") == (shape == "type") and body["error"]["message"], body
        for path, is_anthropic in (("/v1/messages?beta=true", True), (CHAT, False)):
            status, body = raw_request(server, b"{}", path=path, headers=b"x: %s\r\n" % (b"y" * 70_000))
            assert status == 431 and ("type" in json.loads(body)) == is_anthropic
        assert httpx.get(server.url + "/v1/messages/nothing", headers=known).json()["type"] == "error"
        assert "type" not in httpx.get(server.url + "/v1/messagesx", headers=known).json()


def test_a_keys_salt_and_priority_reach_the_engine(preparer: Preparer, tmp_path: Path) -> None:
    """H11, H12: end to end, for every API."""
    bodies = {
        CHAT: {"messages": HELLO}, "/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": HELLO, "max_tokens": 4, "model": "tiny"},
    }  # fmt: skip
    limits = preparer.limits
    object.__setattr__(limits, "allows_priority", True)
    try:
        with _serving(preparer, api_keys_file=_file(tmp_path, KEYS)) as server:
            for path, body in bodies.items():
                for key, priority in (("ka", -5), ("kb", 0)):
                    answer = httpx.post(server.url + path, json=body, headers={"x-api-key": key})
                    assert answer.status_code == 200, answer.text
                    request = server.engine.requests[-1]
                    assert (request.priority, request.cache_salt is None) == (priority, key == "kb"), path
                refused = httpx.post(server.url + path, json=body, headers={"x-api-key": "kb", "x-vllm-priority": "3"})
                assert refused.status_code == 400 and "x-vllm-priority" in refused.text
                chosen = httpx.post(server.url + path, json=body, headers={"x-api-key": "kc", "x-vllm-priority": "3"})
                assert chosen.status_code == 200 and server.engine.requests[-1].priority == 3, path
    finally:
        object.__setattr__(limits, "allows_priority", False)
