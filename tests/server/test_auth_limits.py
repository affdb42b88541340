"""Keys, body and header limits, request ids, CORS, the proxy prefix: what is checked before anything is read."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import httpx
import pytest

from samovar.config.groups import ServerConfig
from samovar.server.routes import ROUTES
from samovar.text.prepare import Preparer
from tests.server.live import LiveServer, live_client, live_server
from tests.server.scripted_engine import ScriptedEngine, saying
from tests.server.wire import CHAT, COMPLETIONS, HELLO, chunks_of, error_of, raw_request, read_answer

OPEN = {"/health", "/ready", "/ping"}


@pytest.fixture(scope="module")
def guarded(preparer: Preparer) -> Iterator[LiveServer]:
    """A server with two keys, a 64 KiB body limit, request ids, one CORS origin."""
    config = ServerConfig(
        port=0,
        api_key=["sesame", "käse"],
        max_body_bytes=65536,
        enable_request_id_headers=True,
        allowed_origins=["https://ui.example"],
    )
    with live_server(lambda: ScriptedEngine(saying("abc" * 10)), preparer, config) as running:
        yield running


@pytest.fixture(scope="module")
def keyed(guarded: LiveServer) -> Iterator[httpx.Client]:
    """A client with a key."""
    with httpx.Client(base_url=guarded.url, headers={"authorization": "Bearer sesame"}, verify=False) as client:
        yield client


def test_every_route_needs_a_key(guarded: LiveServer) -> None:
    """H1: a sweep of the route table, unknown paths and odd spellings: only the probes are open."""
    with httpx.Client(base_url=guarded.url, verify=False) as http:
        for route in ROUTES:
            answer = http.request(route.method, re.sub(r"{\w+}", "tiny", route.path))
            assert (answer.status_code != 401) == (route.path in OPEN), route.path
            if answer.status_code == 401:
                assert answer.json()["error"]["type"] in ("AuthenticationError", "authentication_error")
        for path in (
            "/",
            "/nothing",
            "/v1",
            "/metrics/",
            "/health/",
            "/health/../metrics",
            "//metrics",
            "/healthz",
            "/V1/models",
        ):
            assert http.get(path).status_code == 401, path
        assert http.get("/%68ealth").status_code == 200


@pytest.mark.parametrize(
    "target",
    [
        b"/health/../v1/models",
        b"/health?/../v1/models",
        b"http://x/health",
        b"/health;/v1/models",
        b"/health%2f..%2fv1/models",
    ],
)
def test_no_path_is_read_in_two_ways(guarded: LiveServer, target: bytes) -> None:
    """K5: whatever the request line looks like, no model list without a key."""
    with guarded.connect() as sock:
        sock.sendall(b"GET %s HTTP/1.1\r\nhost: x/health\r\nconnection: close\r\n\r\n" % target)
        status, body = read_answer(sock)
    assert b"max_model_len" not in body and status in (200, 401)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("authorization", "Bearer sesame", True), ("authorization", "bearer sesame", True), ("authorization", "Bearer käse", True),
        ("x-api-key", "sesame", True), ("authorization", "Bearer sesam", False), ("authorization", "sesame", False),
        ("authorization", "Basic sesame", False), ("authorization", "Bearer", False), ("x-api-key", "", False),
        ("authorization", "Bearer sesame,käse", False),
    ],
)  # fmt: skip
def test_keys(guarded: LiveServer, name: str, value: str, allowed: bool) -> None:
    """Bearer tokens and x-api-key; nothing else."""
    answer = httpx.get(guarded.url + "/v1/models", headers={name: value.encode()})
    assert answer.status_code == (200 if allowed else 401)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_limit(guarded: LiveServer, keyed: httpx.Client, is_chunked: bool) -> None:
    """413 for a body over the limit, declared or streamed; one at the limit is served."""
    shell = json.dumps({"messages": HELLO, "x": ""}).encode()
    for size, status in ((65536, 200), (65537, 413), (3_000_000, 413)):
        body = shell[:-2] + b"y" * (size - len(shell)) + shell[-2:]
        content = iter([body[i : i + 10_000] for i in range(0, size, 10_000)]) if is_chunked else body
        answer = keyed.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == status
        if status == 413:
            assert error_of(answer)["type"] == "RequestTooLargeError"
    assert keyed.get("/health").status_code == 200


def test_lying_content_length(guarded: LiveServer) -> None:
    """A content-length that is huge, negative or not a number is refused before memory is spent."""
    for declared in (b"99999999999999999999", b"-1", b"abc"):
        with guarded.connect() as sock:
            sock.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sesame\r\n" % CHAT.encode())
            sock.sendall(
                b"content-type: application/json\r\nconnection: close\r\ncontent-length: %s\r\n\r\n" % declared
            )
            assert read_answer(sock)[0] in (400, 413)


def test_header_limits(guarded: LiveServer) -> None:
    """B014: a megabyte of header, or hundreds of headers, is 431 and the connection is closed."""
    many = b"".join(b"x-%d: 1\r\n" % i for i in range(200))
    for headers in (b"x-request-id: " + b"r" * 1_000_000 + b"\r\n", many):
        status, body = raw_request(guarded, b"{}", headers=headers)
        assert status == 431 and len(body) < 500
    with guarded.connect() as sock:
        sock.sendall(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_answer(sock)[0] == 431
    assert httpx.get(guarded.url + "/health").status_code == 200


def test_request_ids(keyed: httpx.Client, http: httpx.Client) -> None:
    """B014: an id is echoed only if the server was told to, if it is printable and at most 128 long; chunks stay small."""
    for sent, echoed in (
        ("abc-1", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("é", False),
        ("", False),
    ):
        answer = keyed.post(CHAT, json={"messages": HELLO, "stream": True}, headers={"x-request-id": sent.encode()})
        assert (answer.headers["x-request-id"] == sent) == echoed
        assert len(answer.headers["x-request-id"]) <= 128
        assert all(len(c["id"]) < 160 for c in chunks_of(answer.content))
    assert "x-request-id" not in http.post(CHAT, json={"messages": HELLO}, headers={"x-request-id": "abc"}).headers


def test_cors(guarded: LiveServer, http: httpx.Client) -> None:
    """Only the named origin may call from a browser; preflights need no key; without the setting there is no header."""
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    fine = httpx.options(guarded.url + CHAT, headers={"origin": "https://ui.example"} | asks)
    assert fine.status_code == 200 and fine.headers["access-control-allow-origin"] == "https://ui.example"
    assert (
        "access-control-allow-origin"
        not in httpx.options(guarded.url + CHAT, headers={"origin": "https://evil"} | asks).headers
    )
    assert "access-control-allow-origin" not in http.get("/health", headers={"origin": "https://ui.example"}).headers


def test_prefix_and_docs_switch(preparer: Preparer) -> None:
    """Behind a proxy prefix, routes and keys work as without; docs can be switched off."""
    config = ServerConfig(port=0, root_path="/llm", api_key=["k"], disable_docs=True)
    with live_client(lambda: ScriptedEngine(saying("abc")), preparer, config) as (_own, http):
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").status_code == 401
        known = {"authorization": "Bearer k"}
        assert http.get("/v1/models", headers=known).status_code == 200
        assert [http.get(p, headers=known).status_code for p in ("/docs", "/openapi.json", "/")] == [404] * 3


def test_two_requests_on_one_connection(server: LiveServer) -> None:
    """Pipelined requests are answered in order on one connection."""
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    one = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with server.connect() as sock:
        sock.sendall((one + b"content-length: %d\r\n\r\n" % len(body) + body) * 2)
        sock.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        raw = b""
        while part := sock.recv(65536):
            raw += part
    assert raw.count(b"HTTP/1.1 200 OK") == 3 and raw.count(b'"text_completion"') == 2


def _post(*headers: str, version: str = "1.1", target: str = COMPLETIONS, **body: object) -> bytes:
    content = json.dumps({"prompt": "x"} | body).encode()
    lines = (f"POST {target} HTTP/{version}", "host: x", "content-type: application/json", *headers)
    return "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content


def _everything(server: LiveServer, *parts: bytes) -> bytes:
    """What a connection answers to `parts`, sent one after the other, until the server closes it."""
    raw = b""
    with server.connect() as sock:
        for part in parts:
            sock.sendall(part)
            time.sleep(0.001 if len(parts) > 1 else 0)
        while part := sock.recv(65536):
            raw += part
    return raw


LAST = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
CHUNKED = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n%s\r\n\r\n"


@pytest.mark.parametrize("kind", ["length", "chunked", "websocket", "no body"])
@pytest.mark.parametrize("step", [0, 1, 50])
def test_upgrade_is_ignored(server: LiveServer, kind: str, step: int) -> None:
    """RFC 9110, 7.8: a request that offers another protocol is answered in this one, and so are those behind it."""
    offer = ("Connection: upgrade", "Upgrade: websocket") if kind == "websocket" else UPGRADE
    if kind == "chunked":
        head = CHUNKED % (COMPLETIONS.encode(), "\r\n".join(offer).encode())
        request = head + b'5\r\n{"pro\r\n9\r\nmpt":"x"}\r\n0\r\n\r\n'
    elif kind == "no body":
        request = "\r\n".join(["GET /version HTTP/1.1", "host: x", *offer, "", ""]).encode()
    else:
        request = _post(*offer)
    raw = request * 2 + _post() + LAST
    answers = _everything(
        server, *([raw] if not step else [raw[i : i + step] for i in range(0, 700, step)] + [raw[700:]])
    )
    assert answers.count(b"HTTP/1.1 200 OK") == 4 and answers.count(b"HTTP/1.1 ") == 4
    assert answers.count(b'"text_completion"') == (1 if kind == "no body" else 3)


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 500 + b"\r\n", 431),
        (b"\x00garbage\r\n\r\n", 400),
        (CHUNKED % (COMPLETIONS.encode(), b"a: b") + b"zz\r\nabc", 400),
    ],
)
def test_refusals_wait_for_earlier_answers(server: LiveServer, bad: bytes, status: int) -> None:
    """A connection-level refusal comes after the whole answers to the requests before it, and closes the connection."""
    for before in (0, 1, 3):
        answers = _everything(server, _post(stream=True) * before + bad + LAST)
        assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b"data: [DONE]") == before
        last = answers.split(b"0\r\n\r\n")[-1]
        assert (
            last.startswith(b"HTTP/1.1 %d " % status)
            and json.loads(last.split(b"\r\n\r\n")[1])["error"]["code"] == status
        )


def test_http_1_0(server: LiveServer) -> None:
    """RFC 9112, 7.1: HTTP/1.0 gets no chunks; the end of a stream is the end of the connection."""
    head, _, body = _everything(server, _post(version="1.0", stream=True)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head and b" 200 " in head
    assert len(chunks_of(body)) > 1
    head, _, body = _everything(server, _post(version="1.0")).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head and json.loads(body)["object"] == "text_completion"
    assert _everything(server, _post(version="1.0", target="/nothing")).count(b" 404 ") == 1
