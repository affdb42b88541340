"""RegionParser: tells the text of one answer apart, as it comes, into reasoning, content and tool calls.

One machine for streams and whole answers. What it gives out does not depend on how the text was cut, no text makes it
raise, and its time is linear in the text. A payload that is no call goes on as the text it stands in: as content, or as
reasoning where the reasoning was not yet over. A call of a tool that the request does not have is such text too, since
no client could run it; without any definitions every name counts.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Protocol, TypeAlias, runtime_checkable

from samovar.core.tools import ToolCallDelta
from samovar.text.answer import AnswerPlan
from samovar.text.formats.base import (
    AnswerReader,
    Arguments,
    CallEnd,
    CallStart,
    Failed,
    PayloadReader,
    Said,
    Thought,
    WholeAnswer,
)
from samovar.text.marks import Alphabet, MarkFinder, finder_of, has_symbol, marks_of

News: TypeAlias = Thought | Said | ToolCallDelta

BLANKS = " \t\r\n"
SLICE_CHARS = 1024
"""Long texts are read in slices: after a failed payload the rest of a slice is read again."""


@runtime_checkable
class QuotedReader(Protocol):
    """A reader that knows whether it is within a quoted string, where a mark spelled as text is no mark."""

    @property
    def in_quotes(self) -> bool: ...


class Voice:
    """What goes out, in order: neighbours of one kind are joined, blanks that only set regions apart are left out.

    Reasoning loses blanks at its ends. Content loses those before its first word if reasoning or a call came before it,
    and those at its end if a call comes after.
    """

    def __init__(self, *, parallel: bool = True) -> None:
        self._news: list[tuple[News, list[str]]] = []
        self._parallel = parallel
        self._thought_blanks: list[str] = []
        self._said_blanks: list[str] = []
        self._has_thought = False
        self._has_said = False
        self._is_parted = False
        self.num_calls = 0

    def take(self) -> list[News]:
        """What came since the last call."""
        taken: list[News] = []
        for item, parts in self._news:
            text = "".join(parts)
            if isinstance(item, ToolCallDelta):
                item.arguments = text
                taken.append(item)
            else:
                taken.append(Thought(text) if item is _THOUGHT else Said(text))
        self._news.clear()
        return taken

    def think(self, text: str) -> None:
        """Reasoning goes on."""
        self._is_parted = True
        if not self._has_thought:
            text = text.lstrip(BLANKS)
        body = text.rstrip(BLANKS)
        if body:
            self._has_thought = True
            self._put(_THOUGHT, "".join(self._thought_blanks) + body)
            self._thought_blanks.clear()
        if len(body) < len(text):
            self._thought_blanks.append(text[len(body) :])

    def say(self, text: str) -> None:
        """Content goes on."""
        body = text.rstrip(BLANKS)
        if body:
            if self._has_said or not self._is_parted:
                body = "".join(self._said_blanks) + body
            else:
                body = body.lstrip(BLANKS)
            self._has_said = True
            self._said_blanks.clear()
            self._put(_SAID, body)
        blanks = text[len(text.rstrip(BLANKS)) :]
        if blanks:
            self._said_blanks.append(blanks)

    def release(self) -> None:
        """No call follows what was said so far."""
        if self._said_blanks and (self._has_said or not self._is_parted):
            blanks = "".join(self._said_blanks)
            self._said_blanks.clear()
            self._put(_SAID, blanks)

    def start_call(self, name: str, call_id: str | None) -> None:
        """A call begins."""
        self._is_parted = True
        self._said_blanks.clear()
        self.num_calls += 1
        if self._parallel or self.num_calls == 1:
            call_id = call_id or "call_" + secrets.token_hex(12)
            self._news.append((ToolCallDelta(self.num_calls - 1, call_id, name), []))

    def add_arguments(self, text: str) -> None:
        """The call that began last goes on."""
        if not text or not (self._parallel or self.num_calls == 1):
            return
        index = self.num_calls - 1
        last = self._news[-1] if self._news else None
        if last is not None and isinstance(last[0], ToolCallDelta) and last[0].index == index:
            last[1].append(text)
        else:
            self._news.append((ToolCallDelta(index), [text]))

    def _put(self, kind: Thought | Said, text: str) -> None:
        if self._news and self._news[-1][0] is kind:
            self._news[-1][1].append(text)
        else:
            self._news.append((kind, [text]))


_THOUGHT, _SAID = Thought(""), Said("")


class RegionParser:
    """The parser of one choice. `alphabet` says which marks are special tokens; without it all are matched as text."""

    def __init__(self, plan: AnswerPlan, alphabet: Alphabet | None = None) -> None:
        self._plan = plan
        self._alphabet = alphabet or Alphabet({})
        self._voice = Voice(parallel=plan.parallel)
        self._text = ""
        self._whole: AnswerReader | None = None
        self._reader: PayloadReader | None = None
        self._in_reasoning = False
        self._at_start = True
        self._heads: tuple[str, ...] = ()
        whole = whole_of(plan)
        if whole is not None:
            self._whole = whole.read(plan.definitions, plan.begins_in_reasoning)
            self._finder = self._finder_of(whole.marks)
            return
        tools, reasoning = plan.tools, plan.reasoning
        opens = () if tools is None else self._written(tools.opens)
        thinks = () if reasoning is None else self._written(reasoning.opens)
        later = marks_of(
            [mark for mark in opens if has_symbol(mark) or not (tools and tools.only_at_start)],
            [mark for mark in thinks if has_symbol(mark)],
        )
        self._opens, self._thinks = frozenset(opens), frozenset(thinks)
        self._start_finder, self._later_finder = finder_of(marks_of(opens, thinks)), finder_of(later)
        self._holds_blanks = tools is not None
        ends = () if reasoning is None else self._written(reasoning.closes)
        self._ends = frozenset(ends)
        self._end_finder = finder_of(marks_of(ends, opens) if reasoning and reasoning.ends_at_tools else ends)
        self._closes = () if tools is None else self._written(tools.closes)
        self._close_finder = finder_of(self._closes)
        self._opened_by = ""
        self._calls_before = 0
        self._shows_close = False
        if plan.begins_in_reasoning and reasoning is not None:
            self._begin_reasoning()

    @property
    def is_thinking(self) -> bool:
        """Whether the next text would be reasoning."""
        return self._in_reasoning if self._whole is None else self._whole.is_thinking

    def feed(self, text: str) -> list[News]:
        """Add text; symbols of the alphabet stand for special tokens. Returns what is certain now."""
        if len(text) <= SLICE_CHARS:
            self._feed(text)
        else:
            for at in range(0, len(text), SLICE_CHARS):
                self._feed(text[at : at + SLICE_CHARS])
        return self._voice.take()

    def _feed(self, text: str) -> None:
        self._text += text
        if self._whole is not None:
            self._read_whole(self._whole, final=False)
        else:
            while self._text and self._step(final=False):
                pass

    def feed_mark(self, text: str) -> list[News]:
        """Add a special token, by its text."""
        return self.feed(self._alphabet.write(text))

    def finish(self, *, truncated: bool) -> list[News]:
        """The answer is over; `truncated` if it was cut off rather than ended by the model."""
        if self._whole is not None:
            self._read_whole(self._whole, final=True)
            self._take_answer(self._whole.finish(is_complete=not truncated))
        else:
            self._finish(truncated)
        self._voice.release()
        return self._voice.take()

    def _finish(self, truncated: bool) -> None:
        while True:
            while self._text and self._step(final=True):
                pass
            reader = self._reader
            if reader is None:
                break
            self._take_calls(reader.close(is_complete=not truncated and not self._closes), "")
            if self._reader is not None:
                self._end_region()

    def _written(self, marks: Iterable[str]) -> tuple[str, ...]:
        return tuple(self._alphabet.write(mark) for mark in marks)

    def _finder_of(self, marks: Iterable[str]) -> MarkFinder:
        return finder_of(self._written(marks))

    # --- one step: False when more text is needed

    def _step(self, *, final: bool) -> bool:
        if self._reader is not None:
            return self._step_region(self._reader, final)
        if self._in_reasoning:
            return self._step_reasoning(final)
        return self._step_start(final) if self._at_start else self._step_content(final)

    def _step_start(self, final: bool) -> bool:
        """Only blanks were said so far: here marks count that are ordinary text."""
        body = self._text.lstrip(BLANKS)
        if len(body) < len(self._text):
            self._voice.say(self._text[: len(self._text) - len(body)])
            self._text = body
            return bool(body)
        mark = self._start_finder.at_start(body, final=final)
        if mark is True:
            return False
        if mark is False:
            self._at_start = False
        else:
            self._open(str(mark))
        return True

    def _step_content(self, final: bool) -> bool:
        at, mark = self._later_finder.find(self._text, final=final)
        if at:
            self._voice.say(self._shown(self._text[:at]))
            if not self._holds_blanks:
                self._voice.release()
            self._text = self._text[at:]
        if mark is not None:
            self._open(mark)
        return mark is not None

    def _step_reasoning(self, final: bool) -> bool:
        reasoning = self._plan.reasoning
        if self._at_start_of_reasoning(final):
            return False
        at, mark = self._end_finder.find(self._text, final=final)
        if at:
            self._voice.think(self._alphabet.show(self._text[:at]))
            self._text = self._text[at:]
        if mark is None:
            return False
        if mark in self._ends or reasoning is None:
            self._text = self._text[len(mark) :]
            self._in_reasoning = False
        else:
            self._open(mark)
        return True

    def _at_start_of_reasoning(self, final: bool) -> bool:
        """Leave out what is no thought: the opening mark again, and the heading. True when more text is needed."""
        while self._heads:
            self._text = body = self._text.lstrip(BLANKS)
            if not final and any(head.startswith(body) for head in self._heads if head != body):
                return True
            head = next((head for head in self._heads if body.startswith(head)), None)
            if head is None:
                self._heads = ()
            else:
                self._text = body[len(head) :]
        return not self._text

    # --- changes of region

    def _begin_reasoning(self) -> None:
        self._in_reasoning = True
        heading = "" if self._plan.reasoning is None else self._plan.reasoning.heading
        self._heads = (*self._thinks, heading) if heading else tuple(self._thinks)

    def _open(self, mark: str) -> None:
        tools = self._plan.tools
        self._text = self._text[len(mark) :]
        if mark in self._opens and tools is not None:
            self._opened_by, self._calls_before = mark, self._voice.num_calls
            self._reader = tools.read(self._plan.definitions)
            if tools.only_at_start:
                self._opened_by = ""
                self._take_calls(self._reader.feed(self._alphabet.spell(mark)), "")
        else:
            self._begin_reasoning()

    def _step_region(self, reader: PayloadReader, final: bool) -> bool:
        at, mark = self._close_finder.find(self._text, final=final) if self._closes else (len(self._text), None)
        payload, self._text = self._text[:at], self._text[at:]
        if payload:
            self._take_calls(reader.feed(self._alphabet.spell(payload)), payload)
            if self._reader is None:
                return True
        if mark is None:
            return False
        self._text = self._text[len(mark) :]
        if not has_symbol(mark) and isinstance(reader, QuotedReader) and reader.in_quotes:
            self._take_calls(reader.feed(mark), mark)
            return True
        spelled = self._alphabet.spell(mark)
        self._take_calls(reader.close(is_complete=True), "")
        if self._reader is None and self._shows_close:
            self._shows_close = False
            self._utter(spelled)
        if self._reader is not None:
            self._end_region()
        return True

    def _take_calls(self, pieces: Iterable[object], payload: str) -> None:
        """Pass on what a reader found in `payload`; after a failure its rest is text again."""
        for piece in pieces:
            if isinstance(piece, CallStart):
                self._in_reasoning = False
                self._voice.start_call(piece.name, piece.call_id)
            elif isinstance(piece, Arguments):
                self._voice.add_arguments(piece.text)
            elif isinstance(piece, Failed):
                self._fail(piece, payload)
                return

    def _fail(self, failure: Failed, payload: str) -> None:
        had_calls = self._voice.num_calls > self._calls_before
        opened_by = "" if had_calls else self._alphabet.spell(self._opened_by)
        held, unread = failure.held, failure.unread
        if not payload:
            held, unread = held + unread, ""
        self._end_region()
        self._utter(opened_by + held)
        self._shows_close = not had_calls
        self._text = self._alphabet.tail(payload, unread) + self._text

    def _end_region(self) -> None:
        self._reader = None
        self._at_start = self._at_start and self._in_reasoning

    def _utter(self, text: str) -> None:
        if self._in_reasoning:
            self._voice.think(text)
        else:
            self._voice.say(text)

    def _shown(self, text: str) -> str:
        """Content as people see it; the close of a payload that was no call is part of it."""
        if not self._shows_close or not has_symbol(text):
            return self._alphabet.show(text)
        at = min((i for mark in self._closes if (i := text.find(mark)) >= 0), default=-1)
        if at < 0:
            return self._alphabet.show(text)
        self._shows_close = False
        return self._alphabet.show(text[:at]) + self._alphabet.spell(text[at]) + self._alphabet.show(text[at + 1 :])

    # --- formats that read the whole answer themselves

    def _read_whole(self, reader: AnswerReader, *, final: bool) -> None:
        while self._text:
            at, mark = self._finder.find(self._text, final=final)
            if at:
                text, self._text = self._alphabet.show(self._text[:at]), self._text[at:]
                self._take_answer(reader.feed(text))
            if mark is None:
                return
            self._text = self._text[len(mark) :]
            self._take_answer(reader.feed_mark(self._alphabet.spell(mark)))

    def _take_answer(self, pieces: Iterable[object]) -> None:
        for piece in pieces:
            if isinstance(piece, Thought):
                self._voice.think(piece.text)
            elif isinstance(piece, Said):
                self._voice.say(piece.text)
            elif isinstance(piece, CallStart):
                self._voice.start_call(piece.name, piece.call_id)
            elif isinstance(piece, Arguments):
                self._voice.add_arguments(piece.text)
            else:
                assert isinstance(piece, CallEnd), piece


def whole_of(plan: AnswerPlan) -> WholeAnswer | None:
    """The reader of whole answers that a plan's formats have, if any."""
    if plan.tools is not None and plan.tools.whole is not None:
        return plan.tools.whole
    return None if plan.reasoning is None else plan.reasoning.whole


def marks_in(plan: AnswerPlan) -> tuple[str, ...]:
    """Every text that is a mark under this plan."""
    whole, tools, reasoning = whole_of(plan), plan.tools, plan.reasoning
    return marks_of(
        () if whole is None else whole.marks,
        () if tools is None else (*tools.opens, *tools.closes, *tools.inner),
        () if reasoning is None else (*reasoning.opens, *reasoning.closes),
    )
