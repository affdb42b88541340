"""Admission: the rules that decide who enters the queue, who starts running, and how many tokens a step may hold.

Each rule is one function that passes or says why not. `ENTRY_RULES` guard `Scheduler.add` and raise;
`READY_RULES` and `FIT_RULES` guard the change from waiting to running, in the order of the lists.
Whoever fails one of these keeps its place and nobody overtakes it: that is what lets every request end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from samovar.core.request import Request
from samovar.errors import ValidationError
from samovar.schedule.cache_groups import CacheGroup
from samovar.schedule.live import LiveSequence
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.step_time import StepTimeModel

ROUND_TOKENS = 64
"""A step that is cut to its time has a multiple of so many tokens: kernels of matrix libraries change with the number,
and what a device meets for the first time costs it a pause."""
PREFILL_SHARE = 1 / 8
"""While sequences decode, prompts get at least this share of the seconds that the decoding takes, over any target."""
MIN_PREFILL_TOKENS = 16
"""And at least so many tokens, whatever the predictions say."""


# Entering the queue.


def fits_context(request: Request, options: SchedulerOptions, num_blocks: int) -> None:
    """A prompt longer than the context never runs."""
    length, limit = len(request.prompt_token_ids), options.max_model_len
    if not 1 <= length <= limit:
        message = f"the prompt has {length} tokens; this model's context holds 1 to {limit}"
        raise ValidationError(message, parameter="prompt", value=length)


def fits_pool(request: Request, options: SchedulerOptions, num_blocks: int) -> None:
    """A prompt larger than the whole cache never runs; output that outgrows it ends with `length`."""
    length, capacity = len(request.prompt_token_ids), num_blocks * options.block_size
    if length > capacity:
        message = f"the prompt has {length} tokens, but the cache holds {capacity}; shorten it or raise --memory"
        raise ValidationError(message, parameter="prompt", value=length)


ENTRY_RULES: tuple[Callable[[Request, SchedulerOptions, int], None], ...] = (fits_context, fits_pool)


# What one step may hold.


class StepBudget:
    """Tokens and seconds of one step, used up as sequences get their share.

    `has_company` says that there is more than one sequence, which is when `long_prefill_token_threshold` counts.
    """

    def __init__(self, options: SchedulerOptions, max_tokens: int, times: StepTimeModel, *, has_company: bool) -> None:
        self._options = options
        self._times = times
        self._has_company = has_company
        self._max_tokens = max_tokens
        self.tokens_left = max_tokens
        self.num_pairs = 0
        """(query, key) pairs of the prompts."""
        self.decode_pairs = 0
        self.num_decoding = 0
        """Running sequences past their prompt: whom a long step would keep waiting."""
        self._prefill_tokens = 0
        self._num_decodes = 0

    @property
    def num_tokens(self) -> int:
        """Tokens given out."""
        return self._max_tokens - self.tokens_left

    @property
    def has_prefill(self) -> bool:
        """Whether any tokens were given to prompts."""
        return self._prefill_tokens > 0

    def chunk(self, start: int, wanted: int) -> int:
        """How many of `wanted` tokens from position `start` a sequence may compute now; 0 to wait for a later step."""
        size = min(wanted, self.tokens_left)
        if not self._options.enable_chunked_prefill:
            return wanted if size == wanted else 0
        if self._options.long_prefill_token_threshold and self._has_company:
            size = min(size, self._options.long_prefill_token_threshold)
        if self._options.step_time_target and self.num_decoding:
            size = min(size, self._in_time(start))
            if size < wanted:
                size -= (self.num_tokens + size) % ROUND_TOKENS if size >= ROUND_TOKENS else 0
        return size

    def steps(self, wanted: int, chunk: int) -> int:
        """Steps that `wanted` tokens take if this one allows `chunk` of them; 0 if it allows none."""
        if not chunk:
            return 0
        # A chunk cut short because others took their share of this step says little about the steps to come.
        pace = chunk if chunk < self.tokens_left else max(chunk, self._max_tokens - self.num_decoding)
        return -(-wanted // pace)

    def take(self, start: int, count: int) -> None:
        """Give out `count` tokens of a prompt (or of a recompute) from position `start`."""
        self.tokens_left -= count
        self._prefill_tokens += count
        self.num_pairs += count * start + count * (count + 1) // 2

    def take_decodes(self, count: int, num_pairs: int) -> None:
        """Give out one token to each of `count` decoding sequences that attend to `num_pairs` tokens together."""
        self.tokens_left -= count
        self.decode_pairs = num_pairs
        self._num_decodes = count

    def report(self, seconds: float) -> None:
        """Let the time model learn that a step with this budget took `seconds`."""
        self._times.observe(
            self.num_tokens, self.num_pairs, seconds, has_prefill=self.has_prefill, decode_pairs=self.decode_pairs
        )

    def _in_time(self, start: int) -> int:
        """Tokens that keep the step within its time target, but never less than the share kept for prefill."""
        decoding = self._times.predict(self._num_decodes, 0, self.decode_pairs)
        target = max(self._options.step_time_target, decoding * (1 + PREFILL_SHARE))
        planned = self._times.predict(self.num_tokens, self.num_pairs, self.decode_pairs)
        size = self._times.tokens_within(target - planned, start)
        # Cost grows unevenly with size, so that a step is at most twice the largest one measured lately.
        size = min(size, 2 * self._times.largest_step - self.num_tokens, self._max_tokens)
        return max(int(size), MIN_PREFILL_TOKENS - self._prefill_tokens, 0)


# Starting to run.


@dataclass(slots=True)
class House:
    """What start rules look at."""

    group: CacheGroup
    num_blocks: int
    num_free: int
    num_running: int
    max_running: int


@dataclass(slots=True)
class Need:
    """What a waiting sequence needs to start."""

    num_blocks: int
    """Blocks that would leave the free list: new ones, and cached ones that nobody holds now."""
    num_steps: int
    """Steps until its known tokens are computed; 0 if this step allows nothing."""


def need_of(sequence: LiveSequence, start: int, group: CacheGroup, num_free_cached: int, budget: StepBudget) -> Need:
    """What a sequence needs whose first `start` tokens are cached, in blocks of which `num_free_cached` nobody holds."""
    num_tokens = len(sequence.token_ids)
    wanted = num_tokens - start
    num_blocks = group.num_blocks(num_tokens) - group.num_blocks(start) + num_free_cached
    return Need(num_blocks, budget.steps(wanted, budget.chunk(start, wanted)))


def is_settled(sequence: LiveSequence, house: House) -> str | None:
    """A preempted sequence waits for its token in flight: it must be known before it can be recomputed."""
    return "token in flight" if sequence.num_in_flight else None


def has_slot(sequence: LiveSequence, house: House) -> str | None:
    """One row of the worker's buffers per running sequence."""
    return None if house.num_running < house.max_running else "no slot"


def has_tokens(sequence: LiveSequence, need: Need, house: House) -> str | None:
    """It must be able to compute at least one token now."""
    return None if need.num_steps else "no tokens left in this step"


def has_blocks(sequence: LiveSequence, need: Need, house: House) -> str | None:
    """All its known tokens must fit now, and leave room for the others to grow while it computes them.

    All blocks are taken at once, so that a sequence that started can finish its prefill. The room doubles each time
    the sequence was preempted because others grew, so that this happens about log2(blocks) times at most; with nobody
    else running it needs no room.
    """
    room = house.num_running * house.group.num_blocks(need.num_steps)
    room = min(room << min(sequence.num_displaced, 32), house.num_blocks)
    return None if need.num_blocks + room <= house.num_free else "not enough blocks"


READY_RULES: tuple[Callable[[LiveSequence, House], str | None], ...] = (is_settled, has_slot)
"""Cheap ones, asked before the prefix cache is searched."""
FIT_RULES: tuple[Callable[[LiveSequence, Need, House], str | None], ...] = (has_tokens, has_blocks)


def why_not_ready(sequence: LiveSequence, house: House) -> str | None:
    """The first reason of `READY_RULES`, or None."""
    return next((reason for rule in READY_RULES if (reason := rule(sequence, house))), None)


def why_not_fit(sequence: LiveSequence, need: Need, house: House) -> str | None:
    """The first reason of `FIT_RULES`, or None."""
    return next((reason for rule in FIT_RULES if (reason := rule(sequence, need, house))), None)
