"""POST /v1/chat/completions: parse, check, generate, stream or collect, finish."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from samovar.core.events import GenerationEvent, PositionLogprobs
from samovar.server.calls import send_stream
from samovar.server.exchange import Exchange
from samovar.server.generate import Events, generate
from samovar.server.openai import refusals
from samovar.server.openai.choices import Answer, Pacer, TokenCounts, collect
from samovar.server.openai.logprobs import chat_logprobs, prompt_logprobs
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
from samovar.server.parsing import decode_body
from samovar.server.state import ServingState

_encode = msgspec.json.Encoder().encode
_MARK = "\x00text\x00"


async def create_chat_completion(state: ServingState, exchange: Exchange, body: bytes) -> None:
    """Answer one chat request, as JSON or as an event stream."""
    asked = decode_body(body, ChatCompletionRequest, refusals.CHAT)
    state.require_ready()
    model = state.check_model(asked.model)
    prompt = await prepare_chat(state, asked, body)
    reply = ChatReply(state, asked, model, prompt, response_id("chatcmpl-", asked.request_id, exchange))
    async with aclosing(generate(state, [prompt.request])) as events:
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
        self._counts = TokenCounts([prompt.request], config.enable_prompt_tokens_details)
        options = asked.stream_options
        self._usage_at_end = bool(config.enable_force_include_usage or (options and options.include_usage))
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._is_plain = not (asked.logprobs or asked.return_token_ids or self._usage_always)
        self._frame_parts: dict[int, tuple[bytes, bytes]] = {}

    async def frames(self, events: Events) -> AsyncGenerator[bytes, None]:
        """Events -> `data:` lines; each item may hold several."""
        pacer = Pacer(self._interval)
        counts, opened = self._counts, self._frame_parts
        async for choice, news in events:
            counts.take(choice, news)
            event = pacer.take(choice, news)
            if event is None:
                continue
            head = b"" if choice in opened else self._open(choice)
            if self._is_plain and event.finish_reason is None:
                before, after = opened[choice]
                yield head + before + _encode(event.text) + after
            else:
                yield head + self._frame(choice, event)
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
        sample = _line(self._chunk([ChatChunkChoice(index=choice, delta=Delta(content=_MARK))]))
        before, _, after = sample.partition(_encode(_MARK))
        self._frame_parts[choice] = (before, after)
        return lines

    def _frame(self, choice: int, event: GenerationEvent) -> bytes:
        chunk_choice = ChatChunkChoice(
            index=choice, delta=Delta(content=event.text or None), logprobs=self._logprobs(event.logprobs)
        )
        if self._asked.return_token_ids:
            chunk_choice.token_ids = event.token_ids
        chunk = self._chunk([chunk_choice])
        if event.finish_reason is not None:
            chunk_choice.finish_reason = event.finish_reason.value
            chunk_choice.stop_reason = event.stop_reason
            chunk.system_fingerprint = self._fingerprint
        if self._usage_always:
            chunk.usage = self._counts.usage()
        return _line(chunk)

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
        choice = ChatChoice(
            index=index,
            message=AssistantMessage(role=self._prompt.role, content=self._prompt.echo + answer.text),
            finish_reason=answer.finish_reason.value,
            logprobs=self._logprobs(answer.logprobs),
            stop_reason=answer.stop_reason,
        )
        if self._asked.return_token_ids:
            choice.token_ids = answer.token_ids
        return choice


def _line(chunk: ChatCompletionChunk) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"
