"""StreamRules: the order in which the events of a streamed message may come. The writer obeys it, tests check with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

BEFORE: Final = "before message_start"
BETWEEN: Final = "between blocks"
ENDING: Final = "after message_delta"
OVER: Final = "over"

BLOCKS: Final = ("text", "thinking", "tool_use")
DELTAS: Final = {
    ("text", "text_delta"): "text",
    ("thinking", "thinking_delta"): "thinking",
    ("thinking", "signature_delta"): "signed thinking",
    ("tool_use", "input_json_delta"): "tool_use",
}
"""(open block, kind of delta) -> the state behind it. Nothing but its end follows the signature of a thinking block."""

TRANSITIONS: Final[dict[tuple[str, str], str]] = {
    (BEFORE, "message_start"): BETWEEN,
    **{(BETWEEN, f"content_block_start {kind}"): kind for kind in BLOCKS},
    **{(state, f"content_block_delta {kind}"): after for (state, kind), after in DELTAS.items()},
    ("text", "content_block_stop"): BETWEEN,
    ("signed thinking", "content_block_stop"): BETWEEN,
    ("tool_use", "content_block_stop"): BETWEEN,
    (BETWEEN, "message_delta"): ENDING,
    (ENDING, "message_stop"): OVER,
}
"""(state, event) -> the next state; what is not here may not come. See `advance` for ping and error."""


class StreamOrderError(Exception):
    """An event came where it may not: a bug of whoever wrote it."""


class StreamRules:
    """The state of one stream. `index` is the open block's, or the next one's."""

    __slots__ = ("index", "state")

    def __init__(self) -> None:
        self.state: str = BEFORE
        self.index = 0

    @property
    def is_over(self) -> bool:
        """Whether the last event has come: message_stop, or an error."""
        return self.state == OVER

    def advance(self, event: str, index: int | None = None) -> None:
        """Note an event: its name, with the kind of block or delta behind it, and its index. Raises `StreamOrderError`.

        A ping may come anywhere between the first and the last event; an error instead of anything, as the last.
        """
        if event == "ping":
            if self.state in (BEFORE, OVER):
                raise StreamOrderError(f"ping {self.state}")
            return
        if event == "error" and self.state != OVER:
            self.state = OVER
            return
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise StreamOrderError(f"{event} in state {self.state!r}")
        if event.startswith("content_block") and index != self.index:
            raise StreamOrderError(f"{event} with index {index}, expected {self.index}")
        if event == "content_block_stop":
            self.index += 1
        self.state = following


def symbol_of(event: Mapping[str, Any]) -> tuple[str, int | None]:
    """An event as JSON -> what `StreamRules.advance` takes."""
    name = event["type"]
    if name == "content_block_start":
        name = f"{name} {event['content_block']['type']}"
    elif name == "content_block_delta":
        name = f"{name} {event['delta']['type']}"
    return name, event.get("index")
