"""An API call bound to its connection: it is cancelled when the client leaves and ended when the server closes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from samovar.errors import EngineDeadError, SamovarError
from samovar.server.exchange import DONE, Exchange
from samovar.server.problems import ClientGoneError, encode_error
from samovar.server.state import ServingState

_logger = logging.getLogger(__name__)


async def run_call(state: ServingState, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or the client leaves, whichever is first. The body must have been read.

    Raises what `work` raises, `ClientGoneError` after a disconnect, or why the call was ended from our side.
    """
    call = asyncio.ensure_future(work)
    state.enter(call, exchange)
    gone = asyncio.ensure_future(exchange.wait_disconnect())
    state.num_calls += 1
    try:
        await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            await asyncio.wait({call})
            raise ClientGoneError
        if call.cancelled():
            raise exchange.ended_by or EngineDeadError("the server is shutting down")
        call.result()
    finally:
        state.num_calls -= 1
        gone.cancel()
        call.cancel()


def error_frame(failure: BaseException) -> bytes:
    """The `data:` line that tells of a failure inside a stream."""
    return b"data: " + encode_error(failure)[1] + b"\n\n"


async def send_stream(
    state: ServingState,
    exchange: Exchange,
    frames: AsyncGenerator[bytes, None],
    *,
    last_words: Callable[[BaseException], bytes] = error_frame,
    end: bytes = DONE,
    signs: Coroutine[Any, Any, None] | None = None,
) -> None:
    """Write `frames` (whole `data:` lines) as an event stream, and `end` behind them.

    An error before the first frame is raised, so that it becomes a plain HTTP error; of a later one `last_words` tell.
    `signs` of life are written beside the frames; without them, comments where there is a keep-alive interval. A stream
    may start with one of those, and every error is then told inside it.
    """
    interval = state.config.sse_keep_alive_interval
    if signs is None and interval:
        signs = exchange.keep_alive(interval)
    pulse = None if signs is None else asyncio.ensure_future(signs)
    try:
        async with aclosing(frames):
            async for frame in frames:
                await exchange.write(frame)
    except asyncio.CancelledError:
        if exchange.ended_by is None or not exchange.is_started:
            raise
        await exchange.write(last_words(exchange.ended_by))
    except Exception as error:  # the boundary of a stream: its client is told, the server goes on
        if not exchange.is_started:
            raise
        if isinstance(error, SamovarError):
            _logger.warning("a stream ended with %s: %s", type(error).__name__, str(error)[:200])
        await exchange.write(last_words(error))
    finally:
        if pulse is not None:
            pulse.cancel()
    await exchange.start_stream()  # Perhaps there was nothing to say.
    await exchange.end_stream(end)
