"""Standing: where each sequence stands and what it holds. The half of the scheduler that moves them; it decides nothing."""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter

from samovar.core.outputs import EngineStats, SequenceOutput
from samovar.core.sequence import FinishReason, SequenceStatus
from samovar.schedule.block_pool import BlockPool
from samovar.schedule.constrained import Constraints, Enforcer
from samovar.schedule.counters import Counters
from samovar.schedule.draft import Draft
from samovar.schedule.finish import news
from samovar.schedule.live import LiveRequest, LiveSequence
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.policy import WaitingQueue
from samovar.schedule.prefix_cache import PrefixCache
from samovar.schedule.snapshots import Snapshots

by_rank = attrgetter("rank")


class Standing:
    """Requests, sequences, slots and blocks of one engine.

    Each sequence is in one place: running, waiting, held back by its constraint or deferred by its parent.
    """

    def __init__(self, options: SchedulerOptions, num_blocks: int, enforcer: Enforcer | None) -> None:
        self.options = options
        self._block_size = options.block_size
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(self._pool, options.block_size)
        rows = options.num_snapshots
        self._snapshots = None if rows is None else Snapshots(options, rows, self._cache)
        # Without chunks a prompt must fit into one step.
        whole = 0 if options.enable_chunked_prefill else options.max_model_len
        self._max_step_tokens = max(options.max_num_batched_tokens, whole)
        # Every running sequence can always get its one token.
        self._max_running = min(options.max_num_seqs, self._max_step_tokens)
        self._free_slots = list(range(self._max_running))[::-1]
        self._freed_slots: list[int] = []
        self._requests: dict[str, LiveRequest] = {}
        self._waiting = WaitingQueue()
        self._constraints = Constraints(enforcer)
        self._running: list[LiveSequence] = []  # In rank order: the last one is the first to be preempted.
        self._launched: dict[int, Draft] = {}
        self._generation = 0
        self._counters = Counters(EngineStats(num_blocks=num_blocks))

    @property
    def has_work(self) -> bool:
        """True while a request has not ended, or a launched step has not been booked."""
        return bool(self._requests or self._launched)

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forget every cached prefix. What running sequences computed so far is not shared any more; they go on, or with
        `reset_running` lose their blocks and slots, wait, and compute their tokens again."""
        while reset_running and self._running:
            self._preempt(self._running[-1])
        self._cache.reset()
        if self._snapshots is not None:
            self._snapshots.rows.drop_all()
        self._generation += 1
        return True

    # Figures.

    def stats(self) -> EngineStats:
        """A snapshot; the step sizes are those since the last one."""
        return self._counters.snapshot(len(self._running), self._pool.num_free)

    def block_usage(self) -> dict[str, int]:
        """Who holds what, for leak tests: an idle scheduler shows no used block, no used slot and no request."""
        return {
            "num_blocks": self._pool.num_blocks,
            "free": self._pool.num_free,
            "used": self._pool.num_used,
            "published": self._pool.num_published,
            "used_slots": self._max_running - len(self._free_slots),
            "requests": len(self._requests),
            "sequences": self._counters.num_live,
            "launched_steps": len(self._launched),
        }

    # Changes of state.

    def _find_block(self, sequence: LiveSequence) -> bool:
        """Make sure a block is free, preempting from the end of the order; False if that came to `sequence` itself."""
        while not self._pool.num_free:
            victim = self._running[-1]
            victim.num_displaced += 1
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _confirm(self, sequence: LiveSequence, end: int) -> None:
        """Believe that the K/V of the first `end` tokens is written: publish full blocks, let the siblings go."""
        parent = sequence.parent
        num_full, done = end // self._block_size, sequence.num_published
        if num_full > done:
            sequence.num_published = num_full
            if parent.root is not None:
                self._cache.extend(sequence.block_hashes, parent.root, sequence.token_ids, num_full)
                self._cache.publish(sequence.block_table[done:num_full], sequence.block_hashes[done:num_full])
        if parent.deferred and end >= parent.num_shared_tokens:
            num_shared = parent.num_shared_tokens // self._block_size
            for sibling in parent.deferred:
                sibling.block_hashes = sequence.block_hashes[:num_shared]
                self._enqueue(sibling)
            parent.deferred = []

    def _enqueue(self, sequence: LiveSequence) -> None:
        """To the queue, or to those that wait for their matchers first."""
        if not self._constraints.holds_back(sequence):
            self._waiting.add(sequence)

    def _preempt(self, sequence: LiveSequence) -> None:
        """Running to waiting: blocks and slot go, tokens stay."""
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self._counters.totals.num_preemptions += 1
        self._waiting.add(sequence)

    def _release(self, sequence: LiveSequence) -> None:
        """Take a running sequence's place in the order, its slot and its blocks."""
        del self._running[bisect_left(self._running, sequence.rank, key=by_rank)]
        blocks, sequence.block_table = sequence.block_table, []
        self._pool.free(blocks)
        slot, sequence.slot = sequence.slot, None
        assert slot is not None
        self._free_slots.append(slot)
        if sequence.is_started:
            self._freed_slots.append(slot)
        if self._snapshots is not None:
            self._snapshots.leave(sequence)
        sequence.is_started = False
        sequence.stay += 1
        sequence.num_computed_tokens = 0

    def _end_with_error(self, sequence: LiveSequence, message: str) -> SequenceOutput:
        self._end(sequence, FinishReason.ERROR)
        return news(sequence, [], error=message)

    def _end(self, sequence: LiveSequence, reason: FinishReason) -> None:
        """Whatever state to finished. If it led siblings that still wait for its prompt, the next one leads."""
        parent = sequence.parent
        was_deferred = sequence in parent.deferred
        was_held = self._constraints.drop(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self._release(sequence)
        elif was_deferred:
            parent.deferred.remove(sequence)
        elif not was_held:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        self._counters.num_live -= 1
        del parent.live[sequence.index]
        if parent.deferred and not was_deferred:
            self._enqueue(parent.deferred.pop(0))
        if not parent.live:
            del self._requests[sequence.request.request_id]
