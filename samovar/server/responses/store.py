"""ResponseStore: answers kept for `previous_response_id`, retrieval and item references. Bounded in bytes and count.

What was used longest ago goes first. An answer's whole chain counts as used when it is, and a chain loses its newest
answer before the ones that this builds on, so that whatever is still there can be continued.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from samovar.errors import NotFoundError, OverloadedError, ValidationError
from samovar.server.responses.running import RunningResponse

MAX_RESPONSES = 16_384
MAX_RUNNING = 64
"""Responses that may run in the background at one time."""
OVERHEAD = 512
"""Bytes that keeping an answer takes beside its contents, and an eighth of it for each item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """One answer: its own input items (as a JSON list), the object as it was sent, and its stream, if that is kept."""

    response_id: str
    owner: str
    previous: str | None
    input_items: bytes
    body: bytes
    frames: tuple[bytes, ...] | None = None
    first_frame: int = 0
    """Sequence number of the first frame: a long stream is kept from its end."""
    is_background: bool = False
    item_ids: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """What it counts for, in bytes."""
        streamed = sum(len(frame) + 64 for frame in self.frames or ())
        return len(self.input_items) + len(self.body) + streamed + OVERHEAD + len(self.item_ids) * OVERHEAD // 8

    def items(self) -> list[dict[str, Any]]:
        """Its input items."""
        return msgspec.json.decode(self.input_items, type=list[dict[str, Any]])

    def output(self) -> list[dict[str, Any]]:
        """Its output items."""
        return msgspec.json.decode(self.body, type=_Output).output


class _Output(msgspec.Struct):
    """The part of a stored object that the next turn builds on."""

    output: list[dict[str, Any]]


class ResponseStore:
    """At most `max_bytes` of answers; 0 keeps none. Everything in it belongs to the key that sent the request."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._items: dict[str, str] = {}
        self._running: dict[str, RunningResponse] = {}

    def __len__(self) -> int:
        return len(self._kept)

    # --- responses that run in the background

    def begin(self, run: RunningResponse) -> None:
        """Note a response that will run without its client. Raises `OverloadedError` if there are too many."""
        if len(self._running) >= MAX_RUNNING:
            message = f"{MAX_RUNNING} responses run in the background already; retry when one has ended"
            raise OverloadedError(message, reason="background")
        run.max_bytes = self.max_bytes // MAX_RUNNING
        self._running[run.response.id] = run

    def running(self, owner: str, response_id: str) -> RunningResponse | None:
        """A response that runs in the background."""
        found = self._running.get(response_id)
        return found if found is not None and found.owner == owner else None

    def end(self, run: RunningResponse) -> None:
        """A response does not run any more. Its events are kept with it, if there is room."""
        self._running.pop(run.response.id, None)
        kept = self._kept.get(run.response.id)
        if kept is not None:
            self.put(replace(kept, frames=tuple(run.frames), first_frame=run.first_frame))

    # --- responses that are kept

    def put(self, response: KeptResponse) -> bool:
        """Keep an answer, at the cost of older ones. False, and nothing is kept, if it is too large by itself."""
        size = response.size
        if size > self.max_bytes:
            return False
        self._drop(response.response_id)
        self._kept[response.response_id] = response
        self.num_bytes += size
        self._items |= dict.fromkeys(response.item_ids, response.response_id)
        self._touch(response)
        while self.num_bytes > self.max_bytes or len(self._kept) > MAX_RESPONSES:
            self._drop(next(iter(self._kept)))
        return response.response_id in self._kept

    def get(self, owner: str, response_id: str, parameter: str = "response_id") -> KeptResponse:
        """An answer by its id. Raises `NotFoundError`."""
        found = self._find(owner, response_id, parameter)
        self._touch(found)
        return found

    def _find(self, owner: str, response_id: str, parameter: str) -> KeptResponse:
        found = self._kept.get(response_id)
        if found is None or found.owner != owner:
            message = (
                f"{parameter}: no response {response_id[:100]!r} is stored here (never stored, deleted, or dropped to make "
                "room: see --responses-store-bytes)"
            )
            raise NotFoundError(message, parameter=parameter, value=response_id)
        return found

    def chain(self, owner: str, response_id: str, parameter: str = "previous_response_id") -> list[KeptResponse]:
        """An answer and all that it builds on, the first one first. Raises `NotFoundError` if one is missing."""
        found = [self.get(owner, response_id, parameter)]
        while (before := found[-1].previous) is not None:
            if len(found) > MAX_RESPONSES:
                raise ValidationError(f"{parameter}: the chain of responses is too long", parameter=parameter)
            # Only found: the newest one touched the whole chain, and once for each of them would be quadratic.
            found.append(self._find(owner, before, parameter))
        return found[::-1]

    def find_item(self, owner: str, item_id: str) -> dict[str, Any] | None:
        """An item of a stored answer, input or output, by its id. Changes nothing, so that any thread may ask."""
        response = self._kept.get(self._items.get(item_id, ""))
        if response is None or response.owner != owner:
            return None
        return next((item for item in [*response.output(), *response.items()] if item.get("id") == item_id), None)

    def delete(self, owner: str, response_id: str) -> None:
        """Forget an answer. Raises `NotFoundError`."""
        self._drop(self.get(owner, response_id).response_id)

    def _touch(self, response: KeptResponse) -> None:
        """Make an answer and its chain the last to go, the answer before what it builds on."""
        at: KeptResponse | None = response
        for _ in range(MAX_RESPONSES):
            if at is None:
                return
            self._kept.move_to_end(at.response_id)
            at = self._kept.get(at.previous or "")

    def _drop(self, response_id: str) -> None:
        gone = self._kept.pop(response_id, None)
        if gone is None:
            return
        self.num_bytes -= gone.size
        for item_id in gone.item_ids:
            if self._items.get(item_id) == response_id:
                del self._items[item_id]


def ids_of(items: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The ids of items as JSON."""
    return tuple(item["id"] for item in items if isinstance(item.get("id"), str))
