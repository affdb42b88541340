"""ResponseWriter: whatever a model does, its stream follows the grammar and says what the whole answer says."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.core.events import GenerationEvent, LogprobEntry, PositionLogprobs
from samovar.core.sequence import FinishReason
from samovar.core.tools import ToolCallDelta
from samovar.errors import EngineDeadError
from samovar.server.responses.grammar import MOVES, EventGrammar, EventOrderError, Place
from samovar.server.responses.output import PAD_TO, ResponseWriter
from samovar.server.responses.running import DeltaFrame, frame
from samovar.server.responses.schema import ResponseEvent, ResponseObject
from samovar.server.responses.tools import Target, ToolSet
from tests.server.responses.checker import check_stream, events_of, said_by, shape_of

TOOLS = ToolSet([], {"get": Target("get"), "patch": Target("patch", None, True), "ns__get": Target("get", "ns")})
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("think"), st.text("ab \n", min_size=1, max_size=5)),
        st.tuples(st.just("say"), st.text("ab \n", min_size=1, max_size=5)),
        st.tuples(st.sampled_from(["get", "patch", "ns__get"]), st.lists(st.text('{}"ab', max_size=4), max_size=4)),
        st.tuples(st.just("wait"), st.just("")),
    ),
    max_size=12,
)


def _writer(frames: list[bytes] | None, **options: Any) -> ResponseWriter:
    response = ResponseObject(id="resp_1", created_at=1, status="in_progress", model="m")
    sink = None if frames is None else frames.append
    return ResponseWriter(response, TOOLS, num_input_tokens=7, sink=sink, **options)


def _events(steps: list[tuple[str, Any]], finish: FinishReason | None) -> list[GenerationEvent]:
    """Each step as events of two tokens; the last one ends."""
    found: list[GenerationEvent] = []
    calls = 0
    for kind, what in steps:
        event = GenerationEvent(index=0, token_ids=[1, 2], num_cached_tokens=3)
        found.append(event)
        if kind == "think":
            event.reasoning, event.num_reasoning_tokens = what, 2
        elif kind == "say":
            event.text = what
        elif kind != "wait":
            event.tool_calls = [ToolCallDelta(calls, f"call_{calls}", kind)]
            found += [
                GenerationEvent(index=0, token_ids=[1, 2], tool_calls=[ToolCallDelta(calls, arguments=piece)])
                for piece in what
            ]
            calls += 1
    if finish is not None:
        found.append(GenerationEvent(index=0, finish_reason=finish))
    return found


def _run(writer: ResponseWriter, events: list[GenerationEvent]) -> dict[str, Any]:
    writer.run()
    for event in events:
        writer.take(event)
    result: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(writer.response))
    return result


@given(STEPS, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
def test_any_answer(steps: list[tuple[str, Any]], finish: FinishReason) -> None:
    """The stream is grammatical, its items are the final ones, and they say what was generated, in order."""
    frames: list[bytes] = []
    whole = _run(_writer(None), _events(steps, finish))
    streamed = _run(_writer(frames), _events(steps, finish))
    assert check_stream(events_of(b"".join(frames))) == streamed
    assert shape_of(streamed) == shape_of(whole)
    output = whole["output"]
    thought = "".join(said_by(item) for item in output if item["type"] == "reasoning")
    assert thought == "".join(what for kind, what in steps if kind == "think")
    said = "".join(said_by(item) for item in output if item["type"] == "message")
    assert "".join(said.split()) == "".join("".join(what for kind, what in steps if kind == "say").split())
    called = [(item["name"], item.get("namespace"), item["call_id"]) for item in output if "call_id" in item]
    kinds = [kind for kind, _ in steps if kind in TOOLS.targets]
    expected = [TOOLS.targets[kind] for kind in kinds]
    assert called == [(t.name, t.namespace, f"call_{at}") for at, t in enumerate(expected)]
    functions = [item["arguments"] for item in output if item["type"] == "function_call"]
    assert functions == ["".join(what) for kind, what in steps if kind in ("get", "ns__get")]
    assert whole["status"] == ("completed" if finish is FinishReason.STOP else "incomplete")
    assert (whole["incomplete_details"] is None) == (finish is FinishReason.STOP)
    statuses = [item["status"] for item in output]
    assert set(statuses[:-1]) <= {"completed"} and (finish is FinishReason.LENGTH or set(statuses) <= {"completed"})
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] and usage["input_tokens"] == 7
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2 * sum(kind == "think" for kind, _ in steps)


@given(STEPS, st.sampled_from(["fail", "cancel"]), st.booleans())
def test_any_ending(steps: list[tuple[str, Any]], ending: str, queued: bool) -> None:
    """A failure or a cancellation at any point closes what is open, and the stream is complete."""
    frames: list[bytes] = []
    writer = _writer(frames)
    writer.create(queued=queued)
    if steps:
        _run(writer, _events(steps, None))
    elif ending == "cancel" and not queued:
        return
    if ending == "fail":
        writer.fail(EngineDeadError("gone"))
        writer.fail(EngineDeadError("gone again"))
    else:
        writer.cancel()
    last = check_stream(events_of(b"".join(frames)))
    assert last["status"] == ("failed" if ending == "fail" else "cancelled")
    assert last["error"] == ({"code": "server_error", "message": "gone"} if ending == "fail" else None)
    assert writer.is_over


def test_custom_input_is_unpacked() -> None:
    """A custom tool's call is an item of its own, with its input as text in every delta."""
    frames: list[bytes] = []
    text = '*** Begin Patch\n+"é"\n'
    pieces = list(json.dumps({"input": text}))
    last = _run(_writer(frames), _events([("patch", pieces)], FinishReason.STOP))
    events = events_of(b"".join(frames))
    assert check_stream(events) == last
    (item,) = last["output"]
    assert (item["type"], item["input"], item["name"]) == ("custom_tool_call", text, "patch")
    assert item["id"].startswith("ctc_") and item["id"] != item["call_id"]
    assert "".join(e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta") == text


def test_cut_calls() -> None:
    """B131: arguments cut by the limit are incomplete; ones that were complete are not."""
    for pieces, status in ((['{"a": "b'], "incomplete"), (['{"a": "b"}'], "completed"), ([], "incomplete")):
        last = _run(_writer(None), _events([("get", pieces)], FinishReason.LENGTH))
        assert last["output"][0]["status"] == status and last["status"] == "incomplete"
        assert last["incomplete_details"] == {"reason": "max_output_tokens"}


def test_blanks_make_no_message() -> None:
    """Blanks between reasoning and a call are no message of their own; nothing at all is an empty message."""
    last = _run(_writer(None), _events([("think", "a"), ("say", "\n\n"), ("get", ["{}"])], FinishReason.STOP))
    assert [item["type"] for item in last["output"]] == ["reasoning", "function_call"]
    last = _run(_writer(None), _events([("think", "a"), ("say", "\n"), ("say", "b")], FinishReason.STOP))
    assert said_by(last["output"][1]) == "\nb"
    for steps, text in (([], ""), ([("say", " ")], " ")):
        last = _run(_writer(None), _events(steps, FinishReason.STOP))  # type: ignore[arg-type]
        assert [(i["type"], said_by(i)) for i in last["output"]] == [("message", text)]


def test_obfuscation() -> None:
    """Asked for, deltas are filled up to equal lengths; nothing else changes."""
    frames: list[bytes] = []
    last = _run(
        _writer(frames, obfuscates=True),
        _events([("think", "ab"), ("say", "abc"), ("get", ["{", "}"])], FinishReason.STOP),
    )
    events = events_of(b"".join(frames))
    assert check_stream(events) == last
    deltas = [e for e in events if e["type"].endswith(".delta")]
    assert deltas and all((len(e["delta"]) + len(e["obfuscation"])) % PAD_TO == 0 for e in deltas)


def test_logprobs_belong_to_text() -> None:
    """Positions of reasoning, marks and calls are left out; those of held-back tokens come with the text they became."""

    def at(token: int) -> PositionLogprobs:
        return PositionLogprobs(LogprobEntry(token, str(token), b"", -1.0, 1), [LogprobEntry(9, "9", b"9", -2.0, 2)])

    def event(*tokens: int, **news: Any) -> GenerationEvent:
        return GenerationEvent(index=0, token_ids=list(tokens), logprobs=[at(t) for t in tokens], **news)

    frames: list[bytes] = []
    events = [
        event(1, 2, reasoning="t", num_reasoning_tokens=2),
        event(3),
        event(4, 5, text="ab"),
        event(6),
        event(7, tool_calls=[ToolCallDelta(0, "c", "get", "{}")]),
        event(8, finish_reason=FinishReason.STOP),
    ]
    last = _run(_writer(frames, top_logprobs=1), events)
    assert check_stream(events_of(b"".join(frames))) == last
    logprobs = last["output"][1]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["3", "4", "5"]
    assert logprobs[0]["top_logprobs"] == [{"token": "9", "logprob": -2.0, "bytes": [57]}]


def test_the_grammar_refuses() -> None:
    """Every move that is not in the table is an error, so that a checker built on it can fail."""
    everything = {move for moves in MOVES.values() for move in moves}
    for place in Place:
        for move in everything:
            walk = EventGrammar()
            walk.place = place
            if move in MOVES[place]:
                assert walk.step(*move) == 0 and walk.place is MOVES[place][move]
            else:
                with pytest.raises(EventOrderError):
                    walk.step(*move)
    reached = {Place.START} | {target for moves in MOVES.values() for target in moves.values()}
    assert reached == set(Place)


@pytest.mark.parametrize("text", ["a", 'é\n"\\', "\0text\0", "-9007199254740992", "\u2028🙂"])
def test_ready_made_frames(text: str) -> None:
    """Deltas that are written from a ready-made frame are byte for byte those that are encoded whole."""
    fields: dict[str, Any] = {"output_index": 2, "item_id": "msg_1", "content_index": 0, "logprobs": []}
    made = DeltaFrame("response.output_text.delta", **fields).with_text(41, text)
    assert made == frame(ResponseEvent(type="response.output_text.delta", sequence_number=41, delta=text, **fields))
