"""The methods of samovar.v1.Inference over a `ServingState`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from samovar.core.events import GenerationEvent, LogprobEntry, PositionLogprobs
from samovar.core.sequence import FinishReason
from samovar.errors import ValidationError
from samovar.server.generate import generate
from samovar.server.grpc.asking import Asked, prepare
from samovar.server.grpc.guard import end_with, scope_with_caller
from samovar.server.grpc.proto import Interface
from samovar.server.keys import caller_of
from samovar.server.problems import ChoiceFailedError
from samovar.server.state import ServingState
from samovar.server.version import version

REASONS = {FinishReason.STOP: 1, FinishReason.LENGTH: 2, FinishReason.ABORT: 3}
"""Finish reason -> number in the enum Reason."""
MAX_ABORTED_IDS = 4096


@dataclass(slots=True, eq=False)
class _Running:
    """A call of Generate that Abort may end."""

    engine_id: str
    is_aborted: bool = False


class Inference:
    """One server's methods. Calls are found again under the caller's name and the id that the caller chose."""

    def __init__(self, state: ServingState, interface: Interface) -> None:
        self._state = state
        self._types = interface
        self._running: dict[tuple[str, str], list[_Running]] = {}

    def handlers(self) -> dict[str, Any]:
        """Method name -> handler, as grpc takes them."""
        types = self._types
        single: dict[str, tuple[str, Callable[[Any, Any], Awaitable[Any]]]] = {
            "Abort": ("AbortRequest", self.abort),
            "HealthCheck": ("HealthCheckRequest", self.check_health),
            "GetModelInfo": ("GetModelInfoRequest", self.show_model),
            "GetServerInfo": ("GetServerInfoRequest", self.show_server),
        }
        found = {
            name: grpc.unary_unary_rpc_method_handler(
                _guarded(method), request_deserializer=_reader(types[asked]), response_serializer=_to_bytes
            )
            for name, (asked, method) in single.items()
        }
        found["Generate"] = grpc.unary_stream_rpc_method_handler(
            self.generate, request_deserializer=_reader(types["GenerateRequest"]), response_serializer=_to_bytes
        )
        return found

    async def generate(self, asked: Any, context: Any) -> AsyncGenerator[Any, None]:
        """Generate: replies until every choice has ended. A client that leaves cancels this, which aborts the request."""
        state = self._state
        state.num_calls += 1
        try:
            async with aclosing(self._replies(_read(asked), context)) as replies:
                async for reply in replies:
                    yield reply
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the boundary of a call: its client is told, the server goes on
            await end_with(context, error)
        finally:
            state.num_calls -= 1

    async def _replies(self, asked: Any, context: Any) -> AsyncGenerator[Any, None]:
        state = self._state
        state.require_ready()
        scope = scope_with_caller(state.keys, context)
        call = await prepare(state, scope, asked)
        own = _Running(call.request.request_id)
        name = (caller_of(scope).name, asked.request_id)
        self._running.setdefault(name, []).append(own)
        writer = _Writer(self._types, call)
        try:
            async with aclosing(generate(state, [call.request])) as events:
                async for _, event in events:
                    for reply in writer.take(event):
                        yield reply
        except ChoiceFailedError:
            if not own.is_aborted:
                raise
            for reply in writer.abort():
                yield reply
        finally:
            self._running[name].remove(own)
            if not self._running[name]:
                del self._running[name]

    async def abort(self, asked: Any, context: Any) -> Any:
        """Abort: ends the caller's own calls; their last replies say so."""
        if len(asked.request_ids) > MAX_ABORTED_IDS:
            message = f"request_ids: at most {MAX_ABORTED_IDS}, got {len(asked.request_ids)}"
            raise ValidationError(message, parameter="request_ids")
        caller = caller_of(scope_with_caller(self._state.keys, context)).name
        answer = self._types["AbortReply"]()
        for request_id in dict.fromkeys(asked.request_ids):
            calls = list(self._running.get((caller, request_id), ()))
            for call in calls:
                call.is_aborted = True
                await self._state.client.abort(call.engine_id)
            answer.num_aborted += len(calls)
            if not calls:
                answer.unknown.append(request_id)
        return answer

    async def check_health(self, asked: Any, context: Any) -> Any:
        """HealthCheck: answered as long as the server lives."""
        state = self._state
        is_ready = state.status == "ready"
        return self._types["HealthCheckReply"](
            is_alive=not state.has_dead_engine, is_ready=is_ready, status=state.status
        )

    async def show_model(self, asked: Any, context: Any) -> Any:
        """GetModelInfo: the model, and the limits that follow from it."""
        state = self._state
        preparer, engine = state.preparer, state.client.info
        return self._types["ModelInfo"](
            names=state.names,
            model=engine.model,
            architecture=engine.architecture,
            dtype=engine.dtype,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            eos_token_ids=preparer.eos_token_ids,
            has_tokenizer=preparer.tokenizer is not None,
        )

    async def show_server(self, asked: Any, context: Any) -> Any:
        """GetServerInfo: what a client may know; the settings are for operators, over HTTP."""
        state = self._state
        return self._types["ServerInfo"](
            version=version(), status=state.status, num_calls=state.num_calls, started=state.created
        )


def _guarded(method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(asked: Any, context: Any) -> Any:
        try:
            return await method(_read(asked), context)
        except Exception as error:  # the boundary of a call
            return await end_with(context, error)

    return call


def _reader(message: Any) -> Callable[[bytes], Any]:
    """Bytes -> a message, or the error that its method is to tell of: one raised here, grpc would log and not name."""

    def read(data: bytes) -> Any:
        try:
            return message.FromString(data)
        except DecodeError:
            return ValidationError(f"the request is no {message.DESCRIPTOR.full_name}; see inference.proto")

    return read


def _read(asked: Any) -> Any:
    if isinstance(asked, ValidationError):
        raise asked
    return asked


def _to_bytes(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded


class _Writer:
    """Turns the events of one call into replies."""

    def __init__(self, types: Interface, call: Asked) -> None:
        self._types = types
        self._call = call
        self._counts = [0] * call.request.params.n
        self._open = set(range(call.request.params.n))
        self._is_first = True

    def take(self, event: GenerationEvent) -> list[Any]:
        """The replies for one event."""
        replies = self._begin()
        news = self._news(event.index)
        self._counts[event.index] += len(event.token_ids)
        if self._call.shows_text:
            news.text = event.text
        if self._call.shows_token_ids:
            news.token_ids.extend(event.token_ids)
        news.logprobs.extend(self._position(p) for p in event.logprobs or ())
        news.prompt_logprobs.extend(self._position(p) for p in event.prompt_logprobs or ())
        if event.finish_reason is not None:
            self._finish(news, event)
        if news.ByteSize() > (2 if event.index else 0):  # more than the index: something to say
            replies.append(self._types["GenerateReply"](choice=news))
        return replies

    def abort(self) -> list[Any]:
        """The last replies of a call that Abort ended."""
        replies = self._begin()
        for index in sorted(self._open):
            news = self._news(index)
            news.finish.reason, news.finish.num_tokens = REASONS[FinishReason.ABORT], self._counts[index]
            replies.append(self._types["GenerateReply"](choice=news))
        return replies

    def _begin(self) -> list[Any]:
        if not self._is_first:
            return []
        self._is_first = False
        request = self._call.request
        prompt = self._types["PromptInfo"](
            engine_request_id=request.request_id,
            num_tokens=len(request.prompt_token_ids),
            num_truncated=self._call.num_truncated,
        )
        return [self._types["GenerateReply"](prompt=prompt)]

    def _news(self, index: int) -> Any:
        return self._types["ChoiceNews"](index=index)

    def _finish(self, news: Any, event: GenerationEvent) -> None:
        assert event.finish_reason is not None
        self._open.discard(event.index)
        finish = news.finish
        finish.reason = REASONS[event.finish_reason]
        finish.num_tokens = self._counts[event.index]
        finish.num_cached_prompt_tokens = event.num_cached_tokens
        if isinstance(event.stop_reason, int):
            finish.stop_token_id = event.stop_reason
        elif event.stop_reason is not None:
            finish.stop_string = event.stop_reason
        elif event.finish_reason is FinishReason.STOP:
            finish.end_of_sequence = True

    def _position(self, position: PositionLogprobs | None) -> Any:
        kind = self._types["Position"]
        if position is None:
            return kind()
        return kind(chosen=self._entry(position.chosen), top=[self._entry(entry) for entry in position.top])

    def _entry(self, entry: LogprobEntry) -> Any:
        return self._types["Entry"](token_id=entry.token_id, raw=entry.raw, logprob=entry.logprob, rank=entry.rank)
