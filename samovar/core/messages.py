"""What crosses the socket between a front end and the engine process, and its encoding (msgpack, typed, no pickle)."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from samovar.core.outputs import EngineInfo, EngineStats, SequenceOutput
from samovar.core.request import Request


class AddRequest(msgspec.Struct, tag="add", frozen=True):
    """Queue one request; its outputs come back under `request.request_id`."""

    request: Request


class AbortRequest(msgspec.Struct, tag="abort", frozen=True):
    """Stop a whole request (client gone), or one choice of it (`index`; the front end matched a stop string).

    Honoured in every state within one step; no further output of what was stopped is sent."""

    request_id: str
    index: int | None = None


class Call(msgspec.Struct, tag="call", frozen=True):
    """Ask the engine for something that is not generation. `name` is one of those at the top of `engine.client`."""

    call_id: int
    name: str
    arguments: dict[str, Any] = {}


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Leave now: running requests are dropped (a front end that drains waits before it sends this)."""


FrontEndMessage: TypeAlias = AddRequest | AbortRequest | Call | Shutdown


class Starting(msgspec.Struct, tag="starting", frozen=True):
    """The phase of start-up the engine is in, for deadlines and progress lines."""

    phase: str


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The model is loaded and steps can run."""

    info: EngineInfo


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    """News of one step."""

    outputs: list[SequenceOutput]
    stats: EngineStats


class CallResult(msgspec.Struct, tag="result", frozen=True):
    """Answer to a `Call`; `error` set if it failed, and `kind` then is an exception name of `samovar.errors`."""

    call_id: int
    value: Any = None
    error: str | None = None
    kind: str = "ValidationError"


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Start-up or the loop failed for good; the process exits after sending this. `kind` is an exception name of
    `samovar.errors`."""

    kind: str
    message: str


EngineMessage: TypeAlias = Starting | Ready | Outputs | CallResult | Failed

_encoder = msgspec.msgpack.Encoder()
_from_front_end = msgspec.msgpack.Decoder(FrontEndMessage)
_from_engine = msgspec.msgpack.Decoder(EngineMessage)


def encode(message: FrontEndMessage | EngineMessage) -> bytes:
    """Message -> msgpack bytes."""
    return _encoder.encode(message)


def decode_front_end(data: bytes) -> FrontEndMessage:
    """Bytes from a front end -> message; raises `msgspec.ValidationError` on anything else."""
    return _from_front_end.decode(data)


def decode_engine(data: bytes) -> EngineMessage:
    """Bytes from the engine -> message."""
    return _from_engine.decode(data)
