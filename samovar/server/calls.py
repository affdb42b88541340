"""An API call bound to its connection: it is cancelled when the client leaves and ended when the server closes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from samovar.errors import EngineDeadError, SamovarError
from samovar.server.exchange import Exchange
from samovar.server.problems import ClientGoneError, encode_error
from samovar.server.state import ServingState

_logger = logging.getLogger(__name__)


async def run_call(state: ServingState, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or the client leaves, whichever is first. The body must have been read.

    Raises what `work` raises, `ClientGoneError` after a disconnect, `EngineDeadError` if the server is closing.
    """
    call = asyncio.ensure_future(work)
    state.enter(call)
    gone = asyncio.ensure_future(exchange.wait_disconnect())
    state.num_calls += 1
    try:
        await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            await asyncio.wait({call})
            raise ClientGoneError
        if call.cancelled():
            raise EngineDeadError("the server is shutting down")
        call.result()
    finally:
        state.num_calls -= 1
        gone.cancel()
        call.cancel()


async def send_stream(state: ServingState, exchange: Exchange, frames: AsyncGenerator[bytes, None]) -> None:
    """Write `frames` (whole `data:` lines) as an event stream and end it with the end marker.

    An error before the first frame is raised, so that it becomes a plain HTTP error; a later one is sent as the last
    frame. With a keep-alive interval the stream may start with comments, and every error is then a frame.
    """
    interval = state.config.sse_keep_alive_interval
    pulse = asyncio.ensure_future(exchange.keep_alive(interval)) if interval else None
    try:
        async with aclosing(frames):
            async for frame in frames:
                await exchange.write(frame)
    except asyncio.CancelledError:
        if not (state.is_closing and exchange.is_started):
            raise
        await exchange.write(error_frame(EngineDeadError("the server is shutting down")))
    except Exception as error:  # the boundary of a stream: its client is told, the server goes on
        if not exchange.is_started:
            raise
        if isinstance(error, SamovarError):
            _logger.warning("a stream ended with %s: %s", type(error).__name__, str(error)[:200])
        await exchange.write(error_frame(error))
    finally:
        if pulse is not None:
            pulse.cancel()
    await exchange.end_stream()


def error_frame(failure: BaseException) -> bytes:
    """The `data:` line that tells of a failure inside a stream."""
    return b"data: " + encode_error(failure)[1] + b"\n\n"
