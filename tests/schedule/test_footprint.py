"""What the scheduler leaves behind: no memory per finished request, no third-party import; and what a step costs."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import tracemalloc

from samovar.core.step import SampledTokens, StepResult
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.scheduler import Scheduler
from tests.schedule.drive import request


def test_memory_is_flat_over_finished_requests() -> None:
    """B076: unique one-token requests with prefix caching; nothing remains of 2,000 of them after a warm-up."""
    scheduler = Scheduler(SchedulerOptions(max_model_len=256, max_num_batched_tokens=2048), 300)

    def serve(count: int) -> None:
        for _ in range(count // 20):
            for i in range(20):
                asked = request(40, max_tokens=1, n=1 + i % 2, temperature=1.0)
                scheduler.add(asked)
                if i % 5 == 0:
                    scheduler.abort(asked.request_id)
            while (step := scheduler.schedule(0.0)) is not None:
                result = StepResult(step.step_id, [SampledTokens(s.slot, [5]) for s in step.sequences if s.samples])
                scheduler.update(step, result, 0.0)
            scheduler.stats()

    serve(2000)
    gc.disable()  # Finished requests must go by themselves, not when the collector comes by.
    try:
        tracemalloc.start()
        serve(200)
        before = tracemalloc.get_traced_memory()[0]
        serve(2000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        gc.enable()
    assert grown < 40_000, f"{grown / 2000:.0f} bytes per request remain"
    assert scheduler.block_usage()["requests"] == 0


def test_step_sizes_are_bounded_when_nobody_asks() -> None:
    """`stats` hands out the sizes since the last call once, and they do not pile up without a call."""
    scheduler = Scheduler(SchedulerOptions(max_model_len=6000), 400)
    scheduler.add(request(3, max_tokens=5000, ignore_eos=True))
    while (step := scheduler.schedule(0.0)) is not None:
        scheduler.update(step, StepResult(step.step_id, [SampledTokens(0, [5])], seconds=0.5), 0.0)
    stats = scheduler.stats()
    assert len(stats.step_tokens) == 4096 and set(stats.step_tokens) == {1}
    assert stats.num_steps == 5000 and stats.step_seconds == 2500.0
    assert scheduler.stats().step_tokens == []


def test_no_third_party_import() -> None:
    """The policy of the engine needs nothing but Python."""
    code = (
        "import sys; from importlib.metadata import packages_distributions as p; import samovar.schedule.scheduler;"
        "print(sorted({m.split('.')[0] for m in sys.modules} & set(p()) - {'samovar'}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    allowed = {"_editable_skbc_samovar", "_distutils_hack", "distutils-precedence", "_virtualenv"}
    assert set(eval(found)) <= allowed, found


def test_a_step_of_256_is_cheap() -> None:
    """A loose bound for a busy machine; `benchmarks/scheduler.py` prints the figure."""
    scheduler = Scheduler(SchedulerOptions(max_model_len=4096, max_num_batched_tokens=16384), 256 * 8)
    for _ in range(256):
        scheduler.add(request(32, max_tokens=64, ignore_eos=True))
    times = []
    while (before := time.perf_counter()) and (step := scheduler.schedule(0.0)) is not None:
        times.append(time.perf_counter() - before)
        result = StepResult(step.step_id, [SampledTokens(s.slot, [5]) for s in step.sequences if s.samples])
        scheduler.update(step, result, 0.0)
    assert sorted(times)[len(times) // 2] < 0.010
