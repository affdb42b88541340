"""Clients that leave: the engine hears of it within a step, in every state, and nobody else notices."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from samovar.text.prepare import Preparer
from tests.server.live import LiveServer, live_client, live_server
from tests.server.scripted_engine import ScriptedEngine, saying
from tests.server.wire import CHAT, COMPLETIONS, HELLO, metrics_of, stream, text_of

STEP = 0.02


@pytest.fixture(scope="module")
def slow(preparer: Preparer) -> Iterator[LiveServer]:
    """A server whose answers take ten seconds if nobody leaves; a prompt of "wait" is not even started before."""

    def engine() -> ScriptedEngine:
        made = ScriptedEngine(lambda r, i: [5] * 480, step_seconds=STEP)
        return made

    with live_server(engine, preparer) as running:
        yield running


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.002)


def post(server: LiveServer, path: str, body: object) -> object:
    sock = server.connect()
    raw = json.dumps(body).encode()
    sock.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" % path.encode())
    sock.sendall(b"content-length: %d\r\n\r\n" % len(raw) + raw)
    return sock


BODIES = {
    "chat stream": (CHAT, {"messages": HELLO, "stream": True, "max_tokens": 480}, 1),
    "chat": (CHAT, {"messages": HELLO, "max_tokens": 480}, 1),
    "completions of many prompts": (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 480}, 3),
    "completions stream of many": (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 480, "stream": True}, 2),
}


@pytest.mark.parametrize("name", BODIES)
def test_leaving_aborts(slow: LiveServer, name: str) -> None:
    """B086, D43: after a disconnect every request of the call is aborted within about a step."""
    path, body, count = BODIES[name]
    engine = slow.engine
    seen, aborted = len(engine.requests), len(engine.aborts)
    sock = post(slow, path, body)
    until(lambda: len(engine.requests) == seen + count and engine.num_running > 0)
    time.sleep(3 * STEP)
    left = time.monotonic()
    sock.close()  # type: ignore[attr-defined]
    until(lambda: engine.num_running == 0)
    assert {a[0] for a in engine.aborts[aborted:]} == {r.request_id for r in engine.requests[seen:]}
    assert max(a[2] for a in engine.aborts[aborted:]) - left < 1.0


def test_leaving_a_queue(preparer: Preparer) -> None:
    """B089: requests that have not started are aborted too, and the one that runs goes on (B091)."""

    def engine() -> ScriptedEngine:
        return ScriptedEngine(saying("abcdefgh" * 6), step_seconds=STEP, delay=0.5)

    with live_client(engine, preparer) as (own, http):
        queued = [post(own, CHAT, {"messages": HELLO}) for _ in range(5)]
        until(lambda: len(own.engine.requests) == 5)
        for sock in queued:
            sock.close()  # type: ignore[attr-defined]
        answer = text_of(stream(http, CHAT, messages=HELLO))
        assert answer == "abcdefgh" * 6
        assert len(own.engine.aborts) == 5 and own.engine.num_running == 0


def test_one_of_many_leaves(slow: LiveServer) -> None:
    """B013, B091: overlapping calls with one client id; cancelling one leaves the others alone."""
    engine = slow.engine
    seen = len(engine.requests)
    body = {"messages": HELLO, "request_id": "id", "max_tokens": 480, "stream": True}
    socks = [post(slow, CHAT, body) for _ in range(10)]
    until(lambda: len(engine.requests) == seen + 10 and engine.num_running == 10)
    assert len({r.request_id for r in engine.requests[seen:]}) == 10
    socks[3].close()  # type: ignore[attr-defined]
    until(lambda: engine.num_running == 9)
    time.sleep(5 * STEP)
    assert engine.num_running == 9
    for sock in socks:
        sock.close()  # type: ignore[attr-defined]
    until(lambda: engine.num_running == 0)


def test_stop_string_ends_the_engines_work(slow: LiveServer) -> None:
    """A stop string matched in the front end stops that choice in the engine, and only that one."""
    with httpx.Client(base_url=slow.url, verify=False, timeout=30) as http:
        aborted = len(slow.engine.aborts)
        letter = http.post("/detokenize", json={"tokens": [5]}).json()["prompt"]
        answer = http.post(CHAT, json={"messages": HELLO, "stop": [letter * 3], "n": 2, "max_tokens": 400}).json()
        assert [c["stop_reason"] for c in answer["choices"]] == [letter * 3] * 2
        assert answer["usage"]["completion_tokens"] == 6
        assert [a[1] for a in slow.engine.aborts[aborted:]] == [0, 1]
        assert slow.engine.num_running == 0


def test_200_aborts_at_random_moments(slow: LiveServer) -> None:
    """B086, B088: after 200 aborts at random moments nothing runs, nothing is in flight, and a probe is as quick as before."""
    engine, random_ = slow.engine, random.Random(1)
    for _ in range(10):
        socks = [post(slow, *BODIES[random_.choice(list(BODIES))][:2]) for _ in range(20)]
        for sock in socks:
            time.sleep(random_.random() * 0.01)
            sock.close()  # type: ignore[attr-defined]
    until(lambda: engine.num_running == engine.stats.num_running == 0)
    with httpx.Client(base_url=slow.url, verify=False, timeout=30) as http:
        assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200
        rows = metrics_of(http)
        ended = sum(v for k, v in rows.items() if k.startswith("vllm:request_success_total"))
        assert rows["samovar:requests_accepted_total"] == ended
        assert rows["samovar:requests_in_flight"] == rows["vllm:num_requests_running"] == 0
        assert http.get("/load").json() == {"server_load": 0}


def test_leaving_before_the_body_is_complete(slow: LiveServer) -> None:
    """Half a body, then gone: no request, no error."""
    seen = len(slow.engine.requests)
    sock = slow.connect()
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    )
    time.sleep(0.05)
    sock.close()
    time.sleep(0.1)
    assert len(slow.engine.requests) == seen
