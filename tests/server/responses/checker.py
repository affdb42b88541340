"""check_stream: a response's stream against the event grammar, and against itself, its items and its final object."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from samovar.server.responses.grammar import LAST, EventGrammar, subject_of

_sdk: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream; checks the framing byte by byte: `event:`, `data:`, and no end marker."""
    assert raw.endswith(b"\n\n") and b"[DONE]" not in raw[-40:], raw[-200:]
    found = []
    for frame in raw.split(b"\n\n")[:-1]:
        if frame.startswith(b":"):
            continue
        first, second = frame.split(b"\n")
        assert first.startswith(b"event: ") and second.startswith(b"data: {"), frame
        event = json.loads(second[6:])
        assert event["type"] == first[7:].decode()
        found.append(event)
    return found


def check_stream(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Walk a whole stream; returns the final response. Every claim that an event makes is compared with what came before."""
    walk, items = EventGrammar(), _Items()
    last: dict[str, Any] = {}
    response_id = events[0]["response"]["id"]
    for event in events:
        number = walk.step(event["type"], subject_of(event))
        assert event["sequence_number"] == number, event
        _sdk.validate_python(event)
        if "response" in event:
            assert event["response"]["id"] == response_id
            last = event["response"]
        items.take(event)
    assert walk.is_over and events[-1]["type"] in LAST
    assert last["output"] == items.done, "the streamed items are not the objects of the final response"
    everything = [item["id"] for item in items.done]
    assert len(set(everything)) == len(everything)
    return last


class _Items:
    """The items of a stream, put together from their deltas."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] = {}
        self._text = ""
        self._logprobs: list[Any] = []

    def take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if "output_index" in event:
            assert event["output_index"] == len(self.done)
        if "item_id" in event:
            assert event["item_id"] == self._open["id"]
        if "content_index" in event:
            assert event["content_index"] == 0
        if kind == "response.output_item.added":
            self._open, self._text, self._logprobs = event["item"], "", []
            assert event["item"]["status"] == "in_progress" and not event["item"].get("content")
        elif kind.endswith(".delta"):
            assert event["delta"], "an empty delta"
            self._text += event["delta"]
            self._logprobs += event.get("logprobs", [])
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == self._open["id"] and event["item"]["status"] in ("completed", "incomplete")
            assert said_by(event["item"]) == self._text
            self.done.append(event["item"])
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == self._text
        elif kind.endswith(".done"):
            said = event.get("text", event.get("arguments", event.get("input")))
            assert said == self._text and event.get("logprobs", []) == self._logprobs


def said_by(item: dict[str, Any]) -> str:
    """The text, arguments or input of an output item."""
    if "content" in item:
        return "".join(part["text"] for part in item["content"])
    return str(item.get("arguments", item.get("input")))


def shape_of(response: dict[str, Any]) -> Any:
    """A response without what differs between two equal requests: ids and times."""
    kept = {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at", "previous_response_id")}
    kept["output"] = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return kept
