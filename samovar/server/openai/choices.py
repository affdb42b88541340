"""What chat and completions share on the way back: held-back news, token counts, and whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from samovar.core.events import GenerationEvent, PositionLogprobs
from samovar.core.request import Request
from samovar.core.sequence import FinishReason
from samovar.server.generate import Events
from samovar.server.openai.schema import PromptTokensDetails, Usage


class Pacer:
    """Joins events that are not worth a chunk with later ones of the same choice.

    A chunk always has text or ends its choice; beyond the first, it has at least `interval` tokens. Tokens and
    logprobs that came without text wait for it, so that every token is reported exactly once.
    """

    __slots__ = ("_begun", "_held", "_interval")

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[int, GenerationEvent] = {}
        self._begun: set[int] = set()

    def take(self, choice: int, event: GenerationEvent) -> GenerationEvent | None:
        """The event to write now, with what was held of its choice, or None."""
        held = self._held.pop(choice, None)
        if held is not None:
            _append(held, event)
            event = held
        if event.finish_reason is None:
            wanted = self._interval if choice in self._begun else 1
            if not event.text or (wanted > 1 and len(event.token_ids) < wanted):
                self._held[choice] = event
                return None
        self._begun.add(choice)
        return event


def _append(held: GenerationEvent, later: GenerationEvent) -> None:
    held.text += later.text
    held.token_ids = held.token_ids + later.token_ids
    if later.logprobs is not None:
        held.logprobs = (held.logprobs or []) + later.logprobs
    if later.prompt_logprobs is not None:
        held.prompt_logprobs = later.prompt_logprobs
    held.num_cached_tokens = max(held.num_cached_tokens, later.num_cached_tokens)
    held.finish_reason, held.stop_reason = later.finish_reason, later.stop_reason


class TokenCounts:
    """The usage of one call while it runs."""

    __slots__ = ("_cached", "_n", "_shows_details", "completion_tokens", "prompt_tokens")

    def __init__(self, requests: Sequence[Request], shows_details: bool) -> None:
        self.prompt_tokens = sum(len(r.prompt_token_ids) for r in requests)
        self.completion_tokens = 0
        self._n = requests[0].params.n
        self._cached = [0] * len(requests)
        self._shows_details = shows_details

    def take(self, choice: int, event: GenerationEvent) -> None:
        """Count an event's tokens."""
        self.completion_tokens += len(event.token_ids)
        if event.num_cached_tokens and choice % self._n == 0:
            self._cached[choice // self._n] = event.num_cached_tokens

    def usage(self) -> Usage:
        """The counts so far."""
        details = PromptTokensDetails(cached_tokens=sum(self._cached)) if self._shows_details else None
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=details,
        )


@dataclass(slots=True)
class Answer:
    """Everything one choice said."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: FinishReason = FinishReason.ABORT
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)


async def collect(events: Events, counts: TokenCounts, num_choices: int) -> list[Answer]:
    """Wait for every choice to end."""
    answers = [Answer() for _ in range(num_choices)]
    async for choice, event in events:
        counts.take(choice, event)
        answer = answers[choice]
        answer.texts.append(event.text)
        answer.token_ids += event.token_ids
        answer.logprobs += event.logprobs or ()
        if event.prompt_logprobs is not None:
            answer.prompt_logprobs = event.prompt_logprobs
        if event.finish_reason is not None:
            answer.finish_reason, answer.stop_reason = event.finish_reason, event.stop_reason
    return answers
