"""Background responses: poll, follow, replay, cancel, delete; and what cancelling does to the engine."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest

from samovar.config.groups import ServerConfig
from samovar.server.responses.store import MAX_RUNNING
from samovar.text.prepare import Preparer
from tests.server.responses.checker import check_stream, events_of, said_by
from tests.server.responses.conftest import PATH, Talker, talking

LONG = "word " * 40


def _wait(talker: Talker, response_id: str) -> dict[str, Any]:
    for _ in range(1000):
        response: dict[str, Any] = talker.http.get(f"{PATH}/{response_id}").json()
        if response["status"] not in ("queued", "in_progress"):
            return response
        time.sleep(0.01)
    raise AssertionError("it does not end")


def test_poll(slow: Talker) -> None:
    """It is answered at once, runs on without its client, and can be polled until it is complete."""
    first = slow.ask(LONG, background=True)
    assert first["status"] == "queued" and first["background"] and first["output"] == []
    response = _wait(slow, first["id"])
    assert response["status"] == "completed" and response["output"][0]["content"][0]["text"] == LONG
    events = events_of(slow.http.get(f"{PATH}/{first['id']}", params={"stream": True}).content)
    assert check_stream(events) == response
    assert [e["type"] for e in events[:3]] == ["response.created", "response.queued", "response.in_progress"]


def test_follow_and_replay(slow: Talker) -> None:
    """A stream that was left is taken up after any event, while it runs and when it has ended, without a gap."""
    slow.says = LONG
    seen: list[Any] = []
    stream = slow.sdk.responses.create(model="tiny", input="hi", background=True, stream=True)
    for event in stream:
        seen.append(event.to_dict())
        if len(seen) == 30:
            break
    stream.close()
    response_id = seen[0]["response"]["id"]
    url = f"{PATH}/{response_id}"
    rest = events_of(slow.http.get(url, params={"stream": True, "starting_after": seen[-1]["sequence_number"]}).content)
    last = check_stream([*seen, *rest])
    assert last == slow.http.get(url).json()
    replayed = events_of(slow.http.get(url, params={"stream": True, "starting_after": 99}).content)
    assert replayed == [*seen, *rest][100:]
    assert slow.http.get(url, params={"stream": True, "starting_after": 10**6}).content == b""


def test_follow_from_beyond_the_end(slow: Talker) -> None:
    """Whoever has all events of a running response already, and more, gets none and the end: no error of ours."""
    first = slow.ask(LONG, background=True)
    answer = slow.http.get(f"{PATH}/{first['id']}", params={"stream": True, "starting_after": 10**6})
    assert answer.status_code == 200 and answer.content == b""
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert slow.http.get(f"{PATH}/{first['id']}").json()["status"] == "completed"


def test_cancel(slow: Talker) -> None:
    """Cancelling frees the engine; what was said stays; cancelling again changes nothing."""
    first = slow.ask("word " * 5000, background=True)
    while slow.live.engine.num_running == 0:
        time.sleep(0.005)
    with slow.http.stream("GET", f"{PATH}/{first['id']}", params={"stream": True}) as following:
        lines = following.iter_raw()
        raw = next(lines)
        cancelled = slow.sdk.responses.cancel(first["id"])
        raw += b"".join(lines)
    assert cancelled.status == "cancelled" and slow.live.engine.num_running == 0
    last = check_stream(events_of(raw))
    assert last["status"] == "cancelled" and last["output"][0]["status"] == "incomplete"
    assert slow.http.get(f"{PATH}/{first['id']}").json() == last
    assert slow.sdk.responses.cancel(first["id"]).status == "cancelled"
    assert slow.http.get("/load").json() == {"server_load": 0}
    slow.says = "More."
    chained = slow.ask("More.", previous_response_id=first["id"])
    assert chained["status"] == "completed"
    assert f"<|im_start|>assistant\n{said_by(last['output'][0])}<|im_end|>" in slow.prompt


def test_cancel_needs_background(talker: Talker) -> None:
    """Others are cancelled by closing their connection; what does not exist is not found."""
    response = talker.ask()
    with pytest.raises(openai.BadRequestError, match="background"):
        talker.sdk.responses.cancel(response["id"])
    with pytest.raises(openai.NotFoundError):
        talker.sdk.responses.cancel("resp_none")
    assert talker.http.get(f"{PATH}/{response['id']}", params={"stream": True}).json()["error"]["param"] == "stream"
    assert talker.http.get(f"{PATH}/{response['id']}", params={"starting_after": 1}).status_code == 400
    assert talker.http.get(f"{PATH}/{response['id']}", params={"streem": True}).json()["error"]["param"] == "streem"


def test_delete_while_running(slow: Talker) -> None:
    """Deleting stops it, too."""
    first = slow.ask("word " * 5000, background=True)
    slow.sdk.responses.delete(first["id"])
    assert slow.live.engine.num_running == 0
    assert slow.http.get(f"{PATH}/{first['id']}").status_code == 404


def test_disconnect_frees_the_engine(slow: Talker) -> None:
    """A foreground response ends with its connection, and is not stored."""
    slow.says = "word " * 5000
    stream = slow.sdk.responses.create(model="tiny", input="hi", stream=True)
    first = next(iter(stream))
    stream.close()
    for _ in range(400):
        if slow.live.engine.num_running == 0:
            break
        time.sleep(0.005)
    assert slow.live.engine.num_running == 0
    assert slow.http.get(f"{PATH}/{first.response.id}").status_code == 404  # type: ignore[union-attr]


def test_too_many(slow: Talker) -> None:
    """The number of responses in the background is bounded: one more is answered 503, until one has ended."""
    ids = [slow.ask("word " * 5000, background=True)["id"] for _ in range(MAX_RUNNING)]
    answer = slow.http.post(PATH, json={"input": "hi", "background": True})
    assert answer.status_code == 503 and "background" in answer.json()["error"]["message"]
    assert slow.ask("ok", max_output_tokens=2)["status"] == "incomplete"
    for response_id in ids:
        slow.sdk.responses.cancel(response_id)
    assert slow.live.engine.num_running == 0
    assert slow.ask("ok", background=True)["status"] == "queued"


def test_failure(slow: Talker) -> None:
    """An engine that gives up: in the background a failed response, in a stream a failed event, else plain 500."""
    slow.live.engine.script = lambda request, index: [*slow.script(request, index)[:40], -1]
    first = slow.ask(LONG, background=True)
    response = _wait(slow, first["id"])
    assert response["status"] == "failed" and response["error"]["code"] == "server_error"
    events = slow.stream(LONG)
    assert events[-1]["type"] == "response.failed" and "row failed" in events[-1]["response"]["error"]["message"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == LONG[:40]
    assert slow.http.post(PATH, json={"input": "hi"}).status_code == 500


def test_engine_death_and_shutdown(slow: Talker) -> None:
    """When the engine dies, streams end with a failed event; when the server closes, too."""
    slow.says = "word " * 5000
    with slow.http.stream("POST", PATH, json={"input": "hi", "stream": True}) as answer:
        parts = answer.iter_raw()
        raw = next(parts)
        slow.live.on_loop(slow.live.state.end_calls)
        raw += b"".join(parts)
    assert check_stream(events_of(raw))["error"]["message"] == "the server is shutting down"
    first = slow.ask(background=True)
    with slow.http.stream("POST", PATH, json={"input": "hi", "stream": True}) as answer:
        parts = answer.iter_raw()
        raw = next(parts)
        slow.live.on_loop(slow.live.engine.die)
        raw += b"".join(parts)
    assert check_stream(events_of(raw))["status"] == "failed"
    assert _wait(slow, first["id"])["status"] == "failed"


def test_bounded_under_load(thinker: Preparer) -> None:
    """However much is stored, memory stays under the limit, and the newest answers are there."""
    config = ServerConfig(port=0, responses_store_bytes=200_000)
    for talker in talking(thinker, config, per_step=100):
        talker.says = "x" * 1000
        ids = [talker.ask(input="y" * 1000)["id"] for _ in range(150)]
        store = talker.live.state.responses
        assert 100_000 < store.num_bytes <= 200_000
        found = [talker.http.get(f"{PATH}/{i}").status_code for i in ids]
        assert found[-1] == 200 and found[0] == 404 and found == sorted(found, reverse=True)


def test_store_is_off(thinker: Preparer) -> None:
    """Without a store the object says so, a wish for one is noticed, and what needs one is refused by name."""
    for talker in talking(thinker, ServerConfig(port=0, enable_responses_store=False)):
        assert talker.ask()["store"] is False
        wished = talker.ask(store=True)
        assert wished["store"] is False and "store was skipped" in wished["notices"][0]
        assert talker.refusal(background=True)["param"] == "background"
        assert talker.refusal(previous_response_id=wished["id"])["param"] == "previous_response_id"
        assert talker.http.get(f"{PATH}/{wished['id']}").status_code == 404
