"""Steps queued on a stream say what steps on a CPU say: captured, uncaptured, in whatever order, with and without memory."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samovar.config.engine import with_settings
from samovar.core.sampling_params import SamplingParams
from samovar.core.step import ScheduledSequence, ScheduledStep, SlotStart
from samovar.engine.engine import Engine
from samovar.engine.executors.on_stream import StreamExecutor
from samovar.errors import ConfigError
from samovar.layers.batch import ForwardBatch
from samovar.sample.pipeline import SampleRows
from samovar.sample.sampler import NOT_FINITE, PendingSample
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.scheduler import Scheduler
from samovar.worker.block_tables import BlockTables
from samovar.worker.device_builder import DeviceStepBuilder
from samovar.worker.device_runner import DeviceRunner
from samovar.worker.upload import NUM_BUFFERS, Upload
from samovar.worker.worker import Worker
from tests.engine.fakes import request
from tests.worker.host_stream import HostStream, put_on_stream
from tests.worker.test_steps import LENGTHS, greedy_runs, mixed_runs
from tests.worker.tiny_llama import BLOCK, CONTEXT, VOCAB, Driver, Oracle, Run, make_worker, no_library, prompt

GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[list[int]]:
    return [oracle.greedy(prompt(length, length), 10) for length in LENGTHS]


Device = tuple[Worker, HostStream, DeviceRunner]


@pytest.fixture(scope="module")
def loaded(checkpoint: tuple[Path, Oracle]) -> Worker:
    with no_library():
        return make_worker(checkpoint[0])


@pytest.fixture(params=["graphs", "eager", "gathers"])
def any_device(loaded: Worker, request: pytest.FixtureRequest) -> Iterator[Device]:
    route, config = loaded.attention, loaded.config
    yield loaded, *put_on_stream(loaded, request.param)
    loaded.attention, loaded.config, loaded._stream = route, config, None


@pytest.fixture
def device(loaded: Worker) -> Iterator[Device]:
    """With graphs."""
    route, config = loaded.attention, loaded.config
    yield loaded, *put_on_stream(loaded)
    loaded.attention, loaded.config, loaded._stream = route, config, None


@pytest.mark.parametrize(("chunk", "lag"), [(256, 1), (7, 0), (1, 1)])
def test_batch_equals_transformers(any_device: Device, expected: list[list[int]], chunk: int, lag: int) -> None:
    """Whole, in chunks, token by token; ids read at once or fed from the device unseen."""
    worker, stream, runner = any_device
    runs = greedy_runs()
    Driver(worker).finish(runs, chunk=chunk, lag=lag)
    assert [run.output for run in runs] == expected
    assert (stream.num_replays > 0) == (runner._graphs is not None)


def test_the_last_layer_computes_rows_that_sample(any_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """None for a chunk inside a prompt, and no draw then; all where they are needed: decode, prompt logprobs."""
    worker, stream, runner = any_device
    model, computed, drawn = runner._model, list[tuple[int, int]](), list[int]()

    def last_rows(batch: ForwardBatch, rows: torch.Tensor, plans: Any) -> torch.Tensor:
        assert model.last_rows is not None
        computed.append((len(batch.token_ids), len(rows)))
        return model.last_rows(batch, rows, plans)

    def draw(logits: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        drawn.append(len(logits))
        return model.sample_tokens(logits, *others)

    monkeypatch.setattr(runner, "_model", replace(model, last_rows=last_rows, sample_tokens=draw))
    short, long = Run(0, SamplingParams(temperature=0, max_tokens=3), prompt(5, 5)), Run(1, GREEDY, prompt(20, 6))
    driver = Driver(worker)
    records = sum(mark.num_records for mark in stream.marks)
    driver.launch([(long, 8)])
    # Two marks for the step, one for its only upload.
    assert sum(mark.num_records for mark in stream.marks) - records == 3
    assert (computed, drawn) == ([(8, 0)], [])
    driver.launch([(short, 5), (long, 8)])
    driver.launch([(short, 1), (long, 4)])
    driver.launch([(short, 1), (long, 1)])
    assert (computed, drawn) == ([(8, 0), (13, 1), (5, 2)], [1, 2, 2])
    computed.clear()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    Driver(worker).finish([Run(2, params, prompt(9, 7))])
    assert computed == []


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_equals_transformers(any_device: Device, expected: list[list[int]], seed: int) -> None:
    """Random chunks, batches, orders, lateness, block ids and preemptions."""
    worker, _stream, _runner = any_device
    runs = greedy_runs()
    Driver(worker, seed).finish_randomly(runs)
    assert [run.output for run in runs] == expected


def sampled_runs() -> list[Run]:
    """Every rule, and rows that only draw."""
    plain = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, max_tokens=14)
    return [*mixed_runs(), *(Run(40 + i, plain, prompt(3 + i, i), key=7 + i) for i in range(3))]


@pytest.fixture(scope="module")
def on_cpu(loaded: Worker) -> list[Run]:
    runs = sampled_runs()
    Driver(loaded).finish(runs, lag=0)
    loaded.reset_cache()
    return runs


def test_the_fused_model_outlives_the_cache(device: Device) -> None:
    """Tracing the model takes longer than a new cache; what was fused is among the routes."""
    worker, _, _ = device
    fused = worker._fused
    assert fused is not None and fused.lines and set(fused.lines) < set(worker.routes())
    worker.reset_cache()
    assert worker._fused is fused
    runs = greedy_runs()
    Driver(worker).finish(runs)
    assert all(len(run.output) == run.params.max_tokens for run in runs)


@pytest.mark.parametrize("seed", range(2))
def test_sampling_is_that_of_the_cpu(on_cpu: list[Run], any_device: Device, seed: int) -> None:
    """Seeded rows with every rule and none: the same tokens and logprobs as on the CPU, whatever the schedule."""
    worker, _, _ = any_device
    runs = sampled_runs()
    Driver(worker, seed).finish_randomly(runs)
    assert [run.output for run in runs] == [run.output for run in on_cpu]
    for one, other in zip(runs, on_cpu, strict=True):
        assert [entry.token_ids for entry in one.logprobs] == [entry.token_ids for entry in other.logprobs]


@pytest.mark.parametrize("kind", ["graphs", "gathers"])
def test_engine_over_a_stream(loaded: Worker, checkpoint: tuple[Path, Oracle], oracle: Oracle, kind: str) -> None:
    """Admission, chunks, preemption by the real scheduler, two steps in flight on one thread: Transformers' tokens."""
    route, config = loaded.attention, loaded.config
    stream, _runner = put_on_stream(loaded, kind)
    options = SchedulerOptions(
        max_num_seqs=8, max_num_batched_tokens=32, block_size=BLOCK, max_model_len=CONTEXT, async_scheduling=True
    )
    engine = Engine(StreamExecutor(loaded), Scheduler(options, 24, cache_specs=loaded.cache_specs))
    rng = random.Random(4)
    requests = [request(prompt(rng.randint(1, 20), i), rng.randint(10, 60), temperature=0) for i in range(12)]
    for one in requests:
        engine.add(one)
    got: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            got.setdefault(output.request_id, []).extend(output.token_ids)
    stats = engine.stats()
    engine.close()
    for one in requests:
        tokens = oracle.greedy(one.prompt_token_ids, one.params.max_tokens or 0)
        assert got[one.request_id] == (tokens[: tokens.index(0) + 1] if 0 in tokens else tokens)
    assert stats.num_preemptions > 0 and stats.host_seconds > 0
    assert (stream.num_replays > 20) == (kind == "graphs")
    loaded.attention, loaded.config, loaded._stream = route, config, None


def test_padding_changes_nothing(device: Device, expected: list[list[int]]) -> None:
    """A step of 3 rows runs as 4: no K/V is written for the fourth, and no slot but the dummy's hears of it."""
    worker, _stream, runner = device
    runs = greedy_runs()[:3]
    Driver(worker).finish(runs)
    assert [run.output for run in runs] == expected[:3]
    assert {key[0] for key in runner._graphs._graphs} == {4}  # type: ignore[index, union-attr]
    last = runner._state.last_sampled
    assert not last[3:-1].any()


def test_few_graphs(loaded: Worker, expected: list[list[int]]) -> None:
    """With room for one graph the older goes; tokens stay."""
    route, config, num_captured = loaded.attention, loaded.config, 0
    for seed in range(3):
        stream, runner = put_on_stream(loaded, most_graphs=1)
        runs = greedy_runs()
        Driver(loaded, seed).finish_randomly(runs)
        assert [run.output for run in runs] == expected
        assert runner._graphs is not None and len(runner._graphs) <= 1
        num_captured += len(stream.graphs)
    assert num_captured > 3
    loaded.attention, loaded.config, loaded._stream = route, config, None


def test_no_memory_for_graphs(device: Device, expected: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be captured runs as it is; the log says so once for each kind of step."""
    worker, stream, _runner = device
    stream.refuses = lambda: True
    runs = greedy_runs()
    with caplog.at_level(logging.WARNING):
        Driver(worker).finish(runs)
    assert [run.output for run in runs] == expected
    lines = [message for message in caplog.messages if "without a captured graph" in message]
    assert lines and len(lines) == len(set(lines)) and stream.num_replays == 0


@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("place", ["forward", "logits"])
def test_memory_runs_out(
    any_device: Device, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, most: int, place: str
) -> None:
    """A step that does not fit is halved, decode steps too; nothing that was sampled before it failed is used."""
    worker, _, runner = any_device
    model = runner._model

    def bounded(function: object) -> object:
        def call(argument: object, *others: object) -> torch.Tensor:
            rows = argument.token_ids if place == "forward" else argument  # type: ignore[attr-defined]
            if len(rows) > most:
                raise torch.OutOfMemoryError("no room")
            return function(argument, *others)  # type: ignore[operator, no-any-return]

        return call

    # Logits in turns of 40 rows: the first turn's tokens are drawn before the second fails.
    monkeypatch.setattr(runner, "_logits_rows", 40 if place == "forward" else max(most, 2))
    changed = {name: getattr(model, name) for name in type(model).__slots__}
    for name in ("forward", "last_rows") if place == "forward" else (place,):
        changed[name] = bounded(changed[name])
    monkeypatch.setattr(runner, "_model", type(model)(**changed))
    runs = greedy_runs()
    Driver(worker).finish(runs, chunk=1 if place == "forward" else 64)
    assert [run.output for run in runs] == expected


def test_memory_runs_out_behind_a_replay(
    device: Device, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sampling in two parts of which the second finds no memory: what the first drew is not fed to the next attempt."""
    worker, stream, runner = device
    monkeypatch.setattr(runner, "_sampling_rows", 2)
    launch, failed, num_calls = runner._sampler.launch, list[int](), 0

    def sometimes(logits: torch.Tensor, rows: SampleRows) -> PendingSample:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (10, 16):
            failed.append(stream.num_replays)
            raise torch.OutOfMemoryError("no room")
        return launch(logits, rows)

    monkeypatch.setattr(runner._sampler, "launch", sometimes)
    runs = [Run(i, replace(GREEDY, logprobs=1), run.prompt) for i, run in enumerate(greedy_runs()[:3])]
    with caplog.at_level(logging.WARNING):
        Driver(worker).finish(runs, lag=1)
    assert [run.output for run in runs] == expected[:3] and len(failed) == 2 and all(failed)
    assert not caplog.messages, "the graph was not to blame"


def test_one_sequence_that_never_fits(
    device: Device, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails alone."""
    worker, _, runner = device
    model = runner._model

    def bounded(batch: ForwardBatch, *others: Any) -> torch.Tensor:
        if len(batch.token_ids) > 40:
            raise torch.OutOfMemoryError("no room")
        assert model.last_rows is not None
        return model.last_rows(batch, *others) if others else model.forward(batch)

    monkeypatch.setattr(runner, "_model", replace(model, forward=bounded, last_rows=bounded))
    runs = greedy_runs()
    Driver(worker).finish(runs, lag=0)
    assert "not enough memory" in (runs[-1].error or "")
    assert [run.output for run in runs[:-1]] == expected[:-1]


def test_bad_rows_fail_alone(any_device: Device, expected: list[list[int]]) -> None:
    """Unknown ids, blocks that do not exist, tokens beyond the blocks: in prefill and among one-token rows."""
    worker, _, _ = any_device
    driver = Driver(worker)
    runs = greedy_runs()
    for slot, ids in ((30, [1, VOCAB, 2]), (31, [-1]), (32, [5, 2**40]), (36, [2**40])):
        runs.append(Run(slot, GREEDY, ids))
    wild = Run(33, GREEDY, [1, 2, 3], blocks=[10**6])
    driver.finish([*runs, wild], chunk=300, lag=0)
    assert [run.output for run in runs[: len(LENGTHS)]] == expected
    assert ["vocabulary" in (run.error or "") for run in runs[len(LENGTHS) :]] == [True] * 4, [r.error for r in runs]
    assert "cache block" in (wild.error or "")


def test_logits_that_are_not_finite(device: Device, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """-1 instead of a token, read from pinned memory, ends that sequence and no other."""
    worker, _, runner = device
    model = runner._model
    bad = prompt(11, 0)

    def draw(logits: torch.Tensor, settings: torch.Tensor, slots: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        logits[slots == 20] = torch.nan
        return model.sample_tokens(logits, settings, slots, *rest)

    monkeypatch.setattr(runner, "_model", replace(model, sample_tokens=draw))
    runs = greedy_runs()
    poisoned = Run(20, GREEDY, bad)
    Driver(worker).finish([*runs[:4], poisoned, *runs[4:]])
    assert poisoned.error == NOT_FINITE and [run.output for run in runs] == expected


@pytest.mark.parametrize("count", [0, 3, -1])
def test_prompt_logprobs(any_device: Device, oracle: Oracle, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over chunk borders and slices of rows, beside ordinary neighbours."""
    worker, _, runner = any_device
    monkeypatch.setattr(runner, "_logits_rows", 5)
    ids = prompt(33, 4)
    run = Run(2, SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=count), ids)
    other = Run(1, GREEDY, prompt(12, 1))
    Driver(worker).finish([other, run], chunk=7)
    assert not run.output and other.output == oracle.greedy(other.prompt, 10)
    exact = oracle.logits(ids).double().log_softmax(-1)
    assert len(run.prompt_logprobs) == len(ids) - 1
    for row, entry in enumerate(run.prompt_logprobs):
        assert entry.token_ids[0] == ids[row + 1] and len(entry.token_ids) == 1 + (VOCAB if count < 0 else count)
        np.testing.assert_allclose(entry.logprobs, exact[row, entry.token_ids], atol=1e-5)


def test_prepared_ahead(device: Device, expected: list[list[int]]) -> None:
    """Idle moments capture one kind of step each, powers of two first, without touching cache or slots; steps then replay."""
    worker, stream, runner = device
    graphs = runner._graphs
    assert graphs is not None
    keys = []
    while worker.prepare():
        keys.append(next(reversed(graphs._graphs)))
    sizes = [key[0] for key in keys]  # type: ignore[index]
    assert sizes[:6] == [1, 2, 4, 8, 16, 32] and 48 in sizes and len(keys) == len(set(keys))
    assert not stream.num_replays and not runner._state.last_sampled[:-1].any()
    runs = greedy_runs()
    Driver(worker).finish(runs)
    assert [run.output for run in runs] == expected


def test_decode_steps_are_replayed_from_the_second_on(device: Device) -> None:
    """One graph for each size and launch shape; the first step of each runs as it is."""
    worker, stream, _runner = device
    run = Run(0, SamplingParams(temperature=0, max_tokens=30), prompt(5, 5))
    Driver(worker).finish([run])
    assert len(stream.graphs) == 1 and stream.num_replays == 28
    run = Run(1, SamplingParams(temperature=0, max_tokens=30, logprobs=1), prompt(5, 5))
    Driver(worker).finish([run])
    assert len(stream.graphs) == 2, "rows with logprobs need the hidden states"


def test_determinism_is_kept_or_refused(loaded: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products without fixed tiles are named, and not used in silence."""
    monkeypatch.setattr(loaded, "config", with_settings(loaded.config, deterministic=True))
    with pytest.raises(ConfigError, match=r"--deterministic: .*linear: "):
        loaded._check_routes()


def make_builder(stream: HostStream, num_slots: int = 4, max_tokens: int = 16) -> DeviceStepBuilder:
    tables = BlockTables(num_slots, max_model_len=80_000, block_size=2, num_blocks=50_000)
    last = torch.zeros(num_slots + 1, dtype=torch.int64)
    return DeviceStepBuilder(stream, tables, last, max_tokens=max_tokens, vocab_size=VOCAB, gathers=False)


def test_tables_on_the_device_are_those_of_the_host() -> None:
    """Also where a prefix hit brings more new blocks than one upload takes, and where slots change hands in between."""
    rng = random.Random(0)
    builder = make_builder(HostStream())
    for _ in range(60):
        slot, total = rng.randrange(4), rng.choice((3, 40, 9_000, 70_000))
        builder.free(slot)
        blocks = [rng.randrange(50_000) for _ in range(total // 2 + 1)]
        sequence = ScheduledSequence(slot, total - 1, 1, [1], blocks, True, total)
        if rng.random() < 0.5:
            rows = builder.decode_rows([sequence])
            assert rows is not None
            builder.send_decode(rows, 4)
            assert builder.packed(4).tolist() == [
                [slot, 4, 4, 4],
                [total - 1, -1, -1, -1],
                [1, 0, 0, 0],
                [total, 0, 0, 0],
            ]
        else:
            sent = builder.send(builder.chunks([sequence]), [8])
            assert sent.slot_mapping.tolist() == [blocks[(total - 1) // 2] * 2 + (total - 1) % 2]
        counts, rows_on_host = builder._host.counts, builder._host.rows
        for each in range(4):
            assert builder.tables[each, : counts[each]].tolist() == rows_on_host[each, : counts[each]].tolist()
    assert not builder.tables[-1].any()


def test_new_blocks_outlive_a_failed_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt after it tells the device of them."""
    builder = make_builder(HostStream())
    chunks = builder.chunks([ScheduledSequence(1, 2, 1, [1], [7, 8], True, 3)])
    with monkeypatch.context() as patched:
        patched.setattr(builder, "tables", builder.tables.new_empty(0))
        with pytest.raises(RuntimeError):
            builder.send(chunks, [8])
    builder.send(builder.again(chunks.sequences), [8])
    assert builder.tables[1, :2].tolist() == [7, 8]


def test_a_refused_step_changes_no_table() -> None:
    """`decode_rows` gives up without a trace; the careful way then finds out whom to refuse."""
    builder = make_builder(HostStream())
    good = ScheduledSequence(0, 0, 1, [5], [7], True, 1)
    for bad in (
        ScheduledSequence(1, 0, 1, [5], [-1], True, 1),
        ScheduledSequence(1, 0, 1, [VOCAB], [3], True, 1),
        ScheduledSequence(1, 4, 1, [5], [3], True, 5),
        ScheduledSequence(1, 0, 1, [5], [3], False),
    ):
        assert builder.decode_rows([good, bad]) is None
        assert not builder._host.counts.any() and not builder._new_blocks
    chunks = builder.chunks([good, ScheduledSequence(1, 4, 1, [5], [3], True, 5)])
    assert [s.slot for s in chunks.sequences] == [0] and list(chunks.failed) == [1]


def test_pinned_memory_is_not_reused_before_it_was_read() -> None:
    """Each buffer's mark is waited for before the host writes there again, and is put behind the copy."""
    stream = HostStream()
    upload = Upload(stream, 6)
    assert upload.size == 8 and len(stream.marks) == NUM_BUFFERS
    for i in range(3 * NUM_BUFFERS):
        mark = stream.marks[i % NUM_BUFFERS]
        waits, records = mark.num_waits, mark.num_records
        upload.begin(8)[:] = i
        assert (mark.num_waits, mark.num_records) == (waits + 1, records)
        upload.send(8)
        assert mark.num_records == records + 1 and upload.staging.tolist() == [i] * 8
    with pytest.raises(ValueError, match="do not fit"):
        upload.begin(9)


def test_a_step_too_many_fails_alone(device: Device) -> None:
    """A launch that raises is a failed step like any other, told by `result`."""
    worker, _, _ = device
    executor = StreamExecutor(worker)
    count = 40_000
    start = SlotStart(0, GREEDY, [1], 1, [], 0)
    step = ScheduledStep(1, [start], [], [ScheduledSequence(0, 0, count, [1] * count, [0], True, count)])
    result = executor.submit(step).result()
    assert "context" in result.failed[0]
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(step).result()
    executor = StreamExecutor(worker)
    worker._runner = None
    with pytest.raises(RuntimeError, match="before load"):
        executor.submit(step).result()
