"""POST /v1/responses: parse, check, generate; stream, collect, or go on in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from samovar.core.events import GenerationEvent
from samovar.server.calls import send_stream
from samovar.server.exchange import Exchange
from samovar.server.generate import Events, generate
from samovar.server.parsing import decode_body
from samovar.server.responses.output import ResponseWriter
from samovar.server.responses.prepare import ReadResponse, prepare_response
from samovar.server.responses.refusals import KNOWN
from samovar.server.responses.running import RunningResponse
from samovar.server.responses.schema import ResponseInputTokens, ResponseRequest
from samovar.server.responses.store import KeptResponse, ResponseStore
from samovar.server.state import ServingState

_encode = msgspec.json.Encoder().encode


async def create_response(state: ServingState, exchange: Exchange, body: bytes) -> None:
    """Answer one request, as JSON or as an event stream."""
    asked = decode_body(body, ResponseRequest, KNOWN)
    state.require_ready()
    model = state.check_model(asked.model)
    ready = await prepare_response(state, exchange, asked, body, model)
    exchange.response_id = ready.response.id
    if asked.background:
        run = _begin_background(state, exchange, ready)
        if asked.stream:
            await send_stream(state, exchange, run.follow(-1), last_words=run.last_words, end=b"")
        else:
            await exchange.reply(200, _encode(run.response))
        return
    async with aclosing(generate(state, [ready.request], [ready.plan])) as events:
        if asked.stream:
            stream = _Stream(state, ready)
            await send_stream(state, exchange, stream.frames(events), last_words=stream.last_words, end=b"")
        else:
            writer = _writer(state, ready, None)
            async for _, event in events:
                _take(writer, event)
            await exchange.reply(200, _encode(ready.response))


async def count_input_tokens(state: ServingState, exchange: Exchange, body: bytes) -> None:
    """Answer how many tokens the prompt of a request would have; nothing is generated or stored."""
    asked = decode_body(body, ResponseRequest, KNOWN)
    state.require_ready()
    model = state.check_model(asked.model)
    ready = await prepare_response(state, exchange, asked, body, model)
    counted = ResponseInputTokens(input_tokens=len(ready.request.prompt_token_ids))
    await exchange.reply(200, _encode(counted))


def _writer(state: ServingState, ready: ReadResponse, sink: Callable[[bytes], None] | None) -> ResponseWriter:
    return ResponseWriter(
        ready.response,
        ready.tools,
        num_input_tokens=len(ready.request.prompt_token_ids),
        sink=sink,
        top_logprobs=ready.top_logprobs,
        obfuscates=ready.obfuscates,
        interval=state.stream_interval,
        before_last=lambda: _keep(state.responses, ready),
    )


def _take(writer: ResponseWriter, event: GenerationEvent) -> None:
    """Begin with the first event: what fails before it is a plain HTTP error."""
    if not writer.is_running:
        writer.run()
    writer.take(event)


def _keep(store: ResponseStore, ready: ReadResponse) -> None:
    """Put a response that has its final form into the store, if it is to be stored."""
    response = ready.response
    if not response.store:
        return
    kept = KeptResponse(
        response_id=response.id,
        owner=ready.owner,
        previous=response.previous_response_id,
        input_items=ready.input_items,
        body=_encode(response),
        is_background=response.background,
        item_ids=(*ready.item_ids, *(item.id for item in response.output)),
    )
    if not store.put(kept):
        response.store = False
        notices = response.notices if isinstance(response.notices, list) else []
        response.notices = [*notices, "store was skipped: the store has no room for it (--responses-store-bytes)"]


# --- streams


class _Stream:
    """The frames of one response that is generated for the client that waits for it."""

    def __init__(self, state: ServingState, ready: ReadResponse) -> None:
        self._new: list[bytes] = []
        self._writer = _writer(state, ready, self._new.append)

    async def frames(self, events: Events) -> AsyncGenerator[bytes, None]:
        """Events -> frames; each item may hold several."""
        async for _, event in events:
            _take(self._writer, event)
            if self._new:
                yield self._taken()

    def last_words(self, failure: BaseException) -> bytes:
        """The frames that tell of a failure."""
        self._writer.fail(failure)
        return self._taken()

    def _taken(self) -> bytes:
        frames = b"".join(self._new)
        self._new.clear()
        return frames


# --- the background


def _begin_background(state: ServingState, exchange: Exchange, ready: ReadResponse) -> RunningResponse:
    """Start to generate, whatever becomes of the connection."""
    run = RunningResponse(ready.response, ready.owner)
    state.responses.begin(run)
    writer = _writer(state, ready, run.add)
    writer.create(queued=True)
    run.task = asyncio.ensure_future(_run_background(state, exchange, ready, run, writer))
    state.enter(run.task, exchange)
    return run


async def _run_background(
    state: ServingState, exchange: Exchange, ready: ReadResponse, run: RunningResponse, writer: ResponseWriter
) -> None:
    state.num_calls += 1
    try:
        async with aclosing(generate(state, [ready.request], [ready.plan])) as events:
            async for _, event in events:
                _take(writer, event)
    except asyncio.CancelledError:
        if exchange.ended_by is None:
            writer.cancel()
        else:
            writer.fail(exchange.ended_by)
    except Exception as error:  # the boundary of a response: those who ask for it are told, the server goes on
        writer.fail(error)
    finally:
        state.num_calls -= 1
        run.end()
        state.responses.end(run)
