"""RequestPipeline: what the engine sends about one request -> text events. The one path for every API and for `LLM`.

Fixed order: tokens, bytes, UTF-8, stop strings, regions. Text never depends on how tokens were grouped into outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from samovar.core.events import GenerationEvent, LogprobEntry, PositionLogprobs
from samovar.core.outputs import SequenceOutput, TokenLogprobs
from samovar.core.request import Request
from samovar.core.sequence import FinishReason
from samovar.core.tools import ToolCallDelta
from samovar.text.answer import PLAIN, AnswerPlan
from samovar.text.detokenizer import Detokenizer
from samovar.text.formats.base import Said, Thought
from samovar.text.marks import Alphabet, alphabet_of
from samovar.text.regions import News, RegionParser, marks_in
from samovar.text.stop import StopMatcher, compile_stops
from samovar.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Choice:
    """Progress of one choice. Without a detokenizer it has no text, without a parser all of it is content."""

    detokenizer: Detokenizer | None = None
    matcher: StopMatcher | None = None
    parser: RegionParser | None = None
    num_tokens: int = 0
    is_finished: bool = False


@dataclass(slots=True)
class _Text:
    """What some tokens became: text, how many of them count and were thought, and the stop string that ended them."""

    parts: list[str] = field(default_factory=list)
    news: list[News] | None = None
    """Instead of `parts`, where a parser tells the text apart."""
    num_used: int = 0
    num_thought: int = 0
    stop: str | None = None


class RequestPipeline:
    """Turns the `SequenceOutput`s of one request into `GenerationEvent`s.

    A stop string ends its choice here, before the engine knows: the caller aborts the choices that `take_stopped`
    names. Such an event has no `timing`, which only the engine's own end brings. A stop string counts only in text that
    comes after the first `min_tokens` tokens. A stop token (and eos) is among the ids but not in the text, unless
    `include_stop_str_in_output`; eos still is not when special tokens are skipped.

    With a `plan`, text is told apart into reasoning, content and calls. Then a mark that is a token of the tokenizer
    counts only as that token. A token is thought if the parser was within the reasoning before it or is after it.
    """

    def __init__(self, tokenizer: Tokenizer | None, request: Request, plan: AnswerPlan = PLAIN) -> None:
        self._tokenizer = tokenizer
        self._params = request.params
        self._plan = plan
        self._ends = frozenset([*request.eos_token_ids, *request.params.stop_token_ids])
        self._alphabet: Alphabet | None = None
        if self.makes_text and (plan.tools is not None or plan.reasoning is not None):
            hides = request.params.skip_special_tokens
            self._alphabet = alphabet_of(tokenizer, marks_in(plan), hides_special=hides)
        self._stops = {stop: stop for stop in request.params.stop}
        if self._alphabet is not None:
            self._stops = {self._alphabet.write(stop): stop for stop in request.params.stop} | self._stops
        self._choices = [self._new_choice() for _ in range(request.params.n)]
        self._stopped: list[int] = []

    def _new_choice(self) -> _Choice:
        params = self._params
        if self._tokenizer is None or not params.detokenize:
            return _Choice()
        detokenizer = Detokenizer(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        matcher = None
        if params.stop:
            automaton = compile_stops(tuple(self._stops))
            matcher = StopMatcher(automaton, include_stop=params.include_stop_str_in_output)
        parser = None if self._alphabet is None else RegionParser(self._plan, self._alphabet)
        return _Choice(detokenizer, matcher, parser)

    @property
    def makes_text(self) -> bool:
        """Whether ids become text. Without text no stop string ends a choice either."""
        return self._tokenizer is not None and self._params.detokenize

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.is_finished for choice in self._choices)

    def feed(self, output: SequenceOutput) -> list[GenerationEvent]:
        """The events for one output; none if its choice had already ended (a stop string came before).

        The last one has the tokens and the end; others come before it only to keep the order of what was said.
        """
        choice = self._choices[output.index]
        if choice.is_finished:
            return []
        text = self._text(choice, output) if choice.parser is None else self._told_apart(choice, choice.parser, output)
        event = GenerationEvent(
            index=output.index,
            text="".join(text.parts),
            num_reasoning_tokens=text.num_thought,
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
        return _in_order(text.news, event) if text.news else [event]

    def take_stopped(self) -> list[int]:
        """Choices that a stop string ended since the last call; the engine is still running them."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def _text(self, choice: _Choice, output: SequenceOutput) -> _Text:
        """Run the new tokens through the choice, up to the first stop string."""
        result = _Text()
        silent_at = -1 if output.finish_reason is None else self._silent_at(output)
        for at, token in enumerate(output.token_ids):
            choice.num_tokens += 1
            result.num_used += 1
            if choice.detokenizer is None or at == silent_at:
                continue
            text = choice.detokenizer.feed(token)
            if choice.matcher is not None:
                text = self._show(choice, text, result)
            result.parts.append(text)
            if result.stop is not None:
                return result
        if output.finish_reason is not None and choice.detokenizer is not None:
            result.parts.append(self._show_end(choice, choice.detokenizer, result))
        return result

    def _told_apart(self, choice: _Choice, parser: RegionParser, output: SequenceOutput) -> _Text:
        """As `_text`, and on through the parser: special tokens go as symbols, so that nothing else can be taken for
        them. A mark that ends the sequence is still a mark."""
        result = _Text()
        news: list[News] = []
        result.news = news
        detokenizer, alphabet = choice.detokenizer, self._alphabet
        silent_at = -1 if output.finish_reason is None else self._silent_at(output)
        assert detokenizer is not None and alphabet is not None  # a parser has both
        for at, token in enumerate(output.token_ids):
            choice.num_tokens += 1
            result.num_used += 1
            if at == silent_at and token not in alphabet.marks:
                continue
            symbol = self._symbol(alphabet, token)
            text = detokenizer.feed(token) if symbol is None else detokenizer.flush() + symbol
            was_thinking = parser.is_thinking
            if choice.matcher is not None:
                text = self._show(choice, text, result)
            news += parser.feed(text)
            result.num_thought += was_thinking or parser.is_thinking
            if result.stop is not None:
                news += parser.finish(truncated=True)
                return result
        if output.finish_reason is not None:
            news += parser.feed(self._show_end(choice, detokenizer, result))
            by_model = output.finish_reason is FinishReason.STOP and output.stop_reason is None
            news += parser.finish(truncated=result.stop is not None or not by_model)
        return result

    def _symbol(self, alphabet: Alphabet, token: int) -> str | None:
        symbol = alphabet.symbols.get(token)
        if symbol is None and self._tokenizer is not None and self._tokenizer.is_special(token):
            return alphabet.add(token, self._tokenizer.token_text(token))
        return symbol

    def _silent_at(self, output: SequenceOutput) -> int:
        """Where the token is that ended the sequence and is no text; -1 if there is none."""
        if output.finish_reason is not FinishReason.STOP or self._params.include_stop_str_in_output:
            return -1
        ids = output.token_ids
        return len(ids) - 1 if ids and ids[-1] in self._ends else -1

    def _show(self, choice: _Choice, text: str, result: _Text) -> str:
        if choice.matcher is None or choice.num_tokens <= self._params.min_tokens:
            return text
        shown = choice.matcher.feed(text)
        if choice.matcher.match is not None:
            result.stop = self._stops[choice.matcher.match]
        return shown

    def _show_end(self, choice: _Choice, detokenizer: Detokenizer, result: _Text) -> str:
        """What was held back at the end of the tokens."""
        shown = self._show(choice, detokenizer.flush(), result)
        return shown if choice.matcher is None or result.stop is not None else shown + choice.matcher.flush()

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


def _in_order(news: list[News], last: GenerationEvent) -> list[GenerationEvent]:
    """The news as events: one as long as thought comes before content and content before calls. `last` becomes the
    last of them."""
    if len(news) == 1:
        only = news[0]
        if isinstance(only, ToolCallDelta):
            last.tool_calls.append(only)
        elif isinstance(only, Said):
            last.text = only.text
        else:
            last.reasoning = only.text
        return [last]
    events = [GenerationEvent(index=last.index, num_cached_tokens=last.num_cached_tokens)]
    for piece in _joined(news):
        event = events[-1]
        is_call = isinstance(piece, ToolCallDelta)
        if (not is_call and event.tool_calls) or (isinstance(piece, Thought) and event.text):
            event = GenerationEvent(index=last.index, num_cached_tokens=last.num_cached_tokens)
            events.append(event)
        if isinstance(piece, Thought):
            event.reasoning = piece.text
        elif isinstance(piece, Said):
            event.text = piece.text
        else:
            event.tool_calls.append(piece)
    last.reasoning, last.text, last.tool_calls = events[-1].reasoning, events[-1].text, events[-1].tool_calls
    return [*events[:-1], last]


def _joined(news: list[News]) -> Iterator[News]:
    """Neighbours of one kind, and of one call, as one."""
    for kind, group in groupby(news, lambda piece: piece.index if isinstance(piece, ToolCallDelta) else type(piece)):
        pieces = list(group)
        first = pieces[0]
        if isinstance(first, ToolCallDelta):
            first.arguments = "".join(piece.arguments for piece in pieces if isinstance(piece, ToolCallDelta))
            yield first
        else:
            text = "".join(piece.text for piece in pieces if not isinstance(piece, ToolCallDelta))
            yield Thought(text) if kind is Thought else Said(text)
