"""What crosses scheduler -> worker -> scheduler: integers on the way down, tokens on the way back."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One decision of the scheduler. `sequences` is in batch order; rows that sample come back in that order."""

    step_id: int
    started: list[SlotStart] = field(default_factory=list)
    freed_slots: list[int] = field(default_factory=list)
    """Slots given up since the last step; applied before `started`."""
    sequences: list[ScheduledSequence] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) blocks to copy on the device before the step runs."""

    @property
    def num_tokens(self) -> int:
        return sum(s.num_new_tokens for s in self.sequences)


@dataclass(slots=True)
class SampledTokens:
    """Result of one sequence that sampled: one token, or several once drafts are verified."""

    slot: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class StepResult:
    """What the devices gave back for one `ScheduledStep`."""

    step_id: int
    sampled: list[SampledTokens] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """slot -> entries for the rows asked for, in order."""
    failed: dict[int, str] = field(default_factory=dict)
    """slot -> message: rows that failed alone; the others are valid."""
    seconds: float = 0.0
    """Device time of the step, for the learned time budget."""
