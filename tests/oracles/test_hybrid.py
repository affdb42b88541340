"""Models with recurrent states: whatever is cached, cut, preempted, aborted or put to sleep, the tokens are those of a run
alone. The model is a toy whose every token shows a wrong state (`toy_hybrid`)."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samovar import LLM, RequestOutput, SamplingParams
from samovar.config.engine import EngineConfig
from samovar.core.request import Request
from samovar.schedule.options import SchedulerOptions, SnapshotRules
from tests.oracles.toy_hybrid import NAME, expected, registered, write_toy

BLOCK = 16
SOON = SnapshotRules(margin=4, least_gain=1, interval=48, decode_interval=16, decode_share=0.5)
"""Snapshots wherever they can be."""
MakeLLM = Callable[..., LLM]
NAMES = [NAME, "ToyRecurrentForCausalLM"]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With attention beside the state, and without."""
    with registered():
        yield write_toy(tmp_path_factory.mktemp("toy"), request.param, length=12_288)


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLLM]:
    """LLMs of the toy; shut down after the test."""
    ordinary = SchedulerOptions.from_config

    def start(rules: SnapshotRules = SOON, **options: Any) -> LLM:
        def from_config(config: EngineConfig) -> SchedulerOptions:
            return replace(ordinary(config), snapshot_rules=rules)

        monkeypatch.setattr(SchedulerOptions, "from_config", from_config)
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "float32",
            "block_size": BLOCK,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "num_gpu_blocks_override": 1000,
            "threads": 1,
            "enforce_eager": True,
        }
        return stack.enter_context(LLM(str(folder), **{**settings, **options}))

    with ExitStack() as stack:
        yield start


class Answers:
    """What a folder's model says."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.vocab, self.has_attention = config["vocab_size"], config["architectures"] == [NAME]

    def prompt(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(3, self.vocab) for _ in range(length)]

    def __call__(self, prompt: list[int], count: int) -> list[int]:
        return expected(prompt, count, self.vocab, has_attention=self.has_attention)


@pytest.fixture
def answers(folder: Path) -> Answers:
    return Answers(folder)


def greedy(count: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **params)


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def as_request(name: str, prompt: list[int], params: SamplingParams) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=params, eos_token_ids=[], arrival=0.0)


def related_prompts(answers: Answers, rng: random.Random, count: int) -> list[list[int]]:
    """Most of them begin like others, some are the same."""
    heads = [answers.prompt(rng, length) for length in (15, 16, 17, 64, 100)]
    prompts = [rng.choice(heads) + answers.prompt(rng, rng.randrange(0, 40)) for _ in range(count)]
    return [rng.choice(prompts) if rng.random() < 0.1 else prompt for prompt in prompts]


def held(llm: LLM) -> tuple[int, int, int]:
    """(blocks, slots, snapshot rows that somebody waits for or writes to)."""
    scheduler = llm._engine.scheduler  # type: ignore[attr-defined]
    usage, snapshots = scheduler.block_usage(), scheduler._snapshots
    rows = snapshots.rows
    return usage["used"], usage["used_slots"], snapshots._num_rows - rows.num_free - rows.num_held


def test_a_hundred_requests(make: MakeLLM, answers: Answers) -> None:
    """One after the other, then all at once on few slots, cached and not: each as if alone in a fresh engine."""
    prompts = related_prompts(answers, random.Random(0), 100)
    wanted = [answers(prompt, 20) for prompt in prompts]
    llm = make()
    for prompt, tokens in zip(prompts, wanted, strict=True):
        assert run(llm, [prompt], greedy(20))[0].outputs[0].token_ids == tokens
    together = run(llm, prompts, greedy(20))
    assert [output.outputs[0].token_ids for output in together] == wanted
    assert sum(output.num_cached_tokens or 0 for output in together) > 40 * len(prompts)
    for options in ({"enable_prefix_caching": False}, {"state_snapshots": "0"}, {"state_snapshots": "400"}):
        outputs = run(make(max_num_seqs=3, **options), prompts[:30], greedy(20))
        assert [output.outputs[0].token_ids for output in outputs] == wanted[:30]
        if options != {"state_snapshots": "400"}:
            assert not any(output.num_cached_tokens for output in outputs)
    assert held(llm) == (0, 0, 0)


def test_warm_is_cold_around_borders(make: MakeLLM, answers: Answers) -> None:
    """The same prompt again, and the next turn, for every place of the prompt's end between two borders."""
    rng, llm = random.Random(1), make()
    for length in range(2 * BLOCK - 2, 3 * BLOCK + 3):
        prompt = answers.prompt(rng, length)
        said = answers(prompt, 24)
        turn = prompt + said + answers.prompt(rng, 5)
        for again in range(2):
            first, second = (run(llm, [ids], greedy(24))[0] for ids in (prompt, turn))
            assert first.outputs[0].token_ids == said
            assert second.outputs[0].token_ids == answers(turn, 24)
            # The prompt's last border but `margin`, or a later one; the last border that the first turn decoded.
            assert (first.num_cached_tokens or 0) >= ((length - SOON.margin) // BLOCK * BLOCK if again else 0)
            assert (second.num_cached_tokens or 0) >= (length + 23) // BLOCK * BLOCK


def test_shared_beginnings_get_a_snapshot(make: MakeLLM, answers: Answers) -> None:
    """The first that parts from others computes all, and leaves a snapshot where it parted; the next begins there."""
    rng, llm = random.Random(2), make(SnapshotRules(least_gain=16))
    head = answers.prompt(rng, 400)
    cached = []
    for _ in range(4):
        prompt = head + answers.prompt(rng, 60)
        output = run(llm, [prompt], greedy(4))[0]
        assert output.outputs[0].token_ids == answers(prompt, 4)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 400, 400]


def test_preempted_is_not(make: MakeLLM, answers: Answers) -> None:
    """A pool in which three sequences fit at full length."""
    rng = random.Random(3)
    prompts = [answers.prompt(rng, rng.randrange(1, 40)) for _ in range(16)]
    for options in ({}, {"scheduling_policy": "priority"}, {"state_snapshots": "600"}, {"async_scheduling": False}):
        llm = make(num_gpu_blocks_override=24, max_model_len=160, **options)
        outputs = run(llm, prompts, greedy(100))
        assert [output.outputs[0].token_ids for output in outputs] == [answers(prompt, 100) for prompt in prompts]
        assert llm._engine.stats().num_preemptions > 3
        assert held(llm) == (0, 0, 0)


def test_neighbours_that_leave(make: MakeLLM, answers: Answers) -> None:
    """Aborts at every moment; slots and rows go to others at once, and those that stay never notice."""
    rng, llm = random.Random(4), make(max_num_seqs=3)
    engine = llm._engine
    prompts = related_prompts(answers, rng, 40)
    got: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for i, prompt in enumerate(prompts):
        engine.add(as_request(f"r{i}", prompt, greedy(30)))
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
        if rng.random() < 0.2:
            victim = f"r{rng.randrange(len(prompts))}"
            if len(got.get(victim, [])) < 30:
                aborted.add(victim)
            engine.abort(victim)
    for i, prompt in enumerate(prompts):
        tokens, wanted = got.get(f"r{i}", []), answers(prompt, 30)
        assert tokens == (wanted[: len(tokens)] if f"r{i}" in aborted else wanted)
    assert 5 < len(aborted) < 35 and held(llm) == (0, 0, 0)


@pytest.mark.parametrize("caches", [True, False])
def test_choices_and_prompt_logprobs(make: MakeLLM, answers: Answers, caches: bool) -> None:
    """Choices begin behind the prompt that the first of them computed, and say the same, as this model is so sure; where
    logprobs of the prompt are wanted it is computed again."""
    llm = make(enable_prefix_caching=caches)
    prompt = answers.prompt(random.Random(5), 100)
    wanted = answers(prompt, 20)
    for params in (
        {"n": 4, "seed": 3, "temperature": 1.0},
        {"n": 3, "seed": 3, "temperature": 1.0, "skip_reading_prefix_cache": True},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ):
        settings = SamplingParams(max_tokens=20, ignore_eos=True, **params)  # type: ignore[arg-type]
        output = run(llm, [prompt], settings)[0]
        assert [choice.token_ids for choice in output.outputs] == [wanted] * settings.n
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
    assert held(llm) == (0, 0, 0)


def test_reset_and_sleep(make: MakeLLM, answers: Answers) -> None:
    """No snapshot outlives the cache; what runs goes on."""
    llm, prompt = make(), answers.prompt(random.Random(6), 150)
    wanted = answers(prompt, 10)
    for forget in (llm.reset_prefix_cache, lambda: (llm.sleep(1), llm.wake_up())):
        for cached in (0, (150 - SOON.margin) // BLOCK * BLOCK):
            output = run(llm, [prompt], greedy(10))[0]
            assert (output.outputs[0].token_ids, output.num_cached_tokens) == (wanted, cached)
        forget()
    assert run(llm, [prompt], greedy(10))[0].num_cached_tokens == 0


@pytest.mark.slow
def test_decode_does_not_grow(make: MakeLLM, answers: Answers) -> None:
    """10,000 tokens: right to the last, and what is kept for each is its id and its share of a digest."""
    llm = make(SnapshotRules(), max_model_len=12_288)
    prompt = answers.prompt(random.Random(7), 50)
    engine = llm._engine
    engine.add(as_request("r", prompt, greedy(10_000)))
    tokens, sizes = list[int](), dict[int, int]()
    tracemalloc.start()
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
            if len(tokens) in (2000, 10_000):
                sizes[len(tokens)] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert tokens == answers(prompt, 10_000)
    # An id is an object of 28 bytes in two lists; a digest of 65 in three places for 16 tokens, and a block's number.
    assert sizes[10_000] - sizes[2000] < 8000 * 80
    assert held(llm) == (0, 0, 0)
