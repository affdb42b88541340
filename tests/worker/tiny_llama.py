"""A tiny random Llama on disk, its Transformers twin as oracle, and a driver that cuts sequences into steps at will."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from samovar.config.checkpoint import describe
from samovar.config.engine import EngineConfig
from samovar.config.groups import CacheConfig, ModelConfig, SchedulerConfig
from samovar.core.outputs import TokenLogprobs
from samovar.core.sampling_params import SamplingParams
from samovar.core.step import ScheduledSequence, ScheduledStep, SlotStart, StepResult
from samovar.hardware.device import probe
from samovar.worker.worker import Worker

VOCAB, BLOCK, CONTEXT, NUM_BLOCKS = 131, 8, 128, 400


def save_checkpoint(folder: Path) -> Any:
    """Write the checkpoint; returns the Transformers model."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.12 / parameter.std())
    model.save_pretrained(folder)
    return model


@contextmanager
def no_library() -> Iterator[None]:
    """Workers made meanwhile find no CPU library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samovar.worker.worker.find_support", lambda facts, num_threads: "left out by a test")
        yield


def make_worker(folder: Path, **cache: Any) -> Worker:
    """A loaded float32 worker with few slots."""
    config = EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32", max_model_len=CONTEXT),
        cache=CacheConfig(block_size=BLOCK, num_gpu_blocks_override=NUM_BLOCKS, kv_cache_dtype="float32", **cache),
        scheduler=SchedulerConfig(max_num_seqs=48, max_num_batched_tokens=256),
    )
    worker = Worker(config, describe(folder, config.model), replace(probe("cpu"), num_threads=1))
    worker.load()
    return worker


class Oracle:
    """Transformers, whole sequence at once, in float32."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def logits(self, ids: list[int]) -> torch.Tensor:
        """[tokens, vocab]."""
        with torch.inference_mode():
            found: torch.Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return found

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


@dataclass
class Run:
    """One sequence under way. `output` is what the host has been told; `unseen` tokens are on the device only."""

    slot: int
    params: SamplingParams
    prompt: list[int]
    key: int = 0
    stop_ids: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    computed: int = 0
    unseen: int = 0
    blocks: list[int] = field(default_factory=list)
    is_started: bool = False
    error: str | None = None

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def is_done(self) -> bool:
        assert self.params.max_tokens is not None
        ended = len(self.output) + self.unseen >= self.params.max_tokens
        return self.error is not None or (ended and self.computed >= len(self.prompt))


class Driver:
    """Turns runs into steps: chunk sizes, batch order, block ids and lateness of the host are up to the caller."""

    def __init__(self, worker: Worker, seed: int = 0) -> None:
        self.worker, self.random = worker, random.Random(seed)
        self.free = list(range(NUM_BLOCKS))
        self.random.shuffle(self.free)
        self.freed_slots: list[int] = []
        self.waiting: list[tuple[list[Run], StepResult]] = []
        self.steps = 0

    def launch(self, shares: list[tuple[Run, int]], copies: list[tuple[int, int]] | None = None) -> StepResult:
        """Run one step that computes (run, tokens); its results are told to the runs by `tell`."""
        started = []
        sequences = []
        for run, count in shares:
            if not run.is_started:
                run.is_started = True
                started.append(SlotStart(run.slot, run.params, run.ids, len(run.prompt), run.stop_ids, run.key))
            sequences.append(self.share(run, count))
        self.steps += 1
        step = ScheduledStep(self.steps, started, self.freed_slots, sequences, copies or [])
        self.freed_slots = []
        result = self.worker.execute(step)
        self.waiting.append(([run for run, _ in shares], result))
        return result

    def share(self, run: Run, count: int) -> ScheduledSequence:
        start, total = run.computed, run.computed + count
        known = len(run.ids)
        need = -(-total // BLOCK) - len(run.blocks)
        new_blocks = [self.free.pop() for _ in range(max(need, 0))]
        if not start:
            new_blocks = run.blocks + new_blocks
            run.blocks = []
        run.blocks += new_blocks
        assert run.params.max_tokens is not None
        samples = total == known + run.unseen and len(run.output) + run.unseen < run.params.max_tokens
        wanted = 0
        if run.params.prompt_logprobs is not None and not run.output:
            wanted = max(min(total, len(run.prompt) - 1) - start, 0)
        run.computed = total
        run.unseen += samples
        return ScheduledSequence(
            run.slot, start, count, run.ids[start:total], new_blocks, samples, total if samples else -1, wanted
        )

    def tell(self) -> None:
        """The host reads the oldest result."""
        runs, result = self.waiting.pop(0)
        by_slot = {run.slot: run for run in runs}
        for slot, message in result.failed.items():
            by_slot[slot].error = message
        for slot, entries in result.prompt_logprobs.items():
            by_slot[slot].prompt_logprobs += entries
        for sampled in result.sampled:
            run = by_slot[sampled.slot]
            run.output += sampled.token_ids
            run.unseen -= 1
            run.logprobs += sampled.logprobs or []

    def preempt(self, run: Run) -> None:
        """Take slot and blocks of a run whose tokens are all known."""
        assert not run.unseen
        self.freed_slots.append(run.slot)
        self.free = self.free + run.blocks
        run.blocks, run.computed, run.is_started = [], 0, False

    def finish(self, runs: list[Run], *, chunk: int = 256, lag: int = 1) -> None:
        """Run to the end: whole chunks of at most `chunk` tokens; the host reads results `lag` steps late (0 or 1)."""
        while any(not run.is_done for run in runs):
            shares = [(run, min(chunk, len(run.ids) + run.unseen - run.computed)) for run in runs if not run.is_done]
            self.launch(shares)
            while len(self.waiting) > lag:
                self.tell()
        while self.waiting:
            self.tell()

    def finish_randomly(self, runs: list[Run]) -> None:
        """Run to the end with random chunks, batches, batch order, lateness and preemptions."""
        while any(not run.is_done for run in runs):
            shares = []
            for run in runs:
                todo = len(run.ids) + run.unseen - run.computed
                if not run.is_done and self.random.random() < 0.7:
                    shares.append((run, min(todo, self.random.choice((1, 2, 5, 7, 64)))))
            self.random.shuffle(shares)
            if shares:
                self.launch(shares)
            while len(self.waiting) > 1 or (self.waiting and self.random.random() < 0.5):
                self.tell()
            victim = self.random.choice(runs)
            if not self.waiting and victim.is_started and not victim.is_done and self.random.random() < 0.2:
                self.preempt(victim)
        while self.waiting:
            self.tell()


def prompt(length: int, seed: int) -> list[int]:
    """Random ids."""
    maker = random.Random(seed)
    return [maker.randrange(VOCAB) for _ in range(length)]
