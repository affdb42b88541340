"""EngineClient: what a front end holds. Torch-free; the engine may live in another process.

Besides generation an engine answers calls: `await client.call(name, **arguments)`. Arguments and answers are plain
values. A call raises `ValidationError` for an unknown name, argument or value, `ConflictError` (HTTP 409) where the
engine's state does not allow it now, and `EngineDeadError` if the engine is gone or gives no sign of life.

- `block_usage()` -> dict of counts: who holds which cache blocks.
- `reset_prefix_cache(reset_running_requests=False)` -> True: every cached prompt beginning is forgotten. With the
  argument running sequences lose their blocks, too, and compute them again; otherwise they go on.
- `pause(mode="abort")` -> None, once nothing runs any more. "abort" ends every live request (finish_reason "abort"),
  "wait" lets them come to their end first, "keep" freezes them where they stand.
- `resume()` -> None, also where nothing was paused. `ConflictError` while weights or cache are missing.
- `is_paused()` -> bool: True as soon as a pause was asked for, and while the engine sleeps.
- `sleep(level=1, mode="abort")` -> None, once asleep. Level 0 only pauses; 1 frees the K/V cache and, on a GPU, moves
  the weights to host memory (on a CPU they stay where they are); 2 drops the weights, too. `mode` as for `pause`; kept
  requests compute their K/V again after waking.
- `wake_up(tags=None)` -> bool: whether the engine is awake now. Tags: a list of "weights", "kv_cache", "scheduling";
  None or [] for all that is missing. Scheduling goes on as soon as weights and cache are both there.
- `is_sleeping()` -> bool: asleep, or not wholly awake.
- `release_kv_cache_memory(mode="keep")` -> int: bytes of K/V cache that were freed (0 if it was free already). The engine
  sleeps, with its weights, until `wake_up`.
- `start_profile(prefix="")` -> None; `ConflictError` if a profile is under way, or without --profiler-dir.
- `stop_profile()` -> str: the file that was written; `ConflictError` if none is under way.
- `server_info()` -> dict: `state`, `config` (group -> setting -> value), `decisions`, `memory_plan`, `memory` (bytes in use
  now and at most so far), `routes`, `versions`.

While an engine is paused or asleep, `client.refuses` says why new requests are refused; `generate` then raises
`OverloadedError` with reason "paused". Paused with mode "keep", it takes new requests, which wait.
"""

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

    @property
    def refuses(self) -> str | None:
        """Why new requests are refused although the engine is alive: it is paused or asleep. None if they are not."""
        ...

    async def call(self, name: str, **arguments: Any) -> Any:
        """Run one of the engine's named calls, listed at the top of this module, and return its plain value."""
        ...

    def on_stats(self, listener: Callable[[EngineStats], None]) -> None:
        """Call `listener` with every snapshot that arrives."""
        ...

    async def close(self) -> None:
        """Stop the engine and wait until its process is gone."""
        ...
