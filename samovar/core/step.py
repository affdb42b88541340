"""What crosses scheduler -> worker -> scheduler: integers on the way down, tokens on the way back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsIndex, overload

from samovar.core.outputs import TokenLogprobs
from samovar.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A sequence takes a row of the worker's persistent buffers (first admission, or resumption after preemption).

    `token_ids` are all known ids (prompt + output so far): penalties need them. `sampling_key` seeds the counter-based
    generator: a pure function of (seed, choice index) for seeded requests, random otherwise.
    """

    slot: int
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    stop_token_ids: list[int]
    """eos (unless ignored) and stop ids: what `min_tokens` must mask."""
    sampling_key: int


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: compute `num_new_tokens` tokens from position `start`.

    `token_ids` holds the ids to compute. It is one shorter than `num_new_tokens` when the last token is the one that
    the previous step sampled and that the host has not seen: the worker feeds it from its own `last_sampled[slot]`.
    `samples` is True when the step reaches the end of the known tokens, so that one token is sampled.
    """

    slot: int
    start: int
    num_new_tokens: int
    token_ids: list[int]
    new_blocks: list[int]
    """Block ids appended to this slot's block table before the step runs."""
    samples: bool
    position_of_sample: int = -1
    """Index the sampled token will have in the sequence: the counter of the random generator."""
    num_prompt_logprobs: int = 0
    """Rows of this chunk, from its first, whose next prompt token's logprob is wanted."""

    @property
    def feeds_last_sample(self) -> bool:
        return len(self.token_ids) < self.num_new_tokens


FED = -1
"""In columns of token ids: the slot's last sample, which the worker has and the host has not seen."""


class DecodeSequences(Sequence[ScheduledSequence]):
    """Sequences that compute one token and sample one each, as columns; rows are made for whoever asks for them.

    Hundreds of rows a step are too many objects to make where nobody reads them. `totals` counts each one's tokens, the
    new one included; `token_ids` has its id, or `FED`; `new_blocks` is by row, for those that get any. Columns do not
    change any more, and equal ones of two steps may be one list.
    """

    __slots__ = ("_rows", "new_blocks", "slots", "token_ids", "totals")

    def __init__(
        self, slots: list[int], totals: list[int], token_ids: list[int], new_blocks: dict[int, list[int]]
    ) -> None:
        self.slots, self.totals, self.token_ids, self.new_blocks = slots, totals, token_ids, new_blocks
        self._rows: list[ScheduledSequence] | None = None

    def later(self, count: int) -> DecodeSequences:
        """The same sequences `count` tokens on, each fed by what it sampled last; their blocks are there by then."""
        size = len(self.slots)
        return DecodeSequences(self.slots, [total + count for total in self.totals], [FED] * size, {})

    def rows(self) -> list[ScheduledSequence]:
        """All of them, made once."""
        if self._rows is None:
            blocks = self.new_blocks
            self._rows = [
                ScheduledSequence(slot, total - 1, 1, [] if token == FED else [token], blocks.get(i, []), True, total)
                for i, (slot, total, token) in enumerate(zip(self.slots, self.totals, self.token_ids, strict=True))
            ]
        return self._rows

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return iter(self.rows())

    @overload
    def __getitem__(self, index: SupportsIndex) -> ScheduledSequence: ...

    @overload
    def __getitem__(self, index: slice) -> list[ScheduledSequence]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> ScheduledSequence | list[ScheduledSequence]:
        return self.rows()[index]


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    """Which tokens the constrained sequences of a step may sample: bit `t % 32` of word `t // 32` allows token t.

    `words` is a NumPy array, int32 [len(slots), ceil(vocab / 32)]; slots without a row may sample anything.
    """

    slots: list[int]
    words: Any


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One decision of the scheduler. `sequences` is in batch order; rows that sample come back in that order."""

    step_id: int
    started: list[SlotStart] = field(default_factory=list)
    freed_slots: list[int] = field(default_factory=list)
    """Slots given up since the last step; applied before `started`."""
    sequences: list[ScheduledSequence] | DecodeSequences = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) blocks to copy on the device before the step runs."""
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) rows of the recurrent state to copy before the step runs: snapshots that sequences begin from."""
    state_saves: list[tuple[int, int]] = field(default_factory=list)
    """The same after it ran: snapshots of what sequences have come to. Every source is the slot of one in the step."""
    masks: TokenMasks | None = None
    num_rounds: int = 1
    """How many tokens each of `sequences`, which are `DecodeSequences` then, computes one after the other, every one but
    the first fed by what the round before sampled. They give the first round; `new_blocks` have room for all."""

    @property
    def num_tokens(self) -> int:
        return self.num_rounds * sum(s.num_new_tokens for s in self.sequences)


@dataclass(slots=True)
class SampledTokens:
    """Result of one sequence that sampled: one token, or one of each round up to the last that gave it one."""

    slot: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


class PlainTokens(Sequence[SampledTokens]):
    """One token each and no logprobs, as columns; like `DecodeSequences`, it makes its rows only when asked to."""

    __slots__ = ("slots", "token_ids")

    def __init__(self, slots: list[int], token_ids: list[int]) -> None:
        self.slots, self.token_ids = slots, token_ids

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[SampledTokens]:
        return iter(self[:])

    @overload
    def __getitem__(self, index: SupportsIndex) -> SampledTokens: ...

    @overload
    def __getitem__(self, index: slice) -> list[SampledTokens]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> SampledTokens | list[SampledTokens]:
        if isinstance(index, slice):
            pairs = zip(self.slots[index], self.token_ids[index], strict=True)
            return [SampledTokens(slot, [token]) for slot, token in pairs]
        return SampledTokens(self.slots[index], [self.token_ids[index]])


@dataclass(slots=True)
class StepResult:
    """What the devices gave back for one `ScheduledStep`."""

    step_id: int
    sampled: list[SampledTokens] | PlainTokens = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """slot -> entries for the rows asked for, in order."""
    failed: dict[int, str] = field(default_factory=dict)
    """slot -> message: rows that failed alone; the others are valid."""
    seconds: float = 0.0
    """Device time of the step, for the learned time budget."""


class PendingStep(Protocol):
    """A step on its way through the devices."""

    def result(self) -> StepResult:
        """Wait for the step and return what it gave; raises what made it fail as a whole. Called once."""
        ...
