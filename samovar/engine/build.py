"""build_engine: a configuration -> a loaded engine. Locate, describe, probe, resolve, plan memory, load, assemble."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from samovar.config.description import ModelDescription
from samovar.config.engine import EngineConfig, with_settings
from samovar.config.resolve import Resolved, resolve
from samovar.core.outputs import EngineInfo
from samovar.engine.enforcer import GrammarEnforcer, grammar_enforcer
from samovar.engine.engine import Engine
from samovar.engine.executor import Executor
from samovar.engine.executors.in_process import InProcessExecutor
from samovar.engine.executors.on_stream import StreamExecutor
from samovar.engine.report import settings_of, startup_report, versions
from samovar.hardware.device import probe
from samovar.hub import locate
from samovar.native.facts import with_kernels
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.prefix_cache import CacheIdentity
from samovar.schedule.scheduler import Scheduler
from samovar.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from samovar.worker.worker import Worker

logger = logging.getLogger(__name__)

OnPhase: TypeAlias = Callable[[str], None]
"""Hears the name of each phase as it begins, and again while it makes progress."""

EngineBuilder: TypeAlias = Callable[[EngineConfig, OnPhase], tuple[Engine, EngineInfo]]
"""(configuration, listener for phases) -> (engine, its facts)."""


SIGN_SECONDS = 0.3
"""How often a phase that goes on is named again; well below the shortest `engine_timeout`."""


SERVED_ROUNDS_SECONDS, BATCH_ROUNDS_SECONDS = 0.008, 0.1
"""How long a CPU may compute one token after the other of the same sequences: where clients read along, and where not.
Two such steps may be under way when somebody comes, so a client that comes or goes waits for up to twice as long."""


def rounds_seconds(options: SchedulerOptions) -> float:
    """`SchedulerOptions.rounds_seconds` of a worker on a CPU."""
    if not options.step_time_target:
        return BATCH_ROUNDS_SECONDS
    return min(SERVED_ROUNDS_SECONDS, options.step_time_target)


def signs_of_life(phase: str, on_phase: OnPhase) -> Callable[[int, int], None]:
    """A progress listener that names `phase` again and again, so that a long load is not taken for a stuck one."""
    last = time.monotonic()

    def listen(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SIGN_SECONDS:
            last = now
            on_phase(phase)

    return listen


def once_each(listener: OnPhase) -> OnPhase:
    """`listener`, spared the repetitions that only show progress."""
    current = ""

    def listen(phase: str) -> None:
        nonlocal current
        if phase != current:
            current = phase
            listener(phase)

    return listen


def find_model(config: EngineConfig) -> ModelDescription:
    """Locate the model, downloading it if need be, and read its header. Raises `CheckpointError`."""
    return locate.find_model(config.model)


def build_engine(
    config: EngineConfig,
    on_phase: OnPhase,
    description: ModelDescription | None = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> tuple[Engine, EngineInfo]:
    """A loaded engine and its facts. What does not fit or match is refused before a weight is read.

    `description` saves reading the header again, `tokenizer` loading it once more for constrained requests.
    Raises `ConfigError`, `CheckpointError` or `MemoryPlanError`.
    """
    started = time.monotonic()
    if description is None:
        on_phase("finding the model")
        description = find_model(config)
    on_phase("importing torch")
    # Here, not at the top: a wrong path or flag is reported before the slow import.
    facts = with_kernels(probe(config.device.device))
    resolved = resolve(config, description, facts)
    from samovar.worker.worker import Worker

    on_phase("planning memory")
    worker = Worker(resolved.config, description, facts)
    # Before a weight is read: whoever watches a long load, or one that fails, sees what it was meant to take.
    report = startup_report(description, facts, resolved, worker.memory_plan)
    logger.info("%s", "\n".join([report, *worker.model.notes]))
    on_phase("loading weights")
    worker.load(signs_of_life("loading weights", on_phase))
    on_phase("starting")
    enforcer = grammar_enforcer(resolved.config, description, worker.vocab_size, tokenizer)
    return _assemble(worker, resolved, enforcer, config.model.model, started)


def _assemble(
    worker: Worker, resolved: Resolved, enforcer: GrammarEnforcer | None, name: str, started: float
) -> tuple[Engine, EngineInfo]:
    # A length of -1 became a number in the memory plan, and sequences with states may be fewer.
    plan = worker.memory_plan
    config = with_settings(resolved.config, max_model_len=plan.max_model_len, max_num_seqs=plan.num_seqs)
    options = SchedulerOptions.from_config(config)
    if worker.state_specs:
        # No rounds: within one, nobody could keep what a sequence has come to.
        options = replace(options, num_snapshots=worker.memory_plan.num_snapshots)
    elif worker.facts.kind == "cpu":
        options = replace(options, rounds_seconds=rounds_seconds(options))
    identity = CacheIdentity(
        model=str(worker.description.path), weights_version="1", kv_dtype=config.cache.kv_cache_dtype
    )
    # A GPU has a queue of its own; a CPU needs a thread to compute while the engine goes on.
    executor: Executor = StreamExecutor(worker) if worker.facts.kind == "cuda" else InProcessExecutor(worker)
    scheduler = Scheduler(
        options, executor.num_blocks, cache_specs=executor.cache_specs, identity=identity, enforcer=enforcer
    )
    facts = {
        "config": settings_of(config),
        "decisions": [list(row) for row in resolved.as_rows()],
        "memory_plan": [list(line) for line in worker.memory_plan.lines],
        "routes": worker.routes(),
        "versions": versions(),
    }
    close = None if enforcer is None else enforcer.close
    engine = Engine(executor, scheduler, overlap=options.async_scheduling, facts=facts, on_close=close)
    info = EngineInfo(
        model=name,
        architecture=worker.description.architecture,
        vocab_size=worker.vocab_size,
        max_model_len=worker.max_model_len,
        dtype=config.model.dtype,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        block_size=config.cache.block_size,
        num_blocks=executor.num_blocks,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        load_seconds=time.monotonic() - started,
        weight_bytes=worker.weight_bytes,
        prefix_caching=options.enable_prefix_caching,
        scheduling_policy=options.scheduling_policy,
        decisions=resolved.as_rows(),
        memory_plan=list(worker.memory_plan.lines),
        routes=worker.routes(),
    )
    return engine, info
