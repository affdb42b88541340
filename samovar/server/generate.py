"""The only meeting point of APIs and engine: Requests in, GenerationEvents out.

Every API hands its Requests to `generate` and writes its own chunks from the events. Closing the iterator, as a
disconnect does, aborts what is still running. Knows no wire format.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import accumulate

from samovar.core.events import GenerationEvent
from samovar.core.request import Request
from samovar.core.sequence import FinishReason
from samovar.errors import OverloadedError
from samovar.server.problems import ChoiceFailedError
from samovar.server.state import ServingState
from samovar.text.output import RequestPipeline

Events = AsyncGenerator[tuple[int, GenerationEvent], None]
"""(choice number of the whole call, news of that choice)."""


async def generate(state: ServingState, requests: Sequence[Request]) -> Events:
    """Run the requests of one API call side by side; choice numbers count request times n.

    Raises what the engine client raises, and `ChoiceFailedError` if the engine gave up a choice; the call's other
    requests are aborted then.
    """
    if len(requests) == 1:
        async with aclosing(_run(state, requests[0])) as events:
            async for event in events:
                yield event.index, event
        return
    async with aclosing(_run_many(state, requests)) as numbered:
        async for pair in numbered:
            yield pair


async def _run_many(state: ServingState, requests: Sequence[Request]) -> Events:
    """One task a request, one queue; the first failure ends them all."""
    news: asyncio.Queue[tuple[int, GenerationEvent] | Exception | None] = asyncio.Queue()

    async def follow(first_choice: int, request: Request) -> None:
        try:
            async with aclosing(_run(state, request)) as events:
                async for event in events:
                    news.put_nowait((first_choice + event.index, event))
        except Exception as error:  # handed to the consumer below, which raises it
            news.put_nowait(error)
        else:
            news.put_nowait(None)

    starts = accumulate((r.params.n for r in requests[:-1]), initial=0)
    tasks = [asyncio.ensure_future(follow(start, r)) for start, r in zip(starts, requests, strict=True)]
    running = len(tasks)
    try:
        while running:
            item = await news.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(state: ServingState, request: Request) -> AsyncGenerator[GenerationEvent, None]:
    """Follow one request through the output pipeline until each of its choices has ended."""
    client, metrics = state.client, state.metrics
    assert metrics is not None  # set together with the client
    pipeline = RequestPipeline(state.preparer.tokenizer, request)
    open_choices = request.params.n
    outputs = client.generate(request)
    record = metrics.begin(request)
    failed = False
    try:
        async for output in outputs:
            event = pipeline.feed(output)
            for index in pipeline.take_stopped():
                await client.abort(request.request_id, index)
            if event is None:
                continue
            record.take(event, time.monotonic())
            if event.finish_reason is not None:
                if event.finish_reason is FinishReason.ERROR:
                    raise ChoiceFailedError(event.error or "the engine gave up this request")
                open_choices -= 1
            yield event
            if not open_choices:
                return
        raise ChoiceFailedError("the engine ended this request without a finish reason")
    except OverloadedError as error:
        metrics.withdraw(record, error.reason)
        raise
    except Exception:  # any failure is counted as this request's, and goes on its way
        failed = True
        raise
    finally:
        record.end(abandoned=open_choices > 0, failed=failed)
        await outputs.aclose()  # type: ignore[attr-defined]
