"""Constraint: what the engine enforces on the tokens of a request. Made and checked by the front end."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningSpan:
    """The stretch of thinking that may come before the constrained text, by its marks as token ids.

    `is_open`: the prompt ends inside it. Otherwise the model may open it with `start_ids`, as its first tokens only
    (never, if that is empty). `end_ids` close it, and the grammar begins with the next token. With a `budget`, at most
    that many tokens are thought; then `end_ids` are forced.
    """

    is_open: bool
    end_ids: list[int]
    start_ids: list[int] = field(default_factory=list)
    budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """`grammar` is a grammar as llguidance takes it (its JSON or Lark text); None enforces only the reasoning budget."""

    grammar: str | None = None
    reasoning: ReasoningSpan | None = None
