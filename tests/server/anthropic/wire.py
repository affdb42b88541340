"""Reading streams of the Messages API, each checked against the published order and types of its events."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec

from samovar.server.anthropic.schema import ErrorResponse, StreamEvent
from samovar.server.anthropic.stream_rules import StreamRules, symbol_of

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
BASE: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "messages": HELLO}


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream; framing, names, order, indexes and every event's shape are checked."""
    assert raw.endswith(b"\n\n") and b"[DONE]" not in raw, raw[-200:]
    rules, events = StreamRules(), []
    for piece in raw[:-2].split(b"\n\n"):
        first, second = piece.split(b"\n")
        assert first.startswith(b"event: ") and second.startswith(b"data: {"), piece
        event = json.loads(second[6:])
        assert event["type"] == first[7:].decode()
        rules.advance(*symbol_of(event))
        kind: Any = ErrorResponse if event["type"] == "error" else StreamEvent
        assert msgspec.to_builtins(msgspec.convert(event, kind)) == event
        events.append(event)
    assert rules.is_over, f"the stream stopped {rules.state}"
    return events


def stream(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer."""
    answer = http.post(MESSAGES, json=BASE | body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.content)


def whole(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """An answer in one piece."""
    answer = http.post(MESSAGES, json=BASE | body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Stream events -> the message, put together by this test's own reading of the protocol."""
    message: dict[str, Any] = {}
    for event in events:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    block[name] += delta[name]
            block["json"] += delta.get("partial_json", "")
        elif event["type"] == "content_block_stop":
            block = message["content"][event["index"]]
            text = block.pop("json")
            if text:
                block["input"] = json.loads(text)
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message |= {name: event[name] for name in ("context_management",) if name in event}
            message["usage"] |= event["usage"]
    return message


def error_of(answer: httpx.Response, status: int, kind: str) -> str:
    """The message of an error in Anthropic's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error", body
    assert body["error"].keys() - {"details"} == {"type", "message"} and body["error"]["type"] == kind, body
    assert len(answer.content) < 20_000 and "Traceback" not in answer.text
    return str(body["error"]["message"])
