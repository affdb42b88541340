"""Calls the model made, as chat completions write them: whole, and in chunks."""

from __future__ import annotations

from collections.abc import Iterable

from samovar.core.tools import ToolCallDelta
from samovar.server.openai.schema import CalledFunction, FunctionDelta, MadeToolCall, ToolCallChunk
from samovar.text.answer import AnswerLog


def made_calls(log: AnswerLog) -> list[MadeToolCall]:
    """The calls of an answer."""
    return [
        MadeToolCall(id=call.call_id, function=CalledFunction(name=call.name, arguments=call.arguments))
        for call in log.calls
    ]


def tool_chunks(deltas: Iterable[ToolCallDelta]) -> list[ToolCallChunk]:
    """News of calls as one chunk holds them: one entry a call. Id, type and name come with a call's first one only."""
    chunks: dict[int, ToolCallChunk] = {}
    for delta in deltas:
        chunk = chunks.get(delta.index)
        if chunk is None:
            chunk = chunks[delta.index] = ToolCallChunk(index=delta.index, function=FunctionDelta(arguments=""))
        function = chunk.function
        assert function is not None  # made above
        if delta.name is not None:
            chunk.id, chunk.type, function.name = delta.call_id, "function", delta.name
        function.arguments = (function.arguments or "") + delta.arguments
    return list(chunks.values())
