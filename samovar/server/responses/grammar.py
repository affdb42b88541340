"""EventGrammar: in which order the events of a response may come. The generator walks it, and so does the tests' checker.

One item is open at a time, and in it one part. Every delta has a done, every part and item that was added is done before
the last event, and nothing comes after that.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any


class Place(Enum):
    """Where a stream stands."""

    START = auto()
    CREATED = auto()
    QUEUED = auto()
    BETWEEN_ITEMS = auto()
    MESSAGE = auto()
    TEXT = auto()
    TEXT_DONE = auto()
    REFUSAL = auto()
    REFUSAL_DONE = auto()
    REASONING = auto()
    THOUGHT = auto()
    THOUGHT_DONE = auto()
    FUNCTION = auto()
    FUNCTION_DONE = auto()
    CUSTOM = auto()
    CUSTOM_DONE = auto()
    END = auto()


CREATED, QUEUED, IN_PROGRESS = "response.created", "response.queued", "response.in_progress"
COMPLETED, INCOMPLETE, FAILED = "response.completed", "response.incomplete", "response.failed"
ERROR = "error"
ITEM_ADDED, ITEM_DONE = "response.output_item.added", "response.output_item.done"
PART_ADDED, PART_DONE = "response.content_part.added", "response.content_part.done"
TEXT_DELTA, TEXT_DONE = "response.output_text.delta", "response.output_text.done"
REFUSAL_DELTA, REFUSAL_DONE = "response.refusal.delta", "response.refusal.done"
REASONING_DELTA, REASONING_DONE = "response.reasoning_text.delta", "response.reasoning_text.done"
ARGUMENTS_DELTA, ARGUMENTS_DONE = "response.function_call_arguments.delta", "response.function_call_arguments.done"
INPUT_DELTA, INPUT_DONE = "response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"

LAST = frozenset({COMPLETED, INCOMPLETE, FAILED, ERROR})
"""Events that end a stream."""

_ENDS = {(COMPLETED, ""): Place.END, (INCOMPLETE, ""): Place.END, (FAILED, ""): Place.END, (ERROR, ""): Place.END}
_BROKEN = {(ERROR, ""): Place.END}

MOVES: dict[Place, dict[tuple[str, str], Place]] = {
    Place.START: {(CREATED, ""): Place.CREATED} | _BROKEN,
    Place.CREATED: {
        (QUEUED, ""): Place.QUEUED,
        (IN_PROGRESS, ""): Place.BETWEEN_ITEMS,
        (FAILED, ""): Place.END,
    } | _BROKEN,
    Place.QUEUED: {
        (IN_PROGRESS, ""): Place.BETWEEN_ITEMS,
        (INCOMPLETE, ""): Place.END,
        (FAILED, ""): Place.END,
    } | _BROKEN,
    Place.BETWEEN_ITEMS: {
        (ITEM_ADDED, "message"): Place.MESSAGE,
        (ITEM_ADDED, "reasoning"): Place.REASONING,
        (ITEM_ADDED, "function_call"): Place.FUNCTION,
        (ITEM_ADDED, "custom_tool_call"): Place.CUSTOM,
    } | _ENDS,
    Place.MESSAGE: {
        (PART_ADDED, "output_text"): Place.TEXT,
        (PART_ADDED, "refusal"): Place.REFUSAL,
        (ITEM_DONE, "message"): Place.BETWEEN_ITEMS,
    } | _BROKEN,
    Place.TEXT: {(TEXT_DELTA, ""): Place.TEXT, (TEXT_DONE, ""): Place.TEXT_DONE} | _BROKEN,
    Place.TEXT_DONE: {(PART_DONE, "output_text"): Place.MESSAGE} | _BROKEN,
    Place.REFUSAL: {(REFUSAL_DELTA, ""): Place.REFUSAL, (REFUSAL_DONE, ""): Place.REFUSAL_DONE} | _BROKEN,
    Place.REFUSAL_DONE: {(PART_DONE, "refusal"): Place.MESSAGE} | _BROKEN,
    Place.REASONING: {
        (PART_ADDED, "reasoning_text"): Place.THOUGHT,
        (ITEM_DONE, "reasoning"): Place.BETWEEN_ITEMS,
    } | _BROKEN,
    Place.THOUGHT: {(REASONING_DELTA, ""): Place.THOUGHT, (REASONING_DONE, ""): Place.THOUGHT_DONE} | _BROKEN,
    Place.THOUGHT_DONE: {(PART_DONE, "reasoning_text"): Place.REASONING} | _BROKEN,
    Place.FUNCTION: {(ARGUMENTS_DELTA, ""): Place.FUNCTION, (ARGUMENTS_DONE, ""): Place.FUNCTION_DONE} | _BROKEN,
    Place.FUNCTION_DONE: {(ITEM_DONE, "function_call"): Place.BETWEEN_ITEMS} | _BROKEN,
    Place.CUSTOM: {(INPUT_DELTA, ""): Place.CUSTOM, (INPUT_DONE, ""): Place.CUSTOM_DONE} | _BROKEN,
    Place.CUSTOM_DONE: {(ITEM_DONE, "custom_tool_call"): Place.BETWEEN_ITEMS} | _BROKEN,
    Place.END: {},
}  # fmt: skip
"""Place -> (event type, type of the item or part it is about, if any) -> the next place."""


class EventOrderError(RuntimeError):
    """An event came where none of its kind may stand."""


class EventGrammar:
    """One stream's way through `MOVES`, and its sequence numbers, which count up from 0."""

    __slots__ = ("next_number", "place")

    def __init__(self) -> None:
        self.place = Place.START
        self.next_number = 0

    @property
    def is_over(self) -> bool:
        """Whether the last event was seen."""
        return self.place is Place.END

    def step(self, event_type: str, about: str = "") -> int:
        """Take one event; returns its sequence number. Raises `EventOrderError`."""
        place = MOVES[self.place].get((event_type, about))
        if place is None:
            raise EventOrderError(f"{event_type} {about}".strip() + f" cannot stand at {self.place.name}")
        self.place = place
        number = self.next_number
        self.next_number += 1
        return number


def subject_of(event: dict[str, Any]) -> str:
    """The type of the item or part that an event as JSON adds or ends; "" for other events."""
    thing = event.get("item") or event.get("part")
    return str(thing["type"]) if isinstance(thing, dict) else ""
