"""RunningResponse: a response in the background, and the events of its stream for everybody who follows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from samovar.errors import ValidationError
from samovar.server.problems import error_of
from samovar.server.responses.schema import ResponseEvent, ResponseObject

_encode = msgspec.json.Encoder().encode
_NUMBER, _TEXT = -(2**53), "\0text\0"
"""Stand for what differs in a `DeltaFrame`; neither is found in an id."""


def frame(event: ResponseEvent) -> bytes:
    """One event as it goes over the wire."""
    return b"event: " + event.type.encode() + b"\ndata: " + _encode(event) + b"\n\n"


class DeltaFrame:
    """The frame of a delta, all of it made beforehand but its number and its text."""

    __slots__ = ("_after", "_before", "_between")

    def __init__(self, event_type: str, **fields: Any) -> None:
        sample = frame(ResponseEvent(type=event_type, sequence_number=_NUMBER, delta=_TEXT, **fields))
        self._before, _, rest = sample.partition(str(_NUMBER).encode())
        self._between, _, self._after = rest.partition(_encode(_TEXT))

    def with_text(self, number: int, text: str) -> bytes:
        """The frame of one delta."""
        return b"%b%d%b%b%b" % (self._before, number, self._between, _encode(text), self._after)


def error_frame(number: int, code: str, message: str) -> bytes:
    """The event that ends a stream which cannot go on."""
    return frame(ResponseEvent(type="error", sequence_number=number, code=code, message=message, param=None))


class RunningResponse:
    """Keeps the newest `max_bytes` of its frames; the frame at index i has sequence number `first_frame` + i."""

    def __init__(self, response: ResponseObject, owner: str) -> None:
        self.response = response
        self.owner = owner
        self.frames: list[bytes] = []
        self.first_frame = 0
        self.max_bytes = 0
        self.task: asyncio.Task[None] | None = None
        self._num_bytes = 0
        self._is_over = False
        self._news = asyncio.Event()

    def add(self, piece: bytes) -> None:
        """Keep a frame, and wake those who follow."""
        self.frames.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes > self.max_bytes:
            self._forget()
        self._wake()

    def end(self) -> None:
        """No more frames will come."""
        self._is_over = True
        self._wake()

    def last_words(self, failure: BaseException) -> bytes:
        """What those who follow hear when their connection ends, but the response does not."""
        message = error_of(failure).error.message
        return error_frame(self.first_frame + len(self.frames), "server_error", message)

    async def cancel(self) -> None:
        """Stop generating, and return when that has happened."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """The frames behind sequence number `after`, as they come. Raises `ValidationError` if some are gone by now."""
        check_kept(after, self.first_frame)
        at = after + 1
        while True:
            if at < self.first_frame:
                yield error_frame(at, "events_dropped", "the client reads too slowly; fetch the response instead")
                return
            news = self._news
            if new := self.frames[at - self.first_frame :]:
                at += len(new)
                yield b"".join(new)
            elif self._is_over:
                return
            else:
                await news.wait()

    def _forget(self) -> None:
        """Drop the older half."""
        half = max(1, len(self.frames) // 2)
        self._num_bytes -= sum(map(len, self.frames[:half]))
        del self.frames[:half]
        self.first_frame += half

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def check_kept(after: int, first_frame: int) -> None:
    """Raise `ValidationError` if events that follow number `after` are not kept any more."""
    if after + 1 < first_frame:
        message = (
            f"starting_after: the events before number {first_frame} are not kept any more; fetch the response instead"
        )
        raise ValidationError(message, parameter="starting_after", value=after)


def replay(frames: Sequence[bytes], first_frame: int, after: int) -> bytes:
    """The frames of an ended response behind sequence number `after`."""
    check_kept(after, first_frame)
    return b"".join(frames[after + 1 - first_frame :])
