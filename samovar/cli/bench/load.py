"""The load generator of `bench serve`: sends requests at a rate and takes the time of every token that comes back."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from samovar.cli.bench.dataset import Sample
from samovar.cli.http_stream import Address, RequestRefused, ServerUnreachable, request


@dataclass(slots=True)
class Timing:
    """One request as its client saw it; seconds. `itl` holds the gaps between pieces of text."""

    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    prompt_len: int = 0
    output_len: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what every one of them carries. `path` ends in completions or chat/completions."""

    address: Address
    path: str
    model: str
    headers: dict[str, str]
    extra: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether prompts are sent as messages."""
        return self.path.endswith("/chat/completions")

    def body(self, sample: Sample, ids: list[int] | None) -> dict[str, Any]:
        """The request for one sample; token ids are sent instead of text where they are known."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.is_chat:
            body |= {"messages": [{"role": "user", "content": sample.text}], "max_completion_tokens": sample.output_len}
        else:
            body |= {"prompt": ids or sample.text, "max_tokens": sample.output_len}
        return body | self.extra


async def send(target: Target, sample: Sample, ids: list[int] | None) -> Timing:
    """One streamed request. Errors are noted, not raised."""
    timing = Timing(start=time.perf_counter(), prompt_len=len(ids) if ids else sample.num_tokens)
    last, pieces = timing.start, 0
    try:
        async with request(target.address, "POST", target.path, target.body(sample, ids), target.headers) as answer:
            async for event in (await answer.check()).events():
                now = time.perf_counter()
                if usage := event.get("usage"):
                    timing.prompt_len, timing.output_len = usage["prompt_tokens"], usage["completion_tokens"]
                text = "".join(_text(choice) for choice in event.get("choices", []))
                if not text:
                    continue
                pieces += 1
                if pieces == 1:
                    timing.ttft = now - timing.start
                else:
                    timing.itl.append(now - last)
                timing.text += text
                last = now
    except (ServerUnreachable, RequestRefused) as error:
        timing.error = str(error)
    if not pieces and not timing.error and timing.output_len == 0:
        timing.error = "the answer had no text"
    timing.latency = (last if pieces else time.perf_counter()) - timing.start
    timing.ttft = timing.ttft or timing.latency
    timing.output_len = timing.output_len or pieces
    return timing


def _text(choice: dict[str, Any]) -> str:
    return (choice.get("text") or choice.get("delta", {}).get("content") or "") if choice else ""


async def arrivals(count: int, rate: float, burstiness: float, generator: random.Random) -> AsyncIterator[int]:
    """Indices 0..count-1 at their times: all at once for an infinite rate, else with gamma-distributed gaps.

    `burstiness` 1 is a Poisson process, less is burstier, more is more even. The gaps are scaled so that the last
    request starts exactly at count / rate.
    """
    if math.isinf(rate):
        for index in range(count):
            yield index
        return
    gaps = [generator.gammavariate(burstiness, 1.0) for _ in range(count)]
    scale = count / rate / (sum(gaps) or 1.0)
    began, due = time.perf_counter(), 0.0
    for index, gap in enumerate(gaps):
        due += gap * scale
        await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
        yield index


@dataclass(frozen=True, slots=True)
class Schedule:
    """When requests start: `rate` per second (inf: at once), and how many may run at the same time (None: any)."""

    rate: float
    burstiness: float
    max_concurrency: int | None
    seed: int


async def run_load(
    target: Target,
    asked: Sequence[tuple[Sample, list[int] | None]],
    schedule: Schedule,
    on_done: Callable[[int, int], None],
) -> tuple[list[Timing], float]:
    """Send everything; (timings in order, seconds in all)."""
    gate = asyncio.Semaphore(schedule.max_concurrency or len(asked))
    done = 0

    async def one(index: int) -> Timing:
        nonlocal done
        async with gate:
            timing = await send(target, *asked[index])
        done += 1
        on_done(done, len(asked))
        return timing

    began = time.perf_counter()
    tasks = []
    async for index in arrivals(len(asked), schedule.rate, schedule.burstiness, random.Random(schedule.seed)):
        tasks.append(asyncio.create_task(one(index)))
    timings = await asyncio.gather(*tasks)
    return list(timings), time.perf_counter() - began
