"""LiveRequest, LiveSequence: what the scheduler remembers about a request until its last choice ends."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from samovar.core.outputs import SequenceTiming, TokenLogprobs
from samovar.core.request import Request
from samovar.core.sequence import Sequence
from samovar.core.step import SlotStart
from samovar.schedule.snapshots import Snapshot

Rank = tuple[float, ...]
"""Place in the order of the policy; unique, lower goes first."""


class TokenMatcher(Protocol):
    """Follows one constrained sequence token by token."""

    @property
    def is_finished(self) -> bool:
        """Nothing can follow any more."""
        ...

    @property
    def error(self) -> str | None:
        """Why it cannot go on, in words for the client; None as long as it can."""
        ...

    def advance(self, token_id: int) -> None:
        """The sequence goes on with this token."""
        ...


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One admitted request and its choices that have not ended.

    With n > 1 the first live choice leads: it computes the prompt, and the others stay in `deferred` until its blocks
    are published.
    """

    request: Request
    root: bytes | None
    """Start of the chain of block digests; None if its blocks are never published."""
    reads_cache: bool
    is_private: bool = False
    """Its choices share blocks among themselves only."""
    live: dict[int, LiveSequence] = field(default_factory=dict)
    deferred: list[LiveSequence] = field(default_factory=list)
    num_shared_tokens: int = 0
    """Prompt tokens in the full blocks that the choices share."""
    num_cached_tokens: int | None = None
    """Set when the first choice is first admitted: the others report the same figure."""


@dataclass(slots=True, eq=False, kw_only=True)
class LiveSequence(Sequence):
    """A `Sequence` and the scheduler's own notes about it."""

    parent: LiveRequest
    rank: Rank
    limit: int
    """Most tokens, prompt included, by max_tokens, the context and the size of the pool."""
    stop_from: int
    """Tokens, prompt included, from which eos and stop ids count (min_tokens)."""
    eos_ids: frozenset[int]
    """Empty if eos is ignored."""
    end_ids: frozenset[int]
    """`eos_ids` and the stop token ids."""
    sampling_key: int
    overlaps: bool
    """May be scheduled while a token of it is in flight."""
    matcher: TokenMatcher | None = None
    """Of a constrained sequence, once it was made."""
    is_started: bool = False
    """The worker was told about `slot`; False between admission and the first scheduled tokens."""
    stay: int = 0
    """Counts how often it lost its blocks: results of steps from an earlier stay confirm nothing."""
    num_displaced: int = 0
    """Preemptions because others needed blocks to grow."""
    num_published: int = 0
    """Blocks of the table that were shared from, or offered to, the prefix cache."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Entries so far for prompt positions 1, 2, ...; None if not wanted, or handed out already."""
    timing: SequenceTiming = field(default_factory=SequenceTiming)
    restored: Snapshot | None = None
    """What it will begin from, between admission and the first scheduled tokens. This and the rest is for models with
    recurrent states."""
    rolling: Snapshot | None = None
    """The latest state that was kept while it decodes."""
    saved: int = 0
    """Tokens up to the last snapshot that it began from or that was planned."""
    branch: int = 0
    """Tokens that were cached when it began, with a state or without."""

    @property
    def num_prompt_logprobs_missing(self) -> int:
        """Prompt positions whose logprobs are wanted and have not come back."""
        if self.prompt_logprobs is None:
            return 0
        return self.num_prompt_tokens - 1 - len(self.prompt_logprobs)

    def slot_start(self, slot: int) -> SlotStart:
        """What the worker must know about this sequence; the ids are a copy, because the list goes on growing."""
        return SlotStart(
            slot=slot,
            params=self.request.params,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            stop_token_ids=sorted(self.end_ids),
            sampling_key=self.sampling_key,
        )


def make_sequences(parent: LiveRequest, rank: Rank, max_total_tokens: int, *, overlaps: bool) -> list[LiveSequence]:
    """The n choices of a request. `max_total_tokens` is what the context and the pool allow."""
    request = parent.request
    params = request.params
    num_prompt_tokens = len(request.prompt_token_ids)
    # `resolve_params` made it an int; without it the context is the only limit.
    most = max_total_tokens if params.max_tokens is None else num_prompt_tokens + params.max_tokens
    eos_ids = frozenset[int]() if params.ignore_eos else frozenset(request.eos_token_ids)
    end_ids = eos_ids | frozenset(params.stop_token_ids)
    return [
        LiveSequence(
            request=request,
            index=index,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            parent=parent,
            rank=(*rank, index),
            limit=min(most, max_total_tokens),
            stop_from=num_prompt_tokens + params.min_tokens,
            eos_ids=eos_ids,
            end_ids=end_ids,
            sampling_key=sampling_key(params.seed, index),
            overlaps=overlaps and not params.needs_output_ids and request.constraint is None,
            prompt_logprobs=[] if params.prompt_logprobs is not None and index == 0 else None,
            timing=SequenceTiming(arrival=request.arrival),
        )
        for index in range(params.n)
    ]


def sampling_key(seed: int | None, index: int) -> int:
    """64-bit key of the counter-based generator: a pure function of seed and choice, or random without a seed."""
    if seed is None:
        return secrets.randbits(64)
    message = f"{seed}:{index}".encode()
    return int.from_bytes(blake2b(message, digest_size=8, person=b"samovar-seed").digest(), "little")
