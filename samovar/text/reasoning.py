"""Where a prompt leaves the model: inside its reasoning, past it, or free to begin with it. Read from the prompt itself.

A template decides with its variables and the history whether it opens the reasoning; what it wrote is the only truth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from samovar.core.constraint import ReasoningSpan
from samovar.text.chat_template import RenderedPrompt
from samovar.text.formats.base import ReasoningFormat
from samovar.text.tokenizer import Tokenizer

PromptEnd: TypeAlias = Literal["open", "closed", "free"]

TAIL_TOKENS = 64
"""How much of a prompt of token ids is looked at."""


def prompt_end(
    rendered: RenderedPrompt,
    format: ReasoningFormat,
    *,
    continued: str | None = None,
    without_opening: Callable[[], str] | None = None,
) -> PromptEnd:
    """Where a rendered conversation ends. What clients wrote counts for nothing, but for the text that is `continued`.

    `without_opening` renders the prompt without the beginning of the answer; it is asked only if words follow a mark.
    """
    opened, size = _last(rendered, format.opens)
    closed, _ = _last(rendered, format.closes)
    text = rendered.text
    if opened < 0 or closed > opened:
        is_over = continued is not None or (closed >= 0 and _ends_with(text, closed, format.closes))
        return "closed" if is_over else "free"
    thought = text[opened + size :].strip()
    if not thought:
        return "open"
    if continued is not None:
        inside = max(((continued.rfind(mark), len(mark)) for mark in format.opens), default=(-1, 0))
        is_own = inside[0] >= 0 and continued[sum(inside) :].strip() == thought
        return "open" if is_own else "closed"
    is_template = without_opening is not None and opened >= len(without_opening())
    return "open" if is_template else "free"


def end_of_ids(tokenizer: Tokenizer, token_ids: Sequence[int], format: ReasoningFormat) -> PromptEnd:
    """Where a prompt of token ids ends."""
    tail = tokenizer.decode(token_ids[-TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    if tail.endswith(format.opens):
        return "open"
    return "closed" if tail.endswith(format.closes) else "free"


def reasoning_span(
    tokenizer: Tokenizer, format: ReasoningFormat, end: PromptEnd, budget: int | None, *, may_open: bool = True
) -> ReasoningSpan | None:
    """What the engine has to know about thinking before the constrained text; None if there is none."""
    if end == "closed" or (end == "free" and not may_open):
        return None
    start = [] if end == "open" else tokenizer.encode(format.opens[0], add_special_tokens=False)
    return ReasoningSpan(
        is_open=end == "open",
        end_ids=tokenizer.encode(format.closes[0], add_special_tokens=False),
        start_ids=start,
        budget=None if budget is None or budget < 0 else budget,
    )


def _last(rendered: RenderedPrompt, marks: Sequence[str]) -> tuple[int, int]:
    """(place, length) of the last of the marks that no client wrote with a special token's text; place -1: none."""
    found = (-1, 0)
    for mark in marks:
        at = rendered.text.rfind(mark)
        while at > found[0] and _is_literal(rendered, at, at + len(mark)):
            at = rendered.text.rfind(mark, 0, at)
        if at > found[0] or (at == found[0] >= 0 and len(mark) > found[1]):
            found = (at, len(mark))
    return found


def _is_literal(rendered: RenderedPrompt, start: int, end: int) -> bool:
    return any(first < end and start < last for first, last in rendered.literal)


def _ends_with(text: str, at: int, marks: Sequence[str]) -> bool:
    rest = text[at:].rstrip()
    return rest in {mark.rstrip() for mark in marks}
