"""RequestPipeline: what the engine sends about one request -> text events. The one path for every API and for `LLM`.

Fixed order: tokens, bytes, UTF-8, stop strings. Text never depends on how tokens were grouped into outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from samovar.core.events import GenerationEvent, LogprobEntry, PositionLogprobs
from samovar.core.outputs import SequenceOutput, TokenLogprobs
from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.core.sequence import FinishReason
from samovar.text.detokenizer import Detokenizer
from samovar.text.stop import StopMatcher, compile_stops
from samovar.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Choice:
    """Progress of one choice. Without a detokenizer it has no text."""

    detokenizer: Detokenizer | None
    matcher: StopMatcher | None
    num_tokens: int = 0
    is_finished: bool = False


@dataclass(slots=True)
class _Text:
    """What some tokens became: text, how many of them count, and the stop string that ended them."""

    parts: list[str] = field(default_factory=list)
    num_used: int = 0
    stop: str | None = None


class RequestPipeline:
    """Turns the `SequenceOutput`s of one request into `GenerationEvent`s.

    A stop string ends its choice here, before the engine knows: the caller aborts the choices that `take_stopped`
    names. Such an event has no `timing`, which only the engine's own end brings. A stop string counts only in text that
    comes after the first `min_tokens` tokens. A stop token (and eos) is among the ids but not in the text, unless
    `include_stop_str_in_output`; eos still is not when special tokens are skipped.
    """

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        self._tokenizer = tokenizer
        self._params = request.params
        self._choices = [self._new_choice(tokenizer, request.params) for _ in range(request.params.n)]
        self._stopped: list[int] = []

    @staticmethod
    def _new_choice(tokenizer: Tokenizer | None, params: SamplingParams) -> _Choice:
        if tokenizer is None or not params.detokenize:
            return _Choice(None, None)
        detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        if not params.stop:
            return _Choice(detokenizer, None)
        automaton = compile_stops(tuple(params.stop))
        return _Choice(detokenizer, StopMatcher(automaton, include_stop=params.include_stop_str_in_output))

    @property
    def makes_text(self) -> bool:
        """Whether ids become text. Without text no stop string ends a choice either."""
        return self._tokenizer is not None and self._params.detokenize

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.is_finished for choice in self._choices)

    def feed(self, output: SequenceOutput) -> GenerationEvent | None:
        """The event for one output; None if its choice had already ended (a stop string came before)."""
        choice = self._choices[output.index]
        if choice.is_finished:
            return None
        text = self._text(choice, output)
        event = GenerationEvent(
            index=output.index,
            text="".join(text.parts),
            token_ids=output.token_ids[: text.num_used],
            logprobs=None if output.logprobs is None else [self._position(p) for p in output.logprobs[: text.num_used]],
            num_cached_tokens=output.num_cached_tokens,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            error=output.error,
            timing=output.timing,
        )
        if output.prompt_logprobs is not None:
            event.prompt_logprobs = [None if p is None else self._position(p) for p in output.prompt_logprobs]
        if text.stop is not None:
            if output.finish_reason is None:
                self._stopped.append(output.index)
            event.finish_reason, event.stop_reason, event.error = FinishReason.STOP, text.stop, None
        choice.is_finished = event.finish_reason is not None
        return event

    def take_stopped(self) -> list[int]:
        """Choices that a stop string ended since the last call; the engine is still running them."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def _text(self, choice: _Choice, output: SequenceOutput) -> _Text:
        """Run the new tokens through the choice, up to the first stop string."""
        result = _Text()
        silent_last = output.finish_reason is FinishReason.STOP and not self._params.include_stop_str_in_output
        last = len(output.token_ids) - 1
        for at, token in enumerate(output.token_ids):
            choice.num_tokens += 1
            result.num_used += 1
            if choice.detokenizer is None or (at == last and silent_last):
                continue
            self._show(choice, choice.detokenizer.feed(token), result)
            if result.stop is not None:
                return result
        if output.finish_reason is not None and choice.detokenizer is not None:
            self._show(choice, choice.detokenizer.flush(), result)
            if choice.matcher is not None and result.stop is None:
                result.parts.append(choice.matcher.flush())
        return result

    def _show(self, choice: _Choice, text: str, result: _Text) -> None:
        if choice.matcher is None or choice.num_tokens <= self._params.min_tokens:
            result.parts.append(text)
            return
        result.parts.append(choice.matcher.feed(text))
        result.stop = choice.matcher.match

    def _position(self, position: TokenLogprobs) -> PositionLogprobs:
        entries = [
            self._entry(token, logprob, rank)
            for rank, (token, logprob) in enumerate(zip(position.token_ids, position.logprobs, strict=True))
        ]
        chosen = entries[0]
        return PositionLogprobs(
            LogprobEntry(chosen.token_id, chosen.text, chosen.raw, chosen.logprob, position.rank), entries[1:]
        )

    def _entry(self, token: int, logprob: float, rank: int) -> LogprobEntry:
        if self._tokenizer is None:
            return LogprobEntry(token, "", b"", logprob, rank)
        return LogprobEntry(token, self._tokenizer.token_text(token), self._tokenizer.token_bytes(token), logprob, rank)
