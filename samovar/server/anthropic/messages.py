"""POST /v1/messages and /v1/messages/count_tokens: parse, check, generate, stream or collect."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from samovar.errors import NotFoundError
from samovar.server.anthropic.answer import MessageWriter, fold, frame
from samovar.server.anthropic.asking import NAMES, Keeping, read_budget, read_dialogue, read_values
from samovar.server.anthropic.problems import error_frame
from samovar.server.anthropic.schema import (
    AnswerMessage,
    CountTokensRequest,
    MessagesRequest,
    Ping,
    StreamEvent,
    TokenCount,
)
from samovar.server.calls import send_stream
from samovar.server.dialogues import prepare_dialogue, spelled
from samovar.server.exchange import Exchange
from samovar.server.generate import Events, generate
from samovar.server.keys import caller_of
from samovar.server.pacing import Pacer
from samovar.server.parsing import decode_body
from samovar.server.state import ServingState
from samovar.text.dialogue import Dialogue

PING_SECONDS = 10.0
"""Silence after which a stream sends a ping, where --sse-keep-alive-interval says nothing."""
ALIAS_PREFIX = "claude"

_encode = msgspec.json.Encoder().encode
_PING = frame(Ping())


async def create_message(state: ServingState, exchange: Exchange, body: bytes) -> None:
    """Answer one message request, as JSON or as an event stream."""
    _name_request(exchange)
    asked = decode_body(body, MessagesRequest, {})
    state.require_ready()
    model = check_model(state, asked.model)
    exchange.response_id = "msg_" + uuid.uuid4().hex[:24]
    values = read_values(asked, exchange.header(b"anthropic-beta") or "")
    dialogue = await _read(state, exchange, asked, len(body))
    prepared = await prepare_dialogue(state, exchange, dialogue, values, size=len(body), spelling=NAMES)
    writer = MessageWriter(
        asked,
        prepared.request,
        model,
        exchange.response_id,
        context=state.client.info.max_model_len,
    )
    async with aclosing(generate(state, [prepared.request], [prepared.plan])) as events:
        if asked.stream:
            stream, signs = frames(writer, events, state.stream_interval), _signs_of_life(state, exchange, writer)
            await send_stream(
                state, exchange, stream, last_words=lambda failure: _last_words(writer, failure), end=b"", signs=signs
            )
        else:
            await exchange.reply(200, _encode(await _whole(writer, events)))


async def count_tokens(state: ServingState, exchange: Exchange, body: bytes) -> None:
    """The length of the prompt that the same body would make."""
    _name_request(exchange)
    asked = decode_body(body, CountTokensRequest, {})
    state.require_loaded()
    check_model(state, asked.model)
    preparer, values = state.preparer, {"thinking_token_budget": read_budget(asked)}
    dialogue = await _read(state, exchange, asked, len(body))
    ids = await state.offload(len(body), lambda: spelled(lambda: preparer.encode_dialogue(dialogue, values), NAMES))
    await exchange.reply(200, _encode(TokenCount(input_tokens=len(ids))))


def check_model(state: ServingState, name: str) -> str:
    """The name to report. With --anthropic-model-aliases every name that begins with "claude" is the served model."""
    if state.config.anthropic_model_aliases and name.startswith(ALIAS_PREFIX):
        return state.names[0]
    try:
        return state.check_model(name)
    except NotFoundError as error:
        if not name.startswith(ALIAS_PREFIX):
            raise
        message = (
            f"{error}; --anthropic-model-aliases would let it answer to all names that begin with {ALIAS_PREFIX!r}"
        )
        raise NotFoundError(message, parameter="model") from None


def _keeping(state: ServingState, exchange: Exchange) -> Keeping | None:
    if not state.config.anthropic_volatile_lines:
        return None
    caller = caller_of(exchange.scope)
    return Keeping(memory=state.system_memory, owner=f"{caller.name}\0{caller.salt}")


async def _read(state: ServingState, exchange: Exchange, asked: CountTokensRequest, size: int) -> Dialogue:
    keeping, may_choose = _keeping(state, exchange), state.config.enable_auto_tool_choice
    return await state.offload(
        size, lambda: spelled(lambda: read_dialogue(asked, keeping, may_choose=may_choose), NAMES)
    )


def _name_request(exchange: Exchange) -> None:
    """Anthropic's clients show this header's value as the id of the request."""
    request_id = exchange.scope.get("samovar.request_id") or uuid.uuid4().hex[:24]
    exchange.extra_headers.append((b"request-id", f"req_{request_id}".encode()))


# --- answers


async def _whole(writer: MessageWriter, events: Events) -> AnswerMessage:
    log: list[StreamEvent] = []
    async for _, news in events:
        log += writer.feed(news)
    return fold(log)


async def frames(writer: MessageWriter, events: Events, interval: int) -> AsyncGenerator[bytes, None]:
    """Events -> what to write, each time whole events."""
    pacer = Pacer(interval)
    async for choice, news in events:
        for event in pacer.take(choice, news):
            if written := writer.feed(event):
                yield frame(written[0]) if len(written) == 1 else b"".join(map(frame, written))


async def _signs_of_life(state: ServingState, exchange: Exchange, writer: MessageWriter) -> None:
    """A ping after each while of silence; runs until cancelled.

    message_start waits for the engine's first news, which tell what was cached. If they take long, it comes with the
    first ping, and message_delta tells.
    """
    interval = state.config.sse_keep_alive_interval or PING_SECONDS
    exchange.last_write = time.monotonic()
    while True:
        await asyncio.sleep(max(0.01, exchange.last_write + interval - time.monotonic()))
        if time.monotonic() - exchange.last_write >= interval:
            if not writer.is_started:
                await exchange.write(frame(writer.start()) + _PING)
            elif exchange.is_started:
                await exchange.write(_PING)


def _last_words(writer: MessageWriter, failure: BaseException) -> bytes:
    """The event that tells of a failure, unless the message has ended."""
    if writer.rules.is_over:
        return b""
    writer.rules.advance("error")
    return error_frame(failure)
