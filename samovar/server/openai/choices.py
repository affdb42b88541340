"""What chat and completions share on the way back: token counts, and whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from samovar.core.events import GenerationEvent, PositionLogprobs
from samovar.core.request import Request
from samovar.core.sequence import FinishReason
from samovar.server.generate import Events
from samovar.server.openai.schema import CompletionTokensDetails, PromptTokensDetails, Usage
from samovar.text.answer import AnswerLog


class TokenCounts:
    """The usage of one call while it runs."""

    __slots__ = ("_cached", "_n", "_shows_details", "_thinks", "completion_tokens", "prompt_tokens", "reasoning_tokens")

    def __init__(self, requests: Sequence[Request], shows_details: bool, *, thinks: bool = False) -> None:
        self.prompt_tokens = sum(len(r.prompt_token_ids) for r in requests)
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._thinks = thinks
        self._n = requests[0].params.n
        self._cached = [0] * len(requests)
        self._shows_details = shows_details

    def take(self, choice: int, event: GenerationEvent) -> None:
        """Count an event's tokens."""
        self.completion_tokens += len(event.token_ids)
        self.reasoning_tokens += event.num_reasoning_tokens
        if event.num_cached_tokens and choice % self._n == 0:
            self._cached[choice // self._n] = event.num_cached_tokens

    def usage(self) -> Usage:
        """The counts so far."""
        details = PromptTokensDetails(cached_tokens=sum(self._cached)) if self._shows_details else None
        thoughts = CompletionTokensDetails(reasoning_tokens=self.reasoning_tokens) if self._thinks else None
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=details,
            completion_tokens_details=thoughts,
        )


@dataclass(slots=True)
class Answer:
    """Everything one choice said."""

    log: AnswerLog = field(default_factory=AnswerLog)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.log.finish_reason or FinishReason.ABORT


async def collect(events: Events, counts: TokenCounts, num_choices: int) -> list[Answer]:
    """Wait for every choice to end."""
    answers = [Answer() for _ in range(num_choices)]
    async for choice, event in events:
        counts.take(choice, event)
        answer = answers[choice]
        answer.log.add(event)
        answer.logprobs += event.logprobs or ()
        if event.prompt_logprobs is not None:
            answer.prompt_logprobs = event.prompt_logprobs
    return answers
