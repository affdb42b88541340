"""InProcessExecutor: one call after the other on one thread, what they raise, and its end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import pytest

from samovar.core.step import ScheduledStep
from samovar.engine.executors.in_process import InProcessExecutor
from tests.engine.fakes import FakeWorker


def test_steps_run_in_order_on_one_thread() -> None:
    worker = FakeWorker()
    names: list[str] = []
    execute = worker.execute

    def noted(step: ScheduledStep) -> object:
        names.append(threading.current_thread().name)
        return execute(step)

    worker.execute = noted  # type: ignore[method-assign, assignment]
    executor = InProcessExecutor(worker)
    pending = [executor.submit(ScheduledStep(i)) for i in range(50)]
    assert [one.result().step_id for one in pending] == list(range(50))
    assert set(names) == {"samovar-worker"}
    executor.close()


def test_what_a_step_raises_comes_out_of_its_result_and_of_no_other() -> None:
    worker = FakeWorker()
    execute = worker.execute

    def torn(step: ScheduledStep) -> object:
        if step.step_id == 1:
            raise MemoryError("no room")
        return execute(step)

    worker.execute = torn  # type: ignore[method-assign, assignment]
    executor = InProcessExecutor(worker)
    before, bad, after = (executor.submit(ScheduledStep(i)) for i in range(3))
    with pytest.raises(MemoryError, match="no room"):
        bad.result()
    assert (before.result().step_id, after.result().step_id) == (0, 2)
    executor.close()


def test_close_finishes_what_runs_and_drops_the_rest() -> None:
    worker = FakeWorker()
    worker.gate.clear()
    executor = InProcessExecutor(worker)
    running, dropped = executor.submit(ScheduledStep(0)), executor.submit(ScheduledStep(1))
    while executor._tasks.qsize() > 1:  # until the first is under way
        time.sleep(0.001)
    closing = threading.Thread(target=executor.close)
    closing.start()
    with pytest.raises(RuntimeError, match="closed before"):
        dropped.result()
    assert closing.is_alive()
    worker.gate.set()
    closing.join(10)
    assert not closing.is_alive() and running.result().step_id == 0 and worker.num_steps == 1
    executor.close()


def test_nobody_closed_it() -> None:
    """Neither its thread nor a program that ends waits for ever."""
    others = threading.enumerate()
    executor = InProcessExecutor(FakeWorker())
    assert executor.submit(ScheduledStep(7)).result().step_id == 7
    thread = next(t for t in threading.enumerate() if t.name == "samovar-worker" and t not in others)
    del executor
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    program = (
        "from samovar.core.step import ScheduledStep\n"
        "from samovar.engine.executors.in_process import InProcessExecutor\n"
        "from tests.engine.fakes import FakeWorker\n"
        "executor = InProcessExecutor(FakeWorker(delay=0.2))\n"
        "executor.submit(ScheduledStep(0))\n"
        "print('done')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "done\n" and not ended.stderr
