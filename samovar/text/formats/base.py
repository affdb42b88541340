"""What a tool-call or reasoning format declares: its marks, how a payload becomes calls, and its grammar.

One file a format; the file's name is the format's name. `choose` finds every `ToolFormat` and `ReasoningFormat` that a
file of this folder has at its top level. Streaming is nobody's job but `text.regions`'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from samovar.core.tools import ToolDefinition
from samovar.text.lark import Lark

Tools: TypeAlias = Mapping[str, ToolDefinition]
"""The tools of a request by name."""


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. `call_id` only where the format carries one in its text."""

    name: str
    call_id: str | None = None


@dataclass(slots=True)  # not frozen: such pieces are made for every token, and freezing triples what one costs
class Arguments:
    """The next piece of the open call's arguments: all pieces of a call, joined, are the text of a JSON object."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The open call is complete."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The payload is none of this format (any more), and its reader is not used again. What is no call goes on as text.

    `held` was read but not given out as part of a call; it is not looked at again. `unread` is the end of what was fed,
    from where the reader stopped: marks are looked for in it. Where that is does not depend on how text was cut. A
    reader whose calls are over by their own syntax (a closed list) stops in the same way at what comes after them.
    """

    held: str = ""
    unread: str = ""


Piece: TypeAlias = CallStart | Arguments | CallEnd | Failed


class PayloadReader(Protocol):
    """Reads the text between the marks of one region, in pieces of any size. Never raises, whatever comes.

    The pieces it gives out do not depend on how the text was cut, once joined. Time is linear in the text.
    """

    def feed(self, text: str) -> Iterator[Piece]: ...

    def close(self, *, is_complete: bool) -> Iterator[Piece]:
        """The region's end was seen, or (`is_complete` false) generation ended before it."""
        ...


@dataclass(slots=True)
class Thought:
    """The next piece of the reasoning."""

    text: str


@dataclass(slots=True)
class Said:
    """The next piece of the content."""

    text: str


AnswerPiece: TypeAlias = Thought | Said | CallStart | Arguments | CallEnd


class AnswerReader(Protocol):
    """Tells a whole answer apart by itself. Never raises, whatever comes; does not depend on how text was cut."""

    @property
    def is_thinking(self) -> bool:
        """The next text would be reasoning."""
        ...

    def feed(self, text: str) -> Iterator[AnswerPiece]:
        """Text between marks. It may hold what looks like a mark but was not one."""
        ...

    def feed_mark(self, mark: str) -> Iterator[AnswerPiece]: ...

    def finish(self, *, is_complete: bool) -> Iterator[AnswerPiece]:
        """The answer is over: by a token that ends it (which was perhaps not fed), or (`is_complete` false) cut off."""
        ...


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """For formats whose marks stand for reasoning, content and calls alike: all marks, and who reads the answer.

    `read` takes the tools and whether the prompt ends within the reasoning. `between` lists what may stand, after the
    reasoning or at the start of an answer without any, before the first character of the content: a grammar of the
    content begins with one of these. `free` writes the expression of an answer that may have thoughts, remarks, content
    and calls as given by an expression.
    """

    marks: tuple[str, ...]
    read: Callable[[Tools, bool], AnswerReader]
    between: tuple[str, ...]
    free: Callable[[Lark, str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How one family of models writes tool calls.

    `opens`: marks that begin a region of calls; `closes`: the marks that end it (none: it lasts to the end of the
    text). `template_marks`: a chat template that holds all the texts of one of these tuples teaches this format.
    `read` makes the reader of one region. `grammar` writes the expression of one or more calls of `tools` (exactly one
    unless `parallel`), with every mark, into a `Lark`.
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    template_marks: tuple[tuple[str, ...], ...]
    read: Callable[[Tools], PayloadReader]
    grammar: Callable[[Lark, Sequence[ToolDefinition], bool], str]
    only_at_start: bool = False
    """`opens` count only where nothing but blanks was said before (formats whose mark is ordinary text, like "{")."""
    inner: tuple[str, ...] = ()
    """Tokens within a region that its reader needs to see as text, also where special tokens are hidden."""
    whole: WholeAnswer | None = None
    """Reads the whole answer instead: `opens`, `closes` and `read` then only describe one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How one family of models marks what it thinks. A template may already have written `opens[0]`."""

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    template_marks: tuple[tuple[str, ...], ...]
    ends_at_tools: bool = False
    """A region of calls that opens within the reasoning ends it, if its payload proves to be a call."""
    heading: str = ""
    """What a model writes first inside the marks and is no thought."""
    whole: WholeAnswer | None = None
    """Reads the whole answer instead; `opens` and `closes` still bound the thinking, for budgets and grammars."""
