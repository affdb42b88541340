"""MessageWriter: generation events -> the events of a message, in the order `StreamRules` allows; `fold` makes them one.

An answer that is not streamed is the fold of the same events, so that the two cannot differ.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from functools import cache
from hashlib import blake2b

import msgspec
from msgspec import UNSET

from samovar.core.events import GenerationEvent
from samovar.core.request import Request
from samovar.core.sequence import FinishReason
from samovar.core.tools import ToolCallDelta
from samovar.server.anthropic.partial_json import complete_members
from samovar.server.anthropic.schema import (
    AnswerBlock,
    AnswerMessage,
    AppliedEdits,
    BlockDelta,
    BlockStart,
    BlockStop,
    FinalUsage,
    InputDelta,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    OutputTokensDetails,
    SignatureDelta,
    StopDelta,
    StopReason,
    StreamEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from samovar.server.anthropic.stream_rules import BEFORE, StreamRules
from samovar.server.anthropic.tool_ids import public_id
from samovar.server.endings import Ending, ending_of
from samovar.server.problems import ChoiceFailedError
from samovar.text.answer import AnswerLog

REASONS: dict[Ending, StopReason] = {
    "stop": "end_turn", "stop_sequence": "stop_sequence", "calls": "tool_use", "length": "max_tokens",
}  # fmt: skip


class MessageWriter:
    """Writes one answer: `feed` it every generation event; the last one ends the message.

    message_start comes with the first tokens, whose event tells what was cached, unless `start` was called before.
    """

    def __init__(self, asked: MessagesRequest, request: Request, model: str, message_id: str, *, context: int) -> None:
        self.rules = StreamRules()
        self._log = AnswerLog()
        self._num_prompt_tokens = len(request.prompt_token_ids)
        most = request.params.max_tokens or 0
        self._fills_context = most < asked.max_tokens and len(request.prompt_token_ids) + most >= context
        self._model, self._id = model, message_id
        self._edits = AppliedEdits() if asked.context_management is not None else UNSET
        self._hides_thoughts = asked.thinking is not None and asked.thinking.display == "omitted"
        self._open = ""
        """The kind of the open block."""
        self._blanks = ""
        """Blank text that no block was opened for: it counts once something else is said."""
        self._thought = blake2b(digest_size=24)
        self._early: list[GenerationEvent] = []
        """News that wait for message_start."""

    @property
    def is_started(self) -> bool:
        """Whether message_start was written."""
        return self.rules.state != BEFORE

    def start(self) -> MessageStart:
        """The first event, with the counts known so far."""
        self.rules.advance("message_start")
        return MessageStart(message=AnswerMessage(id=self._id, model=self._model, usage=_whole(self._usage())))

    def feed(self, event: GenerationEvent) -> list[StreamEvent]:
        """What an event adds to the message."""
        self._log.add(event)
        self._early.append(event)
        if not self.is_started and not event.token_ids and event.finish_reason is None:
            return []
        out: list[StreamEvent] = [] if self.is_started else [self.start()]
        for news in self._early:
            self._take(news, out)
        self._early = []
        return out

    def _take(self, event: GenerationEvent, out: list[StreamEvent]) -> None:
        if event.reasoning:
            self._think(event.reasoning, out)
        if event.text:
            self._say(event.text, out)
        for call in event.tool_calls:
            self._call(call, out)
        if event.finish_reason is not None:
            reason, sequence = self._reason(event.finish_reason, event.stop_reason)
            self._close(out)
            out += self._end(reason, sequence)

    def _think(self, text: str, out: list[StreamEvent]) -> None:
        self._switch("thinking", ThinkingBlock(), out)
        self._thought.update(text.encode("utf-8", "surrogatepass"))
        if not self._hides_thoughts:
            self._delta(ThinkingDelta(thinking=text), "thinking_delta", out)

    def _say(self, text: str, out: list[StreamEvent]) -> None:
        if self._open != "text":
            text = self._blanks + text
            if text.isspace():
                self._blanks = text
                return
        self._switch("text", TextBlock(), out)
        self._delta(TextDelta(text=text), "text_delta", out)

    def _call(self, call: ToolCallDelta, out: list[StreamEvent]) -> None:
        if call.call_id is not None:
            self._close(out)
            self._switch("tool_use", ToolUseBlock(id=public_id(call.call_id), name=call.name or ""), out)
        if call.arguments:
            self._delta(InputDelta(partial_json=call.arguments), "input_json_delta", out)

    def _switch(self, kind: str, block: AnswerBlock, out: list[StreamEvent]) -> None:
        """Have a block of this kind open."""
        if self._open != kind:
            self._close(out)
            self.rules.advance(f"content_block_start {kind}", self.rules.index)
            self._open, self._blanks = kind, ""
            out.append(BlockStart(index=self.rules.index, content_block=block))

    def _delta(
        self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta, kind: str, out: list[StreamEvent]
    ) -> None:
        self.rules.advance(f"content_block_delta {kind}", self.rules.index)
        out.append(BlockDelta(index=self.rules.index, delta=delta))

    def _close(self, out: list[StreamEvent]) -> None:
        if not self._open:
            return
        if self._open == "thinking":
            self._delta(SignatureDelta(signature=self._signature()), "signature_delta", out)
        out.append(BlockStop(index=self.rules.index))
        self.rules.advance("content_block_stop", self.rules.index)
        self._open = ""

    def _signature(self) -> str:
        """A name of the thought. Nobody checks it; clients want one that is not empty, and hand it back."""
        signature = base64.b64encode(self._thought.digest()).decode()
        self._thought = blake2b(digest_size=24)
        return signature

    def _end(self, reason: StopReason, sequence: str | None) -> list[StreamEvent]:
        self.rules.advance("message_delta")
        delta = MessageDelta(
            delta=StopDelta(stop_reason=reason, stop_sequence=sequence),
            usage=self._usage(),
            context_management=self._edits,
        )
        self.rules.advance("message_stop")
        return [delta, MessageStop()]

    def _reason(self, reason: FinishReason, stop_reason: int | str | None) -> tuple[StopReason, str | None]:
        sequence = stop_reason if isinstance(stop_reason, str) else None  # this API knows no stop tokens
        ending = ending_of(reason, sequence, made_calls=self._log.made_calls)
        if ending == "abort":
            raise ChoiceFailedError("the answer was ended by the server before it was complete; send it again")
        if ending == "length" and self._fills_context:
            return "model_context_window_exceeded", None
        return REASONS[ending], sequence if ending == "stop_sequence" else None

    def _usage(self) -> FinalUsage:
        """The counts so far."""
        cached = self._log.num_cached_tokens
        return FinalUsage(
            input_tokens=self._num_prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=len(self._log.token_ids),
            output_tokens_details=OutputTokensDetails(thinking_tokens=self._log.num_reasoning_tokens),
        )


def fold(events: Iterable[StreamEvent]) -> AnswerMessage:
    """All events of a message -> the message."""
    message: AnswerMessage | None = None
    texts: list[list[str]] = []
    for event in events:
        if isinstance(event, MessageStart):
            message = event.message
            continue
        assert message is not None  # StreamRules: message_start is the first
        if isinstance(event, BlockStart):
            message.content = [*message.content, event.content_block]
            texts.append([])
        elif isinstance(event, BlockDelta):
            _add(message.content[event.index], event.delta, texts[event.index])
        elif isinstance(event, BlockStop):
            _complete(message.content[event.index], "".join(texts[event.index]))
        elif isinstance(event, MessageDelta):
            message.stop_reason, message.stop_sequence = event.delta.stop_reason, event.delta.stop_sequence
            message.context_management = event.context_management
            message.usage = _whole(event.usage)
    assert message is not None
    return message


def _whole(counts: FinalUsage) -> Usage:
    """The counts as a message has them."""
    return Usage(**{name: getattr(counts, name) for name in counts.__struct_fields__})


def _add(block: AnswerBlock, delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta, texts: list[str]) -> None:
    if isinstance(delta, TextDelta):
        texts.append(delta.text)
    elif isinstance(delta, ThinkingDelta):
        texts.append(delta.thinking)
    elif isinstance(delta, InputDelta):
        texts.append(delta.partial_json)
    elif isinstance(block, ThinkingBlock):
        block.signature = delta.signature


def _complete(block: AnswerBlock, text: str) -> None:
    if isinstance(block, TextBlock):
        block.text = text
    elif isinstance(block, ThinkingBlock):
        block.thinking = text
    else:
        block.input = complete_members(text)


def frame(event: StreamEvent) -> bytes:
    """An event as it goes over the wire."""
    return _head(type(event)) + _encode(event) + b"\n\n"


@cache
def _head(kind: type[StreamEvent]) -> bytes:
    return f"event: {kind.__struct_config__.tag}\ndata: ".encode()


_encode = msgspec.json.Encoder().encode
