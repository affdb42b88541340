"""What scheduling costs: prints microseconds of `schedule` and `update` per step, with no model behind them.

python benchmarks/scheduler.py [NUM_SEQUENCES ...]
"""

from __future__ import annotations

import sys
import time
from collections import deque

from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.core.step import DecodeSequences, PlainTokens, ScheduledStep, StepResult
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.scheduler import Scheduler

NUM_STEPS = 400


def answer(step: ScheduledStep) -> StepResult:
    """A result in which every row that samples gets token 7."""
    sequences = step.sequences
    if isinstance(sequences, DecodeSequences):
        slots = sequences.slots
    else:
        slots = [row.slot for row in sequences if row.samples]
    return StepResult(step.step_id, PlainTokens(slots, [7] * len(slots)))


def request(i: int, num_prompt: int, max_tokens: int) -> Request:
    """A request with a prompt of its own."""
    prompt = [(i * 7919 + k) % 50000 + 10 for k in range(num_prompt)]
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0)
    return Request(request_id=str(i), prompt_token_ids=prompt, params=params, eos_token_ids=[2], arrival=0.0)


def time_decode(num_sequences: int, *, overlaps: bool) -> tuple[float, float]:
    """Median microseconds of `schedule` and of `update` with `num_sequences` decoding."""
    options = SchedulerOptions(
        max_model_len=8192, max_num_seqs=num_sequences, max_num_batched_tokens=65536, step_time_target=0.05
    )
    scheduler = Scheduler(options, num_sequences * 64)
    for i in range(num_sequences):
        scheduler.add(request(i, 64, 8000))
    launched: deque[ScheduledStep] = deque()
    scheduling, updating = [], []
    while len(updating) < NUM_STEPS:
        before = time.perf_counter()
        step = scheduler.schedule(0.0)
        scheduling.append(time.perf_counter() - before)
        if step is not None:
            launched.append(step)
        if len(launched) > (1 if overlaps else 0):
            result = answer(launched[0])
            before = time.perf_counter()
            scheduler.update(launched.popleft(), result, 0.0)
            updating.append(time.perf_counter() - before)
    return (sorted(scheduling)[len(scheduling) // 2] * 1e6, sorted(updating)[len(updating) // 2] * 1e6)


def time_requests(count: int) -> float:
    """Requests per second from `add` to the end: 40 prompt and 8 output tokens each, 256 at once."""
    scheduler = Scheduler(SchedulerOptions(max_model_len=4096, max_num_batched_tokens=4096), 4096)
    before = time.perf_counter()
    for i in range(count):
        scheduler.add(request(i, 40, 8))
    while (step := scheduler.schedule(0.0)) is not None:
        scheduler.update(step, answer(step), 0.0)
    return count / (time.perf_counter() - before)


def main() -> None:
    """Print the table."""
    sizes = [int(a) for a in sys.argv[1:]] or [1, 16, 64, 256, 1024]
    print(f"{'sequences':>9} {'overlap':>7} {'schedule us':>12} {'update us':>10} {'sum per sequence':>17}")
    for size in sizes:
        for overlaps in (False, True):
            schedule, update = time_decode(size, overlaps=overlaps)
            per_sequence = (schedule + update) / size
            print(f"{size:>9} {overlaps!s:>7} {schedule:>12.0f} {update:>10.0f} {per_sequence:>17.2f}")
    print(f"{time_requests(10_000):,.0f} requests per second (40 prompt, 8 output tokens)")


if __name__ == "__main__":
    main()
