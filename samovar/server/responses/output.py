"""ResponseWriter: the events of a generation -> the items of a response, and the events of its stream.

The items that a stream adds are the objects of the final response, so that both say the same by construction; whole
answers are made by the same steps, without a stream.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from samovar.core.events import GenerationEvent, PositionLogprobs
from samovar.core.sequence import FinishReason
from samovar.core.tools import ToolCallDelta
from samovar.server.openai.logprobs import chat_logprobs
from samovar.server.pacing import Pacer
from samovar.server.problems import error_of
from samovar.server.responses import grammar
from samovar.server.responses.custom_input import CustomInput
from samovar.server.responses.running import DeltaFrame, frame
from samovar.server.responses.schema import (
    CustomCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    ResponseFailure,
    ResponseLogprob,
    ResponseObject,
    ResponseTopLogprob,
    ResponseUsage,
)
from samovar.server.responses.tools import ToolSet
from samovar.text.answer import AnswerLog

Sink = Callable[[bytes], None]

PAD_TO = 32
"""With obfuscation, deltas are filled up to a multiple of this many characters."""


def new_id(prefix: str) -> str:
    """An id nobody can guess."""
    return prefix + secrets.token_hex(24)


class ResponseWriter:
    """Fills `response` while it is generated; `sink` gets the frames of its stream, if there is one.

    `before_last` is called when the response has its final form, before the stream's last event.
    """

    def __init__(
        self,
        response: ResponseObject,
        tools: ToolSet,
        *,
        num_input_tokens: int,
        sink: Sink | None = None,
        top_logprobs: int | None = None,
        obfuscates: bool = False,
        interval: int = 1,
        before_last: Callable[[], None] | None = None,
    ) -> None:
        self.response = response
        self._tools = tools
        self._sink = sink
        self._top = top_logprobs
        self._obfuscates = obfuscates
        self._is_plain = top_logprobs is None and not obfuscates
        self._delta: DeltaFrame | None = None
        """How the deltas of the open item are written, if only their text differs."""
        self._before_last = before_last
        self._grammar = grammar.EventGrammar()
        self._pacer = Pacer(interval)
        self._item: OutputItem | None = None
        self._pieces: list[str] = []
        self._call = 0
        self._input = CustomInput()
        self._blank = ""
        self._held: list[PositionLogprobs] = []
        self._logprobs: list[ResponseLogprob] = []
        self._input_tokens = num_input_tokens
        self._log = AnswerLog()

    @property
    def has_begun(self) -> bool:
        """Whether the response was announced."""
        return self._grammar.next_number > 0

    @property
    def is_running(self) -> bool:
        """Whether the beginning of the work was announced."""
        return self._grammar.place not in (grammar.Place.START, grammar.Place.CREATED, grammar.Place.QUEUED)

    @property
    def is_over(self) -> bool:
        """Whether the last event was given out."""
        return self._grammar.is_over

    # --- the life of the response

    def create(self, *, queued: bool = False) -> None:
        """Announce the response; it is to `run` later if `queued`."""
        self.response.status = "queued" if queued else "in_progress"
        self._emit(grammar.CREATED, response=self.response)
        if queued:
            self._emit(grammar.QUEUED, response=self.response)

    def run(self) -> None:
        """Announce that work has begun."""
        if not self.has_begun:
            self.create()
        self.response.status = "in_progress"
        self._emit(grammar.IN_PROGRESS, response=self.response)

    def take(self, event: GenerationEvent) -> None:
        """What the model thought, said and called since the last event, and perhaps that it has ended."""
        self._log.add(event)
        for news in self._pacer.take(0, event):
            self._write(news)

    def _write(self, event: GenerationEvent) -> None:
        positions = event.logprobs or []
        if event.reasoning:
            self._think(event.reasoning)
        if event.text:
            self._say(event.text, self._held + positions[event.num_reasoning_tokens :])
            self._held = []
        elif not event.tool_calls:
            self._held += positions[event.num_reasoning_tokens :]
        for call in event.tool_calls:
            self._take_call(call)
        if event.finish_reason is not None:
            self._finish(event.finish_reason)

    def fail(self, failure: BaseException) -> None:
        """The response ends with an error. What was said until then stays."""
        if self.is_over:
            return
        if not self.has_begun:
            self.create()
        self._close_item("incomplete")
        self.response.status = "failed"
        self.response.error = ResponseFailure(code="server_error", message=error_of(failure).error.message)
        self._end(grammar.FAILED)

    def cancel(self) -> None:
        """The response ends because its client wants it to."""
        if self.is_over:
            return
        self._close_item("incomplete")
        self.response.status = "cancelled"
        self._end(grammar.INCOMPLETE)

    def _finish(self, reason: FinishReason) -> None:
        response = self.response
        is_cut = reason is FinishReason.LENGTH
        if self._item is None and not response.output and (self._blank or not is_cut):
            self._open_message()
        if self._blank and isinstance(self._item, MessageItem):
            self._add_text(self._blank, [])
        self._close_item("incomplete" if is_cut and self._is_unfinished() else "completed")
        if is_cut:
            response.status, response.incomplete_details = "incomplete", IncompleteDetails(reason="max_output_tokens")
            self._end(grammar.INCOMPLETE)
        elif reason is FinishReason.STOP:
            response.status, response.completed_at = "completed", int(time.time())
            self._end(grammar.COMPLETED)
        else:
            response.status = "cancelled"
            self._end(grammar.INCOMPLETE)

    def _end(self, event_type: str) -> None:
        self.response.usage = self._usage()
        if self._before_last is not None:
            self._before_last()
        self._emit(event_type, response=self.response)

    # --- items

    def _think(self, text: str) -> None:
        if not isinstance(self._item, ReasoningItem):
            item = ReasoningItem(id=new_id("rs_"))
            self._open(item, "reasoning")
            item.content.append(ReasoningText())
            self._emit_part(grammar.PART_ADDED, item.content[0], "reasoning_text")
        self._pieces.append(text)
        self._emit_delta(grammar.REASONING_DELTA, text, content_index=0)

    def _say(self, text: str, positions: list[PositionLogprobs]) -> None:
        if not isinstance(self._item, MessageItem):
            if not text.strip():
                # Blanks between reasoning and a call are no message; before text they belong to it.
                self._blank += text
                self._held = positions
                return
            self._open_message()
        text, self._blank = self._blank + text, ""
        self._add_text(text, positions)

    def _open_message(self) -> None:
        item = MessageItem(id=new_id("msg_"))
        self._open(item, "message")
        item.content.append(OutputText())
        self._logprobs = []
        self._emit_part(grammar.PART_ADDED, item.content[0], "output_text")

    def _add_text(self, text: str, positions: list[PositionLogprobs]) -> None:
        self._pieces.append(text)
        logprobs = [] if self._top is None else _logprobs(positions, self._top)
        self._logprobs += logprobs
        self._emit_delta(grammar.TEXT_DELTA, text, content_index=0, logprobs=logprobs)

    def _take_call(self, news: ToolCallDelta) -> None:
        self._blank, self._held = "", []
        item = self._item
        is_call = isinstance(item, (FunctionCallItem, CustomCallItem))
        if not is_call or news.index != self._call:
            item = self._open_call(news)
        if not news.arguments:
            return
        if isinstance(item, FunctionCallItem):
            self._pieces.append(news.arguments)
            self._emit_delta(grammar.ARGUMENTS_DELTA, news.arguments)
        else:
            self._add_input(self._input.feed(news.arguments))

    def _open_call(self, news: ToolCallDelta) -> OutputItem:
        target = self._tools.target(news.name or "")
        names: dict[str, Any] = {"call_id": news.call_id or new_id("call_"), "name": target.name}
        if target.namespace is not None:
            names["namespace"] = target.namespace
        item: OutputItem
        if target.is_custom:
            item, kind, self._input = CustomCallItem(id=new_id("ctc_"), **names), "custom_tool_call", CustomInput()
        else:
            item, kind = FunctionCallItem(id=new_id("fc_"), **names), "function_call"
        self._open(item, kind)
        self._call = news.index
        return item

    def _add_input(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._emit_delta(grammar.INPUT_DELTA, text)

    def _open(self, item: OutputItem, kind: str) -> None:
        self._close_item("completed")
        self._item, self._delta = item, None
        self._emit(grammar.ITEM_ADDED, kind, output_index=self._at, item=item)
        self.response.output.append(item)

    def _close_item(self, status: Any) -> None:
        """End the open item, if there is one: its part, if it has one, then itself."""
        item, text = self._item, "".join(self._pieces)
        if item is None:
            return
        where: dict[str, Any] = {"output_index": self._at, "item_id": item.id}
        match item:
            case MessageItem():
                kind, part = "message", item.content[0]
                part.text, part.logprobs = text, self._logprobs
                self._emit(grammar.TEXT_DONE, text=text, logprobs=part.logprobs, content_index=0, **where)
                self._emit_part(grammar.PART_DONE, part, "output_text")
            case ReasoningItem():
                kind, thought = "reasoning", item.content[0]
                thought.text = text
                self._emit(grammar.REASONING_DONE, text=text, content_index=0, **where)
                self._emit_part(grammar.PART_DONE, thought, "reasoning_text")
            case FunctionCallItem():
                kind, item.arguments = "function_call", text
                self._emit(grammar.ARGUMENTS_DONE, arguments=text, **where)
            case CustomCallItem():
                self._add_input(self._input.close())
                kind, item.input = "custom_tool_call", "".join(self._pieces)
                self._emit(grammar.INPUT_DONE, input=item.input, **where)
        item.status = status
        self._emit(grammar.ITEM_DONE, kind, output_index=self._at, item=item)
        self._item, self._pieces = None, []

    def _is_unfinished(self) -> bool:
        """Whether generation was cut inside the open item: a function's arguments may have been complete."""
        if not isinstance(self._item, FunctionCallItem):
            return True
        try:
            json.loads("".join(self._pieces))
        except (ValueError, RecursionError):
            return True
        return False

    # --- counting

    def _usage(self) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=self._input_tokens,
            output_tokens=len(self._log.token_ids),
            total_tokens=self._input_tokens + len(self._log.token_ids),
            input_tokens_details=InputTokensDetails(cached_tokens=self._log.num_cached_tokens),
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._log.num_reasoning_tokens),
        )

    # --- the stream

    @property
    def _at(self) -> int:
        """The index of the open item in the output."""
        is_listed = self._item is not None and self.response.output and self.response.output[-1] is self._item
        return len(self.response.output) - (1 if is_listed else 0)

    def _emit_part(self, event_type: str, part: OutputText | ReasoningText, kind: str) -> None:
        assert self._item is not None
        self._emit(event_type, kind, output_index=self._at, item_id=self._item.id, content_index=0, part=part)

    def _emit_delta(self, event_type: str, text: str, **fields: Any) -> None:
        assert self._item is not None
        if self._is_plain:
            number = self._grammar.step(event_type)
            if self._sink is None:
                return
            if self._delta is None:
                self._delta = DeltaFrame(event_type, output_index=self._at, item_id=self._item.id, **fields)
            self._sink(self._delta.with_text(number, text))
            return
        if self._obfuscates:
            fields["obfuscation"] = secrets.token_hex(PAD_TO)[: -len(text) % PAD_TO]
        self._emit(event_type, output_index=self._at, item_id=self._item.id, delta=text, **fields)

    def _emit(self, event_type: str, about: str = "", **fields: Any) -> None:
        number = self._grammar.step(event_type, about)
        if self._sink is not None:
            self._sink(frame(ResponseEvent(type=event_type, sequence_number=number, **fields)))


def _logprobs(positions: Sequence[PositionLogprobs], top: int) -> list[ResponseLogprob]:
    return [
        ResponseLogprob(
            token=entry.token,
            logprob=entry.logprob,
            bytes=entry.bytes,
            top_logprobs=[
                ResponseTopLogprob(token=other.token, logprob=other.logprob, bytes=other.bytes)
                for other in entry.top_logprobs
            ],
        )
        for entry in chat_logprobs(positions, top, as_ids=False).content
    ]
