"""Recurrent states on a queue: rows zeroed, restored, saved and given away in the order of the steps, graphs included."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from samovar.attention.choose import choose
from samovar.cache.state_pool import StatePool
from samovar.config.checkpoint import describe
from samovar.config.engine import EngineConfig
from samovar.config.groups import CacheConfig, ModelConfig, SchedulerConfig
from samovar.core.cache_spec import StateSpec, StateTensor
from samovar.engine.engine import Engine
from samovar.engine.executors.on_stream import StreamExecutor
from samovar.hardware.device import probe
from samovar.layers.recurrent import recurrent_layers
from samovar.schedule.options import SchedulerOptions, SnapshotRules
from samovar.schedule.scheduler import Scheduler
from samovar.worker.device_runner import DeviceRunner
from samovar.worker.worker import Worker
from tests.engine.fakes import request
from tests.oracles.toy_hybrid import NAME, ToyHybrid, expected, registered, write_toy
from tests.worker.host_stream import HostStream, put_on_stream
from tests.worker.tiny_llama import no_library

BLOCK, CONTEXT, SLOTS, SNAPSHOTS = 8, 256, 8, 20
RULES = SnapshotRules(margin=4, least_gain=1, interval=24, decode_interval=8)
SPECS = [StateSpec((StateTensor("a", (2, 3), "float32"), StateTensor("b", (4,), "bfloat16"))), StateSpec(())] * 2


def test_pool_moves_whole_rows() -> None:
    """Rows of every tensor of every layer, one pair after the other; other rows stay as they are."""
    pool = StatePool(SPECS, 3, 2)
    assert pool.num_rows == 6 and pool.nbytes == 2 * 6 * (6 * 4 + 4 * 2) == 6 * sum(spec.nbytes for spec in SPECS)
    for layer in pool.layers:
        for tensor in layer:
            tensor.copy_(torch.arange(6).view(6, *[1] * (tensor.dim() - 1)).expand_as(tensor))
    pool.copy([(0, 4), (4, 1)])
    pool.clear([2])
    for layer in pool.layers:
        for tensor in layer:
            assert tensor.flatten(1).float().unique(dim=1).flatten().tolist() == [0, 0, 0, 3, 0, 5]
    with pytest.raises(ValueError, match="row 6"):
        pool.copy([(0, 6)])


@pytest.fixture(scope="module", params=[NAME, "ToyRecurrentForCausalLM"])
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Worker, int]]:
    """A worker of the toy, and its vocabulary."""
    with registered(), no_library():
        folder = write_toy(tmp_path_factory.mktemp("toy"), request.param)
        snapshots = str(SNAPSHOTS * 32)
        config = EngineConfig(
            model=ModelConfig(model=str(folder), dtype="float32", max_model_len=CONTEXT, load_format="dummy"),
            cache=CacheConfig(
                block_size=BLOCK, num_gpu_blocks_override=60, kv_cache_dtype="float32", state_snapshots=snapshots
            ),
            scheduler=SchedulerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=64),
        )
        worker = Worker(config, describe(folder, config.model), replace(probe("cpu"), num_threads=1))
        worker.load()
        yield worker, json.loads((folder / "config.json").read_text())["vocab_size"]


def on_stream(worker: Worker, kind: str) -> tuple[HostStream, DeviceRunner]:
    """The worker's new runner; a capture leaves the states alone, as it does on a GPU."""
    stream, runner = put_on_stream(worker, kind)
    stream.protected += [tensor for layer in recurrent_layers(worker.model) for tensor in layer.state]
    return stream, runner


@pytest.mark.parametrize("kind", ["graphs", "eager"])
def test_engine_over_a_stream(toy: tuple[Worker, int], kind: str) -> None:
    """Requests that begin alike, on a pool that is too small for them, with two steps in flight: exact tokens."""
    worker, vocab = toy
    stream, _runner = on_stream(worker, kind)
    assert worker.memory_plan.num_snapshots == SNAPSHOTS
    options = SchedulerOptions(
        max_num_seqs=SLOTS,
        max_num_batched_tokens=32,
        block_size=BLOCK,
        max_model_len=CONTEXT,
        num_snapshots=SNAPSHOTS,
        snapshot_rules=RULES,
    )
    engine = Engine(StreamExecutor(worker), Scheduler(options, 30, cache_specs=worker.cache_specs))
    rng = random.Random(5)
    heads = [[rng.randrange(3, vocab) for _ in range(length)] for length in (7, 8, 30)]
    tails = [[rng.randrange(3, vocab) for _ in range(rng.randrange(1, 20))] for _ in range(30)]
    requests = [request(rng.choice(heads) + tail, rng.randint(5, 60), temperature=0, ignore_eos=True) for tail in tails]
    got: dict[str, list[int]] = {}
    num_cached = 0
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            got.setdefault(output.request_id, []).extend(output.token_ids)
            num_cached += output.num_cached_tokens if output.finish_reason else 0
    stats = engine.stats()
    engine.close()
    has_attention = bool(worker.cache_specs)
    for one in requests:
        wanted = expected(one.prompt_token_ids, one.params.max_tokens or 0, vocab, has_attention=has_attention)
        assert got[one.request_id] == wanted
    assert stats.num_preemptions > 3 and num_cached > 100
    assert (stream.num_replays > 20) == (kind == "graphs")


def test_preparing_touches_nobody(toy: tuple[Worker, int]) -> None:
    """Steps captured ahead are all padding: only the spare row hears of them."""
    worker, _ = toy
    _, runner = on_stream(worker, "graphs")
    states = runner._model.states
    assert states is not None
    for layer in states.layers:
        for tensor in layer:
            tensor.fill_(5)
    while runner.prepare():
        pass
    for layer in states.layers:
        for tensor in layer:
            changed = (tensor != 5).flatten(1).any(1).nonzero().flatten().tolist()
            assert set(changed) <= {SLOTS}


@pytest.mark.parametrize("kind", ["graphs", "eager", "cpu"])
def test_memory_that_runs_out_ends_who_was_in_the_step(
    toy: tuple[Worker, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their states have moved on and cannot be taken back, so that nothing is computed twice; the next requests are right."""
    worker, vocab = toy
    ordinary, calls = type(worker.model).logits, iter(range(1000))

    def logits(model: ToyHybrid, hidden: torch.Tensor) -> torch.Tensor:
        if next(calls) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ordinary(model, hidden)

    monkeypatch.setattr(type(worker.model), "logits", logits)
    if kind == "cpu":
        worker._stream = None
        worker.attention = choose(worker.model.attention_specs(), worker.facts, worker.config.device)
        worker.reset_cache()
    else:
        on_stream(worker, kind)
    options = SchedulerOptions(max_num_seqs=4, block_size=BLOCK, max_model_len=CONTEXT, num_snapshots=SNAPSHOTS)
    engine = Engine(StreamExecutor(worker), Scheduler(options, 60, cache_specs=worker.cache_specs))
    prompts = [[3 + (7 * i + k) % 90 for k in range(20)] for i in range(12)]
    requests = [request(prompt, 12, temperature=0, ignore_eos=True) for prompt in prompts]
    got, errors = dict[str, list[int]](), set[str]()
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
            if output.error is not None:
                assert "not enough memory" in output.error
                errors.add(output.request_id)
    engine.close()
    assert 1 <= len(errors) <= 4
    for one in requests:
        tokens = got[one.request_id]
        wanted = expected(one.prompt_token_ids, 12, vocab, has_attention=bool(worker.cache_specs))
        assert tokens == (wanted[: len(tokens)] if one.request_id in errors else wanted)
