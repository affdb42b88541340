"""A worker without a model: the next token is a fixed function of the last token and its position."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from samovar.config.engine import EngineConfig
from samovar.core.cache_spec import CacheSpec
from samovar.core.outputs import EngineInfo
from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.core.step import SampledTokens, ScheduledStep, StepResult
from samovar.engine.engine import Engine
from samovar.engine.executors.in_process import InProcessExecutor
from samovar.errors import CheckpointError, ConflictError
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from samovar.worker.pending import FinishedStep

VOCAB = 997
EOS = 0
POISON = 996
"""A step that is fed this token raises."""


def next_token(token: int, position: int) -> int:
    """The token at `position` after `token`; never EOS or POISON."""
    return 1 + (token * 31 + position * 17) % (VOCAB - 2)


def expected(prompt: list[int], count: int) -> list[int]:
    """What the fake model generates after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens)))
    return tokens[len(prompt) :]


class FakeWorker:
    """Checks that positions are computed in order and once, and that fed-back samples are its own."""

    def __init__(self, num_blocks: int = 64, delay: float = 0.0) -> None:
        self._num_blocks = num_blocks
        self.delay = delay
        self.gate = threading.Event()
        self.gate.set()
        self.last: dict[int, int] = {}
        self.num_steps = 0
        self.most_tokens = 0
        self.has_cache = self.has_weights = True
        self.is_crowded = False
        self.wake_seconds = 0.0
        self.notes: list[str] = []

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def cache_specs(self) -> list[CacheSpec]:
        return []

    def release_cache(self) -> int:
        self.notes.append("cache released")
        self.has_cache = False
        return 4096

    def restore_cache(self) -> None:
        self.notes.append("cache restored")
        self.last.clear()
        self.has_cache = True

    def release_weights(self, level: int, progress: Callable[[int, int], None] | None = None) -> None:
        if self.is_crowded:
            raise ConflictError("the host has no room")
        self.notes.append(f"weights released, level {level}")
        self.has_weights = level == 0

    def restore_weights(self, progress: Callable[[int, int], None] | None = None) -> None:
        if self.is_crowded:
            raise MemoryError("no room on the device")
        time.sleep(self.wake_seconds)
        self.notes.append("weights restored")
        self.has_weights = True

    def holds_weights(self) -> bool:
        return self.has_weights

    def memory_reading(self) -> tuple[int, int]:
        return 1, 2

    def start_profile(self, prefix: str = "") -> None:
        raise ConflictError("profiling is off: start with --profiler-dir DIRECTORY")

    def execute(self, step: ScheduledStep) -> StepResult:
        assert self.has_cache and self.has_weights, "a step while asleep"
        self.gate.wait()
        if self.delay:
            time.sleep(self.delay)
        self.num_steps += 1
        self.most_tokens = max(self.most_tokens, step.num_tokens)
        result = StepResult(step.step_id, seconds=1e-6)
        for row in step.sequences:
            ids = list(row.token_ids)
            if row.feeds_last_sample:
                ids.append(self.last[row.slot])
            if POISON in ids:
                raise MemoryError("no room for this step")
            if row.samples:
                end = row.start + row.num_new_tokens
                assert row.position_of_sample == end
                self.last[row.slot] = next_token(ids[-1], end)
                result.sampled.append(SampledTokens(row.slot, [self.last[row.slot]]))
        return result


class LaunchingFake:
    """`worker` as one whose steps are queued on the caller's thread."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker

    @property
    def num_blocks(self) -> int:
        return self.worker.num_blocks

    @property
    def cache_specs(self) -> list[CacheSpec]:
        return []

    def launch(self, step: ScheduledStep) -> FinishedStep:
        from samovar.worker.pending import FinishedStep  # Not above: processes with a fake engine start without torch.

        return FinishedStep(self.worker.execute(step))

    def prepare(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


def fake_engine(worker: FakeWorker, *, overlap: bool = True, **options: object) -> Engine:
    """An engine around `worker`."""
    settings = SchedulerOptions(**{"max_model_len": 512, "async_scheduling": overlap, **options})  # type: ignore[arg-type]
    return Engine(InProcessExecutor(worker), Scheduler(settings, worker.num_blocks), overlap=overlap)


def fake_info(worker: FakeWorker, max_num_seqs: int = 256) -> EngineInfo:
    """Facts of a fake engine."""
    return EngineInfo(
        model="fake", architecture="Fake", vocab_size=VOCAB, max_model_len=512, dtype="float32", kv_cache_dtype="float32",
        block_size=16, num_blocks=worker.num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=2048,
        load_seconds=0.0, weight_bytes=0, prefix_caching=True, scheduling_policy="fcfs",
    )  # fmt: skip


def build_fake(config: EngineConfig, on_phase: Callable[[str], None]) -> tuple[Engine, EngineInfo]:
    """Stands in for `build_engine` in a child process; the model's name says how to behave."""
    on_phase("loading")
    if config.model.model == "broken":
        raise CheckpointError("weights.bin: truncated")
    if config.model.model == "endless":
        time.sleep(600)
    if config.model.model == "slow":
        for _ in range(10):
            time.sleep(0.3)
            on_phase("loading")
    worker = FakeWorker(delay=0.002)
    worker.wake_seconds = 4.0 if config.model.model == "drowsy" else 0.0
    if config.model.model == "stuck":
        worker.gate.clear()
    return fake_engine(worker, max_num_seqs=config.scheduler.max_num_seqs), fake_info(worker)


_count = 0


def request(prompt: list[int], max_tokens: int = 8, **params: object) -> Request:
    """A request with a fresh id; extra keywords go to `SamplingParams`."""
    global _count
    _count += 1
    settings = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return Request(
        request_id=f"r{_count}", prompt_token_ids=prompt, params=settings, eos_token_ids=[EOS], arrival=time.monotonic()
    )
