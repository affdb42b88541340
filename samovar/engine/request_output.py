"""What `LLM` and `AsyncLLM` return, with vLLM's names, and the collector that builds it from events."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from samovar.core.events import GenerationEvent, LogprobEntry, PositionLogprobs
from samovar.core.outputs import SequenceTiming
from samovar.core.request import Request
from samovar.core.sampling_params import OutputKind
from samovar.core.sequence import FinishReason


@dataclass(slots=True)
class Logprob:
    """One token's log-probability at one position; `rank` 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True, eq=False)
class CompletionOutput:
    """One choice. `logprobs` has one dict (token id -> `Logprob`) per token; the chosen token comes first in it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """What went wrong, when `finish_reason` is "error"."""

    def finished(self) -> bool:
        """True once the choice has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and what came of it. `metrics` is the timing of choice 0, set when it ended."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: SequenceTiming | None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: prompt and continuation ids, the text of the whole, and the sum of the continuation's logprobs."""

    tokens: list[int]
    cum_logprob: float = 0.0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best beams, best first."""

    sequences: list[BeamSearchSequence]


def logprob_dict(position: PositionLogprobs) -> dict[int, Logprob]:
    """The chosen token, then the best alternatives."""
    entries: list[LogprobEntry] = [position.chosen, *position.top]
    table: dict[int, Logprob] = {}
    for entry in entries:
        table.setdefault(entry.token_id, Logprob(entry.logprob, entry.rank, entry.text))
    return table


class OutputCollector:
    """Adds the events of one request up to a `RequestOutput`."""

    def __init__(self, request: Request, prompt: str | None) -> None:
        self._kind = request.params.output_kind
        self._wants_logprobs = request.params.logprobs is not None
        self._told_end: set[int] = set()
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._new_choice(index) for index in range(request.params.n)],
        )

    def _new_choice(self, index: int) -> CompletionOutput:
        has = self._wants_logprobs
        return CompletionOutput(index, "", [], cumulative_logprob=0.0 if has else None, logprobs=[] if has else None)

    def add(self, event: GenerationEvent) -> None:
        """Take in one event."""
        choice = self.output.outputs[event.index]
        choice.text += event.text
        choice.token_ids += event.token_ids
        for position in event.logprobs or ():
            assert choice.logprobs is not None and choice.cumulative_logprob is not None
            choice.logprobs.append(logprob_dict(position))
            choice.cumulative_logprob += position.chosen.logprob
        if event.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None if p is None else logprob_dict(p) for p in event.prompt_logprobs]
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, event.num_cached_tokens)
        if event.finish_reason is not None:
            self.end(event.index, event.finish_reason, event.stop_reason, event.error)
        if event.index == 0 and event.timing is not None:
            self.output.metrics = event.timing

    def end(
        self, index: int, reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None
    ) -> None:
        """Mark choice `index` as ended, unless it already is."""
        choice = self.output.outputs[index]
        if choice.finish_reason is None:
            choice.finish_reason, choice.stop_reason, choice.error = reason.value, stop_reason, error
            self.output.finished = all(c.finish_reason is not None for c in self.output.outputs)

    def take(self) -> RequestOutput | None:
        """What to hand out after an event, by the request's `output_kind`; None if it wants only the final state."""
        if self._kind == OutputKind.FINAL_ONLY and not self.output.finished:
            return None
        if self._kind != OutputKind.DELTA:
            copies = [
                replace(c, token_ids=list(c.token_ids), logprobs=None if c.logprobs is None else list(c.logprobs))
                for c in self.output.outputs
            ]
            return replace(self.output, outputs=copies)
        return self._take_delta()

    def _take_delta(self) -> RequestOutput:
        """What came since the last call; a choice that ended is in exactly one delta after its end."""
        output = self.output
        ended = [c for c in output.outputs if c.finish_reason is not None and c.index not in self._told_end]
        news = [c for c in output.outputs if c.token_ids or c.text or c in ended]
        self._told_end |= {c.index for c in ended}
        delta = replace(output, outputs=news)
        output.outputs = [replace(self._new_choice(c.index), finish_reason=c.finish_reason) for c in output.outputs]
        output.prompt_logprobs = None
        return delta
