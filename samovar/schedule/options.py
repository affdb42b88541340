"""SchedulerOptions: the settings the scheduler reads, all of them resolved."""

from __future__ import annotations

from dataclasses import dataclass

from samovar.config.engine import EngineConfig
from samovar.config.resolve import DEFAULT_NUM_SEQS
from samovar.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRules:
    """Which snapshots of recurrent states are worth a row, and a step: in tokens."""

    margin: int = 32
    """A prompt's last snapshot leaves at least so many tokens: templates end prompts with words that the next turn has
    not, and computing a few more tokens takes a step as long as computing one."""
    least_gain: int = 256
    """A chunk ends for a snapshot if that spares so many tokens more than the one before: about as many as a step
    computes in the time that it takes to read the weights."""
    interval: int = 8192
    """A chunk that comes so far beyond the last snapshot ends on a border for another."""
    decode_interval: int = 64
    """A sequence that decodes keeps its latest state at multiples of this, which is what its next turn begins from."""
    decode_share: float = 0.5
    """Part of the rows that running sequences may use for those: the first in the order get them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Nothing in here is "auto". Names are those of `config.groups`; `step_time_target` is in seconds, 0 for none."""

    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = DEFAULT_NUM_SEQS
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    step_time_target: float = 0.0
    scheduling_policy: str = "fcfs"
    async_scheduling: bool = True
    enable_prefix_caching: bool = True
    rounds_seconds: float = 0.0
    """How long a step may last in which running sequences compute several tokens in a row because nobody else waits. 0:
    one token a step, for workers that run no rounds."""
    num_snapshots: int | None = None
    """Rows for snapshots of recurrent states; None: the model has no such states."""
    snapshot_rules: SnapshotRules = SnapshotRules()

    @classmethod
    def from_config(cls, config: EngineConfig) -> SchedulerOptions:
        """Options of a resolved configuration. Queue limits are not among them: front ends keep those."""
        s = config.scheduler
        if config.model.max_model_len is None or s.max_num_batched_tokens is None:
            raise ConfigError(
                f"max_model_len ({config.model.max_model_len}) and max_num_batched_tokens "
                f"({s.max_num_batched_tokens}) must be resolved before a scheduler is made"
            )
        return cls(
            max_model_len=config.model.max_model_len,
            block_size=config.cache.block_size,
            max_num_seqs=s.max_num_seqs or DEFAULT_NUM_SEQS,
            max_num_batched_tokens=s.max_num_batched_tokens,
            enable_chunked_prefill=s.enable_chunked_prefill,
            long_prefill_token_threshold=s.long_prefill_token_threshold,
            step_time_target=max(s.step_time_target_ms, 0.0) / 1000,
            scheduling_policy=s.scheduling_policy,
            async_scheduling=s.async_scheduling,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
