"""Who may call which method, and errors as gRPC status codes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
from starlette.types import Scope

from samovar.errors import (
    ConflictError,
    EngineDeadError,
    NotFoundError,
    OverloadedError,
    TooLargeError,
    ValidationError,
)
from samovar.server.auth import no_valid_key
from samovar.server.keys import ANYONE, CALLER, KeyRing
from samovar.server.problems import error_of

OPEN_METHODS = frozenset(
    {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/samovar.v1.Inference/HealthCheck"}
)
"""What needs no key, as /health over HTTP."""
FIELD_KEY = "samovar-field"
"""Trailing metadata: the field that is wrong."""

CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (ConflictError, grpc.StatusCode.FAILED_PRECONDITION),
    (TooLargeError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ValidationError, grpc.StatusCode.INVALID_ARGUMENT),
    (OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (EngineDeadError, grpc.StatusCode.UNAVAILABLE),
)


class RequireKey(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Ends calls without a key of the ring as UNAUTHENTICATED, before anything of them is read."""

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """The method's own handler, or one that refuses."""
        if (
            details.method in OPEN_METHODS
            or not self._ring.has_users
            or self._ring.find(scope_of(details.invocation_metadata))
        ):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(requests: AsyncIterator[bytes], context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(no_valid_key()))


def scope_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> Scope:
    """Metadata in the form of HTTP headers, which is what they are."""
    pairs = [(str(key).lower().encode(), v.encode() if isinstance(v, str) else v) for key, v in metadata or ()]
    return {"type": "grpc", "headers": pairs}


def scope_with_caller(ring: KeyRing, context: Any) -> Scope:
    """The same with the caller in it."""
    scope = scope_of(context.invocation_metadata())
    scope[CALLER] = ring.find(scope) or ANYONE
    return scope


async def end_with(context: Any, failure: Exception) -> None:
    """End a call with the status of `failure`; one that is not ours is logged and not shown."""
    detail = error_of(failure).error
    code = next((code for kind, code in CODES if isinstance(failure, kind)), grpc.StatusCode.INTERNAL)
    metadata = ((FIELD_KEY, detail.param),) if detail.param and _is_plain(detail.param) else ()
    await context.abort(code, detail.message, metadata)


def _is_plain(text: str) -> bool:
    """Whether metadata can hold it."""
    return all(" " <= char <= "~" for char in text)
