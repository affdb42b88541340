"""EngineClient: what a front end holds. Torch-free; the engine may live in another process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from samovar.core.outputs import EngineInfo, EngineStats, SequenceOutput
from samovar.core.request import Request


class EngineClient(Protocol):
    """A front end's handle on one engine.

    `generate` yields the outputs of every choice, interleaved, and returns after each of the `params.n` choices has
    sent a `finish_reason` or was stopped with `abort(request_id, index)`. Closing the iterator early aborts the
    request. Raises `OverloadedError` when a queue limit is reached and `EngineDeadError` when the engine is gone.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once the engine process died or stopped making progress; new requests are refused then."""
        ...

    @property
    def is_ready(self) -> bool:
        """True from the moment the model is loaded until shutdown begins or the engine dies."""
        ...

    def generate(self, request: Request) -> AsyncIterator[SequenceOutput]: ...

    async def abort(self, request_id: str, index: int | None = None) -> None: ...

    async def call(self, name: str) -> Any:
        """Run one of the engine's named calls (`reset_prefix_cache`, `block_usage`) and return its plain value."""
        ...

    def on_stats(self, listener: Callable[[EngineStats], None]) -> None:
        """Call `listener` with every snapshot that arrives."""
        ...

    async def close(self) -> None:
        """Stop the engine and wait until its process is gone."""
        ...
