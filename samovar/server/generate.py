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
from samovar.core.outputs import NOTHING_ALLOWED
from samovar.core.request import Request
from samovar.core.sequence import FinishReason
from samovar.errors import OverloadedError, SamovarError, ValidationError
from samovar.server.problems import ChoiceFailedError
from samovar.server.state import ServingState
from samovar.text.answer import PLAIN, AnswerPlan
from samovar.text.output import RequestPipeline

Events = AsyncGenerator[tuple[int, GenerationEvent], None]
"""(choice number of the whole call, news of that choice)."""


def generate(state: ServingState, requests: Sequence[Request], plans: Sequence[AnswerPlan] | None = None) -> Events:
    """Run the requests of one API call side by side; choice numbers count request times n.

    `plans` say how each request's answers are read; without them everything is content.
    Raises what the engine client raises, and if the engine gave up a choice `ValidationError` where the request left it
    nothing to say, else `ChoiceFailedError`; the call's other requests are aborted then.
    """
    every = [PLAIN] * len(requests) if plans is None else plans
    return _run(state, requests[0], every[0]) if len(requests) == 1 else _run_many(state, requests, every)


async def _run_many(state: ServingState, requests: Sequence[Request], plans: Sequence[AnswerPlan]) -> Events:
    """One task a request, one queue; the first failure ends them all."""
    news: asyncio.Queue[tuple[int, GenerationEvent] | Exception | None] = asyncio.Queue()

    async def follow(first_choice: int, request: Request, plan: AnswerPlan) -> None:
        try:
            async with aclosing(_run(state, request, plan)) as events:
                async for choice, event in events:
                    news.put_nowait((first_choice + choice, event))
        except Exception as error:  # handed to the consumer below, which raises it
            news.put_nowait(error)
        else:
            news.put_nowait(None)

    starts = accumulate((r.params.n for r in requests[:-1]), initial=0)
    tasks = [asyncio.ensure_future(follow(*run)) for run in zip(starts, requests, plans, strict=True)]
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


async def _run(state: ServingState, request: Request, plan: AnswerPlan) -> Events:
    """Follow one request through the output pipeline until each of its choices has ended."""
    client, metrics = state.client, state.metrics
    assert metrics is not None  # set together with the client
    pipeline = RequestPipeline(state.preparer.tokenizer, request, plan)
    open_choices = request.params.n
    outputs = client.generate(request)
    record = metrics.begin(request)
    failed = False
    try:
        async for output in outputs:
            events = pipeline.feed(output)
            for index in pipeline.take_stopped():
                await client.abort(request.request_id, index)
            for event in events:
                record.take(event, time.monotonic())
                if not state.config.enable_prompt_tokens_details:
                    event.num_cached_tokens = 0  # here, so that no API tells
                if event.finish_reason is not None:
                    if event.finish_reason is FinishReason.ERROR:
                        raise _failure(event.error)
                    open_choices -= 1
                yield event.index, event
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


def _failure(error: str | None) -> SamovarError:
    if error == NOTHING_ALLOWED:
        return ValidationError(error)
    return ChoiceFailedError(error or "the engine gave up this request")
