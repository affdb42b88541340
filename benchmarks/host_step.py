"""What the host does for one decode step: scheduling, building and packing, reading back, booking. No model, no device.

python benchmarks/host_step.py [sequences ...] [--constrained COUNT]

With --constrained so many of them follow a grammar (the stand-in for a model always says what it allows); they are in every
second step, and `schedule` then holds the making of their masks. The general sampler's arithmetic, which a GPU does, is
then part of `launch`: a small vocabulary (--vocab 512) leaves little of it.
Prints microseconds per step of each part, medians, and those of `run_batch` as a whole, which besides takes the outputs in
and counts them; the part that a GPU's driver adds (one copy each way, one graph launch, two events) is not in it.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from samovar.attention.base import AttentionPlan, Spans
from samovar.attention.choose import AttentionRoute
from samovar.core.constraint import Constraint
from samovar.core.outputs import EngineInfo, SequenceOutput
from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.engine.batch import run_batch
from samovar.engine.enforcer import GrammarEnforcer
from samovar.engine.engine import Engine
from samovar.engine.metrics import ServingMetrics
from samovar.grammar.matcher import Matchers
from samovar.hardware.memory import decode_buckets
from samovar.sample.state import SamplingState
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.scheduler import Scheduler
from samovar.worker.block_tables import BlockTables
from samovar.worker.device_builder import DeviceStepBuilder
from samovar.worker.device_runner import DeviceModel, DeviceRunner
from samovar.worker.graphs import DecodeGraphs
from samovar.worker.slots import Slots

VOCAB, BLOCK, LENGTH, STEPS = 32_000, 32, 2048, 200
LOGITS = torch.zeros(512, VOCAB)
GRAMMAR = "start: /[a-z0-9 ]+/"
"""What constrained sequences must follow: text without an end."""


class NoMark:
    """An event that has always happened."""

    def record(self) -> None:
        """Nothing."""

    def wait(self) -> None:
        """Nothing."""

    def seconds_until(self, later: Any) -> float:
        """Some time."""
        return 1e-3


class NoGraph:
    """A graph of nothing."""

    def replay(self) -> None:
        """Nothing."""


class NoStream:
    """A queue that runs nothing when graphs are replayed."""

    device = torch.device("cpu")

    def current(self) -> AbstractContextManager[object]:
        """Always."""
        return nullcontext()

    def mark(self, *, is_timed: bool = False) -> NoMark:
        """See the class."""
        return NoMark()

    def pinned(self, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Plain memory."""
        return torch.zeros(size, dtype=dtype)

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A plain copy."""
        target.copy_(source)

    def reserve(self, num_bytes: int) -> None:
        """Nothing."""

    def release(self) -> None:
        """Nothing."""

    def capture(self, work: Any) -> tuple[NoGraph, Any]:
        """Run once; replays do nothing."""
        return NoGraph(), work()


class NoAttention:
    """A backend with one launch shape."""

    name, captures = "none", True

    def launch_shape(self, spans: Spans) -> tuple[int, int]:
        """What a backend looks at."""
        return max(spans.total_tokens) >> 20, sum(spans.total_tokens) >> 40

    def plan(self, spans: Spans) -> AttentionPlan:
        """Nothing."""
        return spans


def set_vocabulary(size: int) -> None:
    """Another number of tokens, at least 257."""
    global VOCAB, LOGITS
    VOCAB, LOGITS = size, torch.zeros(512, size)


class ByteVocabulary:
    """Every byte is a token, then fillers: enough of a tokenizer for a grammar."""

    def __init__(self) -> None:
        self.vocab_size = VOCAB

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, or some letters."""
        return bytes([token_id]) if token_id < 256 else b"x%d" % token_id

    def is_special(self, token_id: int) -> bool:
        """Only the last one, which is the end."""
        return token_id == VOCAB - 1

    def encode(self, text: str, **options: Any) -> list[int]:
        """Byte by byte."""
        return list(text.encode())


def build(num_seqs: int) -> tuple[Scheduler, DeviceRunner]:
    """A scheduler and a runner whose model answers at once."""
    num_blocks = num_seqs * (LENGTH // BLOCK + 2)
    options = SchedulerOptions(
        max_num_seqs=num_seqs, max_num_batched_tokens=8192, block_size=BLOCK, max_model_len=LENGTH
    )
    stream, state = NoStream(), SamplingState(num_seqs, VOCAB, LENGTH)
    tables = BlockTables(num_seqs, max_model_len=LENGTH, block_size=BLOCK, num_blocks=num_blocks)
    builder = DeviceStepBuilder(stream, tables, state.last_sampled, max_tokens=8192, vocab_size=VOCAB, gathers=False)
    ids = torch.full((max(num_seqs, 8192),), ord("a"), dtype=torch.int64)
    model = DeviceModel(
        forward=lambda batch: batch.token_ids,
        logits=lambda hidden: LOGITS[: len(hidden)],
        decode_inputs=lambda *_: None,
        sample_tokens=lambda logits, *_: ids[: len(logits)],
        copy_blocks=lambda _: None,
    )
    runner = DeviceRunner(
        model, builder, state, AttentionRoute((NoAttention(),), (0,), ()), stream,  # type: ignore[arg-type]
        slots=Slots(state, builder.free, VOCAB), graphs=DecodeGraphs(stream, 100), buckets=decode_buckets(num_seqs),
    )  # fmt: skip
    enforcer = GrammarEnforcer(lambda: Matchers(ByteVocabulary(), VOCAB, [VOCAB - 1]))  # type: ignore[arg-type]
    return Scheduler(options, num_blocks, enforcer=enforcer), runner


def measure(num_seqs: int, num_constrained: int = 0) -> dict[str, float]:
    """Microseconds of each part of a step with `num_seqs` decoding sequences, two steps in flight."""
    scheduler, runner = build(num_seqs)
    params = SamplingParams(temperature=0, max_tokens=STEPS + 80, ignore_eos=True)
    constraint = Constraint(grammar=GRAMMAR)
    for i in range(num_seqs):
        bound = constraint if i < num_constrained else None
        scheduler.add(
            Request(request_id=f"r{i}", prompt_token_ids=[1] * 16, params=params, eos_token_ids=[], arrival=0.0,
                    constraint=bound)
        )  # fmt: skip
    while scheduler._constraints.held:
        scheduler.let_in()
    times: dict[str, list[float]] = {"schedule": [], "launch": [], "result": [], "update": []}
    flying: list[Any] = []
    for _ in range(STEPS):
        while len(flying) < 2:
            at = time.perf_counter()
            step = scheduler.schedule(0.0)
            if step is None:
                break
            launched = time.perf_counter()
            flying.append((step, runner.launch(step)))
            times["launch"].append(time.perf_counter() - launched)
            times["schedule"].append(launched - at)
        step, pending = flying.pop(0)
        at = time.perf_counter()
        result = pending.result()
        read = time.perf_counter()
        scheduler.update(step, result, 0.0)
        times["update"].append(time.perf_counter() - read)
        times["result"].append(read - at)
    return {name: statistics.median(values[40:]) * 1e6 for name, values in times.items()}


class Fleeting:
    """An executor whose steps are over at once."""

    num_blocks, cache_specs = 0, ()

    def __init__(self, runner: DeviceRunner) -> None:
        self.submit = runner.launch

    def prepare(self) -> bool:
        """Nothing."""
        return False


class TimedEngine(Engine):
    """Notes when its steps begin."""

    times: list[float]

    def step(self) -> list[SequenceOutput]:
        """See `Engine`."""
        self.times.append(time.perf_counter())
        return super().step()


def measure_batch(num_seqs: int) -> float:
    """Microseconds from step to step of `run_batch` on decoding sequences without text, median."""
    info = EngineInfo("m", "a", VOCAB, LENGTH, "float32", "auto", BLOCK, 1, num_seqs, 8192, 0.0, 0, True, "fcfs")
    scheduler, runner = build(num_seqs)
    engine = TimedEngine(Fleeting(runner), scheduler)  # type: ignore[arg-type]
    engine.times = []
    params = SamplingParams(temperature=0, max_tokens=2 * STEPS, ignore_eos=True)
    requests = [
        (Request(request_id=f"r{i}", prompt_token_ids=[1] * 16, params=params, eos_token_ids=[], arrival=0.0), None)
        for i in range(num_seqs)
    ]
    run_batch(engine, None, requests, ServingMetrics("m", info))
    return statistics.median(b - a for a, b in itertools.pairwise(engine.times[40:-10])) * 1e6


def main() -> None:
    """One line for each batch size."""
    words, num_constrained = sys.argv[1:], 0
    if "--constrained" in words:
        at = words.index("--constrained")
        num_constrained = int(words[at + 1])
        del words[at : at + 2]
    if "--vocab" in words:
        at = words.index("--vocab")
        set_vocabulary(int(words[at + 1]))
        del words[at : at + 2]
    for num_seqs in [int(word) for word in words] or [1, 8, 32, 64, 256]:
        found = measure(num_seqs, num_constrained)
        parts = "  ".join(f"{name} {value:6.0f}" for name, value in found.items())
        print(
            f"{num_seqs:>4} sequences: {parts}  all {sum(found.values()):6.0f}  run_batch {measure_batch(num_seqs):6.0f} us"
        )


if __name__ == "__main__":
    main()
