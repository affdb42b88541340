"""run_batch: a list of requests through an engine on this thread, and their outputs in the same order."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType

from samovar.core.outputs import SequenceOutput
from samovar.core.request import Request
from samovar.engine.engine import STALL_SECONDS, Engine
from samovar.engine.metrics import RequestRecord, ServingMetrics
from samovar.engine.request_output import OutputCollector, RequestOutput
from samovar.text.output import RequestPipeline
from samovar.text.tokenizer import Tokenizer


class _Task:
    """One request under way: its text pipeline and what has come of it."""

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, record: RequestRecord
    ) -> None:
        self.pipeline = RequestPipeline(tokenizer, request)
        self.collector = OutputCollector(request, prompt)
        self.record = record
        self.token_ids: list[int] | None = None
        """Where further tokens go if nothing else becomes of them before the end: no text, logprobs or other choice."""
        self.seen = 0.0
        """When the latest of them came."""
        params = request.params
        self._is_bare = not self.pipeline.makes_text and params.logprobs is None and params.n == 1

    def take(self, output: SequenceOutput, now: float) -> list[int]:
        """Take in one output; returns the choices a stop string ended, which the engine still runs."""
        if self.token_ids is not None:
            self.record.catch_up(len(self.token_ids), self.seen)
        for event in self.pipeline.feed(output):
            self.collector.add(event)
            self.record.take(event, now)
            if self._is_bare and output.token_ids:
                self.token_ids, self.seen = self.collector.output.outputs[0].token_ids, now
        return self.pipeline.take_stopped()


class Interrupts:
    """Ctrl-C at a safe point: noted while a step is under way, raised by `check` between two steps.

    An interrupt in the middle of booking a step would leave the scheduler half changed. A second Ctrl-C is not
    deferred. Does nothing outside the main thread, or if the program handles SIGINT itself.
    """

    def __init__(self) -> None:
        self._seen = False
        self._is_installed = False

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._seen:
            raise KeyboardInterrupt
        self._seen = True

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if one was noted."""
        if self._seen:
            raise KeyboardInterrupt


def run_batch(
    engine: Engine,
    tokenizer: Tokenizer | None,
    requests: Sequence[tuple[Request, str | None]],
    metrics: ServingMetrics,
    *,
    show_progress: bool = False,
) -> list[RequestOutput]:
    """Run (request, prompt text) pairs to their ends, and count them. If interrupted, what has not ended is aborted."""
    tasks: dict[str, _Task] = {}
    running: dict[str, _Task] = {}
    progress = Progress(len(requests)) if show_progress else None
    with Interrupts() as interrupts:
        try:
            for request, prompt in requests:
                engine.add(request)
                task = _Task(request, prompt, tokenizer, metrics.begin(request))
                tasks[request.request_id] = running[request.request_id] = task
            outputs: list[SequenceOutput] = []
            previous = now = 0.0

            def take() -> None:
                """Take in what the step before gave, while the next one runs."""
                before = metrics.generation_tokens
                for output in _take_bare(outputs, running, metrics, previous, now):
                    if (at := running.get(output.request_id)) is None:
                        continue
                    for index in at.take(output, now):
                        engine.abort(output.request_id, index)
                    if at.collector.output.finished:
                        del running[output.request_id]
                        at.record.end(abandoned=False, failed=False)
                metrics.take_snapshot(engine.stats())
                if progress is not None:
                    progress.update(len(tasks) - len(running), metrics.generation_tokens - before)

            while running:
                interrupts.check()
                outputs = engine.step(take)
                if engine.is_stalled:
                    time.sleep(STALL_SECONDS)
                previous, now = now, time.monotonic()
        finally:
            for request_id, task in running.items():
                engine.abort(request_id)
                task.record.end(abandoned=True, failed=False)
            while engine.has_work:
                engine.step()
            if progress is not None:
                progress.close()
    return [task.collector.output for task in tasks.values()]


def _take_bare(
    outputs: list[SequenceOutput], running: dict[str, _Task], metrics: ServingMetrics, previous: float, now: float
) -> list[SequenceOutput]:
    """Take in the outputs that are nothing but further ids, all that came at `now` at once; returns the others.

    Hundreds come with every step, most for sequences that got their last one with the step before, at `previous`.
    """
    others = []
    num_steady = 0
    for output in outputs:
        task = running.get(output.request_id)
        if task is None or task.token_ids is None or output.finish_reason is not None:
            others.append(output)
            continue
        token_ids = output.token_ids
        task.token_ids += token_ids
        if task.seen == previous and len(token_ids) == 1:
            num_steady += 1
        elif token_ids:
            metrics.count_tokens(len(token_ids), (now - task.seen) / len(token_ids))
        task.seen = now
    if num_steady:
        metrics.count_tokens(num_steady, now - previous)
    return others


class Progress:
    """A bar on standard error: requests done, tokens a second. Drawn only on a terminal."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self._bar = Bar(*columns, console=Console(stderr=True), transient=False)
        self._task = self._bar.add_task("prompts", total=total, rate="")
        self._num_tokens = 0
        self._bar.start()

    def update(self, done: int, num_tokens: int) -> None:
        """`done` requests have ended; `num_tokens` more tokens were generated."""
        self._num_tokens += num_tokens
        seconds = self._bar.tasks[0].elapsed or 0.0
        rate = f"{self._num_tokens / seconds:,.1f} tokens/s" if seconds > 0 else ""
        self._bar.update(self._task, completed=done, rate=rate)

    def close(self) -> None:
        """Stop drawing."""
        self._bar.stop()
