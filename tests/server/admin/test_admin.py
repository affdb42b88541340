"""The admin routes: which call of the engine each makes, what it answers, and what clients see meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvloop

from samovar.config.groups import ServerConfig
from samovar.errors import ConfigError, ConflictError, ValidationError
from samovar.server.run import serving_operators
from samovar.server.sockets import address_of, open_private_socket
from samovar.server.state import ServingState
from samovar.text.prepare import Preparer
from tests.server.live import LiveServer, live_server
from tests.server.scripted_engine import ScriptedEngine, saying
from tests.server.wire import CHAT, HELLO, error_of, metrics_of

ROOT = {"authorization": "Bearer hush-hush"}


@pytest.fixture(scope="module")
def shared(preparer: Preparer) -> Iterator[LiveServer]:
    """A server whose operator has a key; every answer takes a second or so."""
    config = ServerConfig(port=0, admin_api_key=["hush-hush"], enable_request_id_headers=True)

    def make() -> ScriptedEngine:
        return ScriptedEngine(lambda r, i: [70] * 400, step_seconds=0.004)

    with live_server(make, preparer, config) as running:
        yield running


@pytest.fixture
def own(shared: LiveServer) -> LiveServer:
    """The same, as new."""
    shared.engine.calls, shared.engine.answers, shared.engine.refuses = [], {}, None
    return shared


@pytest.fixture
def admin(own: LiveServer) -> Iterator[httpx.Client]:
    """The operator."""
    with httpx.Client(base_url=own.url, headers=ROOT, verify=False, timeout=30) as client:
        yield client


@pytest.mark.parametrize(
    ("request_", "answers", "called", "expected"),
    [
        ("POST /sleep", {"is_sleeping": True}, ("sleep", {"level": 1, "mode": "abort"}), {"is_sleeping": True}),
        ("POST /sleep?level=2&mode=keep", {"is_sleeping": True}, ("sleep", {"level": 2, "mode": "keep"}), {"is_sleeping": True}),
        ("POST /wake_up", {"wake_up": True}, ("wake_up", {"tags": []}), {"is_sleeping": False}),
        ("POST /wake_up?tags=weights&tags=kv_cache", {"wake_up": False}, ("wake_up", {"tags": ["weights", "kv_cache"]}),
         {"is_sleeping": True}),
        ("GET /is_sleeping", {"is_sleeping": False}, ("is_sleeping", {}), {"is_sleeping": False}),
        ("POST /pause", {"is_paused": True}, ("pause", {"mode": "abort"}), {"is_paused": True}),
        ("POST /pause?mode=wait", {"is_paused": True}, ("pause", {"mode": "wait"}), {"is_paused": True}),
        ("POST /resume", {"is_paused": False}, ("resume", {}), {"is_paused": False}),
        ("GET /is_paused", {"is_paused": False}, ("is_paused", {}), {"is_paused": False}),
        ("POST /reset_prefix_cache", {"reset_prefix_cache": True}, ("reset_prefix_cache", {"reset_running_requests": False}),
         {"success": True}),
        ("POST /reset_prefix_cache?reset_running_requests=true&reset_external=false", {"reset_prefix_cache": True},
         ("reset_prefix_cache", {"reset_running_requests": True}), {"success": True}),
        ("POST /release_kv_cache_memory", {"release_kv_cache_memory": 5}, ("release_kv_cache_memory", {"mode": "keep"}),
         {"freed_bytes": 5}),
        ("POST /start_profile?prefix=a-1", {}, ("start_profile", {"prefix": "a-1"}), {"is_profiling": True, "path": None}),
        ("POST /stop_profile", {"stop_profile": "/p/x"}, ("stop_profile", {}), {"is_profiling": False, "path": "/p/x"}),
    ],
)  # fmt: skip
def test_calls(
    own: LiveServer, admin: httpx.Client, request_: str, answers: dict[str, Any], called: Any, expected: dict[str, Any]
) -> None:
    """C26 to C30: one call of the engine each, with the arguments of the query."""
    own.engine.answers = answers
    answer = admin.request(*request_.split())
    assert answer.status_code == 200 and answer.json() == expected
    assert own.engine.calls[0] == called


def test_caches_that_hold_nothing(own: LiveServer, admin: httpx.Client) -> None:
    """No media are ever cached, so after the call none are; the engine is not bothered."""
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        assert admin.post(path).json() == {"success": True}
    assert own.engine.calls == []


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/sleep?level=3", "level"), ("/sleep?level=x", "level"), ("/sleep?mode=now", "mode"), ("/sleep?levels=1", "levels"),
        ("/wake_up?tags=everything", "tags"), ("/pause?mode=", "mode"), ("/reset_prefix_cache?reset_external=true", "reset_external"),
        ("/reset_prefix_cache?reset_running_requests=2", "reset_running_requests"), ("/start_profile?prefix=../x", "prefix"),
        ("/reset_mm_cache?a=b", "a"),
    ],
)  # fmt: skip
def test_wrong_queries(own: LiveServer, admin: httpx.Client, path: str, named: str) -> None:
    """Refused by name, before the engine hears of it."""
    answer = admin.post(path)
    assert answer.status_code == 400 and error_of(answer)["param"] == named
    assert own.engine.calls == []


def test_refusals_of_the_engine(own: LiveServer, admin: httpx.Client) -> None:
    """409 where the state does not allow it, 400 for a wrong value, 503 without an engine."""
    own.engine.answers = {
        "start_profile": ConflictError("a profile is under way"),
        "sleep": ValidationError("no", parameter="level"),
    }
    assert error_of(admin.post("/start_profile"))["message"] == "a profile is under way"
    assert admin.post("/start_profile").status_code == 409 and admin.post("/sleep").status_code == 400
    assert admin.post("/collective_rpc", json={}).status_code == 404  # nothing calls arbitrary code


def test_asleep(own: LiveServer, admin: httpx.Client) -> None:
    """While the engine refuses work, clients are told why; the server is alive and not ready; metrics go on."""
    own.engine.refuses = "the engine is asleep; POST /wake_up"
    bodies = {
        CHAT: {"messages": HELLO}, "/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": HELLO, "max_tokens": 4, "model": "tiny"},
    }  # fmt: skip
    for path, body in bodies.items():
        answer = httpx.post(own.url + path, json=body)
        assert answer.status_code == 503 and "asleep" in answer.json()["error"]["message"], path
        assert answer.headers["retry-after"]
    assert admin.get("/health").status_code == 200
    ready = admin.get("/ready")
    assert ready.status_code == 503 and ready.json()["status"] == "paused"
    assert metrics_of(admin)
    own.engine.refuses = None
    assert admin.get("/ready").status_code == 200
    assert httpx.post(own.url + CHAT, json={"messages": HELLO, "max_tokens": 3}).status_code == 200


def test_abort_requests(own: LiveServer, admin: httpx.Client) -> None:
    """C28: calls are ended by the id of their answer or of their request, streamed or not; others go on."""
    ended: dict[str, httpx.Response] = {}

    def ask(name: str, stream: bool) -> Callable[[], None]:
        def call() -> None:
            body = {"messages": HELLO, "max_tokens": 300, "stream": stream}
            ended[name] = httpx.post(own.url + CHAT, json=body, headers={"x-request-id": name}, timeout=30)

        return call

    threads = [threading.Thread(target=ask(*case)) for case in (("one", True), ("two", False), ("three", True))]
    for thread in threads:
        thread.start()
    _until(lambda: own.engine.num_running == 3)
    answer = admin.post("/abort_requests", json={"request_ids": ["chatcmpl-one", "two", "two", "none"]})
    assert answer.json() == {"num_aborted": 2, "unknown": ["none"]}
    for thread in threads:
        thread.join(20)
    assert "an operator ended this request" in ended["one"].text and ended["one"].status_code == 200
    assert ended["two"].status_code == 410 and "operator" in error_of(ended["two"])["message"]
    assert ended["three"].text.count("data: ") > 300 and "operator" not in ended["three"].text
    assert own.engine.num_running == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
def test_abort_in_every_api(own: LiveServer, admin: httpx.Client, path: str, stream: bool) -> None:
    """Every API tells its client in its own form, in the stream if it has begun."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x", "max_tokens": 300},
        "/v1/responses": {"input": "x", "max_output_tokens": 300},
        "/v1/messages": {"messages": HELLO, "max_tokens": 300, "model": "tiny"},
    }
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = bodies[path] | {"stream": stream}
        answers.append(httpx.post(own.url + path, json=body, headers={"x-request-id": "me"}, timeout=30))

    thread = threading.Thread(target=ask)
    thread.start()
    _until(lambda: own.engine.num_running == 1)
    time.sleep(0.02)
    assert admin.post("/abort_requests", json={"request_ids": ["me"]}).json()["num_aborted"] == 1
    thread.join(20)
    assert "an operator ended this request" in answers[0].text
    assert answers[0].status_code == (200 if stream else 410)
    _until(lambda: own.engine.num_running == 0)


@pytest.mark.parametrize(
    "body", [{}, {"request_ids": []}, {"request_ids": [""]}, {"request_ids": "x"}, {"request_ids": ["x"] * 4097}]
)
def test_abort_wants_ids(own: LiveServer, admin: httpx.Client, body: dict[str, Any]) -> None:
    """Nothing is never everything."""
    assert admin.post("/abort_requests", json=body).status_code == 400


def test_server_info(own: LiveServer, admin: httpx.Client) -> None:
    """Settings are shown, keys are not."""
    own.engine.answers = {"server_info": {"state": "running"}}
    answer = admin.get("/server_info")
    facts = answer.json()
    assert facts["engine"] == {"state": "running"} and facts["server"]["admin_api_key"] == "1 keys"
    assert facts["server"].keys() == ServerConfig.settings.keys() and "hush" not in answer.text


# --- the second listener


@pytest.fixture
def private(preparer: Preparer) -> Iterator[Callable[..., Any]]:
    """Starts a second listener and gives its address."""
    stops: list[Callable[[], None]] = []

    def start(**settings: Any) -> str:
        config = ServerConfig(port=0, admin_port=0, **settings)
        listener = open_private_socket(config)
        assert listener is not None
        box: dict[str, Any] = {}
        started = threading.Event()

        async def main() -> None:
            state, box["stop"] = ServingState(config), asyncio.Event()
            engine = ScriptedEngine(saying("abc"))
            engine.answers = {"is_paused": False, "is_sleeping": True}
            state.attach(engine, preparer)
            async with serving_operators(state, listener):
                box["loop"] = asyncio.get_running_loop()
                started.set()
                await box["stop"].wait()
            state.close()
            await engine.close()

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(10)

        def stop() -> None:
            box["loop"].call_soon_threadsafe(box["stop"].set)
            thread.join(20)
            listener.close()

        stops.append(stop)
        return address_of(listener)

    yield start
    for stop in stops:
        stop()


def test_second_listener(private: Callable[..., str]) -> None:
    """It needs no key where there is no admin key, is on the loopback address, and generates nothing."""
    url = private(api_key=["user"])
    assert url.startswith("http://127.0.0.1:")
    assert httpx.get(url + "/is_paused").json() == {"is_paused": False}
    assert httpx.post(url + "/sleep").json() == {"is_sleeping": True}
    for path in (CHAT, "/v1/models", "/docs", "/v1/messages"):
        assert httpx.post(url + path, json={}).status_code == 404
    assert httpx.get(url + "/ready").status_code == 200


def test_second_listener_with_a_key(private: Callable[..., str]) -> None:
    """With an admin key it asks for that one."""
    url = private(api_key=["user"], admin_api_key=["hush-hush"])
    assert httpx.get(url + "/is_paused").status_code == 401
    assert httpx.get(url + "/is_paused", headers={"x-api-key": "user"}).status_code == 403
    assert httpx.get(url + "/is_paused", headers=ROOT).status_code == 200
    assert httpx.get(url + "/health").status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403), ({"origin": "null"}, 403), ({"sec-fetch-site": "cross-site"}, 403),
        ({"host": "evil.example"}, 403), ({"host": "localhost.evil.example:9"}, 403), ({"host": "10.0.0.1"}, 403),
        ({"host": "[::1]:9"}, 200), ({"host": "localhost:9"}, 200), ({"host": "127.0.0.1"}, 200), ({"host": "a@localhost"}, 200),
        ({"host": "[oops"}, 403),
    ],
)  # fmt: skip
def test_no_page_can_call_it(private: Callable[..., str], headers: dict[str, str], status: int) -> None:
    """A web page on this machine must not reach a listener that asks for no key: by its origin, or by DNS rebinding."""
    assert httpx.post(private() + "/sleep", headers=headers).status_code == status


def test_a_taken_admin_port(private: Callable[..., str]) -> None:
    """The message names the flag."""
    port = int(private().rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match="--admin-port"):
        open_private_socket(ServerConfig(admin_port=port))


def _until(is_so: Callable[[], bool]) -> None:
    for _ in range(500):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("did not become so within 5 s")
