"""What the engine hands to a front end: tokens and facts, no text."""

from __future__ import annotations

from dataclasses import dataclass, field

from samovar.core.sequence import FinishReason

NOTHING_ALLOWED = (
    "no token can be sampled: allowed_token_ids, bad_words, logit_bias, min_tokens and the constraint (structured outputs, "
    "tools) together forbid all"
)
"""`SequenceOutput.error` of a request whose settings contradict each other: the one failure that is the client's."""


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen (or prompt) token first, then the top k in order.

    The chosen token may appear again among the top k. `rank` is its 1-based rank in the whole vocabulary.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(slots=True)
class SequenceTiming:
    """`time.monotonic()` stamps of one sequence, taken in the engine; 0.0 means "did not happen"."""

    arrival: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    num_preemptions: int = 0


@dataclass(slots=True)
class SequenceOutput:
    """News of one sequence: the tokens since the last output, and the end if it came.

    `index` is the choice number in 0..n-1. `logprobs` is aligned with `token_ids` when asked for.
    `prompt_logprobs` comes once, with the first output of choice 0; its first entry is None.
    """

    request_id: str
    index: int
    token_ids: list[int]
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    refused: str | None = None
    """The reason of the `OverloadedError` with which the engine did not take the request at all; `error` is its message."""
    timing: SequenceTiming | None = None
    """Set on the last output."""


@dataclass(slots=True)
class EngineStats:
    """One snapshot of the engine, sent with every batch of outputs; the front end turns it into metrics."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_free_blocks: int = 0
    num_blocks: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up since start (running totals, as are the next seven)."""
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_seconds: float = 0.0
    host_seconds: float = 0.0
    """Time the engine's thread spent working, rather than waiting for a step, between one result and the next."""
    step_tokens: list[int] = field(default_factory=list)
    """Tokens of each step since the last snapshot, for the iteration histogram."""
    is_paused: bool = False
    """No step is made, so that none can be missed: paused or asleep."""
    refuses: str | None = None
    """Why new requests are not wanted now."""


@dataclass(slots=True)
class EngineInfo:
    """Facts a front end needs about the loaded model, sent once when the engine is ready."""

    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    kv_cache_dtype: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    load_seconds: float
    weight_bytes: int
    prefix_caching: bool
    scheduling_policy: str
    decisions: list[tuple[str, str, str]] = field(default_factory=list)
    """(name, value, reason) of every resolved `auto`."""
    memory_plan: list[tuple[str, int]] = field(default_factory=list)
    """(line, bytes) of the memory plan."""
    routes: list[str] = field(default_factory=list)
    """Which implementation serves each op and each kind of attention, and why; and what is fused."""
