"""POST /v1/chat/completions: parse, check, generate, stream or collect, finish."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from samovar.core.events import GenerationEvent, PositionLogprobs
from samovar.core.sequence import FinishReason
from samovar.core.tools import ToolCallDelta
from samovar.server.calls import send_stream
from samovar.server.endings import OPENAI, ending_of
from samovar.server.exchange import Exchange
from samovar.server.generate import Events, generate
from samovar.server.openai import refusals
from samovar.server.openai.choices import Answer, TokenCounts, collect
from samovar.server.openai.logprobs import chat_logprobs, prompt_logprobs
from samovar.server.openai.made_calls import made_calls, tool_chunks
from samovar.server.openai.prompts import ChatPrompt, prepare_chat, response_id
from samovar.server.openai.schema import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    Delta,
)
from samovar.server.pacing import Pacer
from samovar.server.parsing import decode_body
from samovar.server.state import ServingState
from samovar.text.answer import AnswerLog

_encode = msgspec.json.Encoder().encode
_MARK = "\x00text\x00"


async def create_chat_completion(state: ServingState, exchange: Exchange, body: bytes) -> None:
    """Answer one chat request, as JSON or as an event stream."""
    asked = decode_body(body, ChatCompletionRequest, refusals.CHAT)
    state.require_ready()
    model = state.check_model(asked.model)
    prompt = await prepare_chat(state, exchange, asked, body)
    reply = ChatReply(state, asked, model, prompt, response_id("chatcmpl-", asked.request_id, exchange))
    async with aclosing(generate(state, [prompt.request], [prompt.plan])) as events:
        if asked.stream:
            await send_stream(state, exchange, reply.frames(events))
        else:
            await exchange.reply(200, _encode(await reply.whole(events)))


class ChatReply:
    """Turns the events of one call into chunks or into one answer."""

    def __init__(
        self, state: ServingState, asked: ChatCompletionRequest, model: str, prompt: ChatPrompt, reply_id: str
    ) -> None:
        config = state.config
        self._asked = asked
        self._interval = asked.stream_interval or state.stream_interval
        self._prompt = prompt
        self._model = model
        self._id = reply_id
        self._created = int(time.time())
        self._fingerprint = state.fingerprint
        self._top = asked.top_logprobs or 0
        self._as_ids = bool(asked.return_tokens_as_token_ids or config.return_tokens_as_token_ids)
        self._counts = TokenCounts(
            [prompt.request], config.enable_prompt_tokens_details, thinks=prompt.plan.reasoning is not None
        )
        self._says_twice = config.reasoning_content_alias
        self._logs: defaultdict[int, AnswerLog] = defaultdict(AnswerLog)
        """What of a streamed choice decides its finish reason: its calls and its end."""
        options = asked.stream_options
        self._usage_at_end = bool(config.enable_force_include_usage or (options and options.include_usage))
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._is_plain = not (asked.logprobs or asked.return_token_ids or self._usage_always)
        self._frame_parts: dict[int, tuple[list[bytes], list[bytes]]] = {}
        self._call_parts: dict[tuple[int, int], list[bytes]] = {}

    async def frames(self, events: Events) -> AsyncGenerator[bytes, None]:
        """Events -> `data:` lines; each item may hold several."""
        pacer = Pacer(self._interval)
        counts, opened = self._counts, self._frame_parts
        async for choice, news in events:
            counts.take(choice, news)
            if news.tool_calls or news.finish_reason is not None:
                self._logs[choice].add(news)
            if not self._prompt.shows_reasoning:
                news.reasoning = ""
            for event in pacer.take(choice, news):
                head = b"" if choice in opened else self._open(choice)
                if not self._is_plain or event.finish_reason is not None:
                    yield head + self._frame(choice, event)
                elif not event.tool_calls:
                    yield head + self._quick(choice, event)
                else:
                    yield head + (self._quick_call(choice, event) or self._frame(choice, event))
        if self._usage_at_end:
            chunk = self._chunk([])
            chunk.usage = counts.usage()
            chunk.system_fingerprint = self._fingerprint
            yield _line(chunk)

    def _open(self, choice: int) -> bytes:
        """The first lines of a choice: its role, and the echo if one was asked for."""
        first = self._chunk([ChatChunkChoice(index=choice, delta=Delta(role=self._prompt.role, content=""))])
        if self._asked.return_token_ids:
            first.prompt_token_ids = self._prompt.request.prompt_token_ids
        if self._prompt.num_truncated:
            first.num_truncated_prompt_tokens = self._prompt.num_truncated
        lines = _line(first)
        if self._prompt.echo:
            lines += _line(self._chunk([ChatChunkChoice(index=choice, delta=Delta(content=self._prompt.echo))]))
        self._frame_parts[choice] = (
            self._parts(choice, Delta(content=_MARK)),
            self._parts(choice, self._thought(_MARK)),
        )
        return lines

    def _parts(self, choice: int, delta: Delta) -> list[bytes]:
        """What is around the text in a chunk that holds nothing else."""
        return _line(self._chunk([ChatChunkChoice(index=choice, delta=delta)])).split(_encode(_MARK))

    def _thought(self, text: str) -> Delta:
        return Delta(reasoning=text, reasoning_content=text if self._says_twice else None)

    def _quick(self, choice: int, event: GenerationEvent) -> bytes:
        """The chunks of an event with text only."""
        around_text, around_thought = self._frame_parts[choice]
        lines = _encode(event.text).join(around_text) if event.text else b""
        if event.reasoning:
            lines = _encode(event.reasoning).join(around_thought) + lines
        return lines

    def _quick_call(self, choice: int, event: GenerationEvent) -> bytes | None:
        """The chunk of an event with nothing but a piece of one call's arguments; None for any other event."""
        (delta, *others) = event.tool_calls
        if others or delta.name is not None or event.text or event.reasoning or self._prompt.is_legacy:
            return None
        parts = self._call_parts.get((choice, delta.index))
        if parts is None:
            piece = tool_chunks([ToolCallDelta(delta.index, arguments=_MARK)])
            parts = self._call_parts[choice, delta.index] = self._parts(choice, Delta(tool_calls=piece))
        return _encode(delta.arguments).join(parts)

    def _frame(self, choice: int, event: GenerationEvent) -> bytes:
        delta = self._thought(event.reasoning) if event.reasoning else Delta()
        delta.content = event.text or None
        if event.tool_calls and self._prompt.is_legacy:
            delta.function_call = tool_chunks(event.tool_calls)[0].function
        elif event.tool_calls:
            delta.tool_calls = tool_chunks(event.tool_calls)
        chunk_choice = ChatChunkChoice(index=choice, delta=delta, logprobs=self._logprobs(event.logprobs))
        if self._asked.return_token_ids:
            chunk_choice.token_ids = event.token_ids
        chunk = self._chunk([chunk_choice])
        if event.finish_reason is not None:
            made_calls = self._logs[choice].made_calls
            chunk_choice.finish_reason = self._ending(event.finish_reason, event.stop_reason, made_calls=made_calls)
            chunk_choice.stop_reason = event.stop_reason
            chunk.system_fingerprint = self._fingerprint
        if self._usage_always:
            chunk.usage = self._counts.usage()
        return _line(chunk)

    def _ending(self, reason: FinishReason, stop_reason: int | str | None, *, made_calls: bool) -> str:
        spelled = OPENAI[ending_of(reason, stop_reason, made_calls=made_calls)]
        return "function_call" if spelled == "tool_calls" and self._prompt.is_legacy else spelled

    def _logprobs(self, positions: list[PositionLogprobs] | None) -> ChatLogprobs | None:
        if not self._asked.logprobs:
            return None
        return chat_logprobs(positions or [], self._top, self._as_ids)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=choices)

    async def whole(self, events: Events) -> ChatCompletion:
        """Every event -> one answer."""
        answers = await collect(events, self._counts, self._prompt.request.params.n)
        whole = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
            usage=self._counts.usage(),
            system_fingerprint=self._fingerprint,
        )
        if self._asked.prompt_logprobs is not None:
            whole.prompt_logprobs = prompt_logprobs(answers[0].prompt_logprobs or [], self._asked.prompt_logprobs)
        if self._asked.return_token_ids:
            whole.prompt_token_ids = self._prompt.request.prompt_token_ids
        if self._prompt.num_truncated:
            whole.num_truncated_prompt_tokens = self._prompt.num_truncated
        return whole

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        log = answer.log
        choice = ChatChoice(
            index=index,
            message=self._message(log),
            finish_reason=self._ending(answer.finish_reason, log.stop_reason, made_calls=log.made_calls),
            logprobs=self._logprobs(answer.logprobs),
            stop_reason=log.stop_reason,
        )
        if self._asked.return_token_ids:
            choice.token_ids = log.token_ids
        return choice

    def _message(self, log: AnswerLog) -> AssistantMessage:
        content = self._prompt.echo + log.text
        calls = made_calls(log)
        message = AssistantMessage(role=self._prompt.role, content=content if content or not calls else None)
        if log.reasoning and self._prompt.shows_reasoning:
            message.reasoning = log.reasoning
            if self._says_twice:
                message.reasoning_content = log.reasoning
        if calls and self._prompt.is_legacy:
            message.function_call = calls[0].function
        elif calls:
            message.tool_calls = calls
        return message


def _line(chunk: ChatCompletionChunk) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"
