"""Counters: the running totals behind `EngineStats`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from samovar.core.outputs import EngineStats
from samovar.schedule.live import LiveRequest

MAX_STEP_SIZES = 4096
"""Step sizes remembered between two snapshots; older ones are dropped if nobody asks."""


@dataclass(slots=True)
class Counters:
    """Counts a request once, however many choices it has and however often it is preempted."""

    totals: EngineStats
    num_live: int = 0
    """Sequences that have not ended."""
    step_sizes: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_STEP_SIZES))

    def start(self, parent: LiveRequest, num_cached_tokens: int) -> None:
        """The first choice of a request started for the first time, with this much of its prompt cached."""
        length = len(parent.request.prompt_token_ids)
        parent.num_cached_tokens = num_cached_tokens
        self.totals.prompt_tokens += length
        if parent.reads_cache and not parent.is_private:
            self.totals.prefix_cache_queries += length
            self.totals.prefix_cache_hits += num_cached_tokens

    def count_step(self, num_tokens: int, seconds: float) -> None:
        """A step came back."""
        self.totals.num_steps += 1
        self.totals.step_seconds += seconds
        self.step_sizes.append(num_tokens)

    def snapshot(self, num_running: int, num_free_blocks: int) -> EngineStats:
        """The figures now; step sizes are handed out once."""
        sizes = list(self.step_sizes)
        self.step_sizes.clear()
        num_blocks = self.totals.num_blocks
        return replace(
            self.totals,
            num_running=num_running,
            num_waiting=self.num_live - num_running,
            kv_cache_usage=(num_blocks - num_free_blocks) / num_blocks if num_blocks else 0.0,
            num_free_blocks=num_free_blocks,
            step_tokens=sizes,
        )
