"""Kernels made ready while weights load: the runner's own steps on tensors without memory name every launch to come.

Nothing here knows what a step launches. A runner is built on the device "meta" with the code that builds the real one,
and is given steps of every kind that differ in their kernels; `kernels.triton_launch` takes note instead of launching,
and the notes are compiled side by side.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from samovar.config.engine import EngineConfig
from samovar.config.field import kernel_cache
from samovar.core.device_facts import DeviceFacts
from samovar.core.sampling_params import SamplingParams
from samovar.core.step import ScheduledSequence, ScheduledStep, SlotStart
from samovar.errors import ConfigError
from samovar.hardware.memory import decode_buckets, num_seqs
from samovar.hardware.stream import DeviceStream
from samovar.kernels.op import Kernels, Refusal, in_one_line
from samovar.kernels.triton_launch import (
    Compiled,
    CompileReport,
    LaunchNotes,
    compile_each,
    compiling_for,
    is_installed,
    noting,
    on_compile,
    set_cache_folder,
)
from samovar.models.decoder import DecoderLM
from samovar.worker.self_test import note_checks

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONTEXTS = (1, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Lengths of sequences in decode steps: attention splits keys into more parts the more there are."""
LONG_CONTEXT = 4096
"""Length of many sequences at once in a decode step, which attention reads in other tiles than short ones."""
CHUNKS = (1, 3, 9, 17, 33, 65, 129, 257, 513, 1025, 2049)
"""Tokens of prefill steps: matrix kernels change with the number of rows, those of experts longest."""
BEHIND = ((64, 2), (4096, 16), (1 << 20, 1 << 20))
"""Chunks behind a history, as (tokens in all, tokens of the chunk), each at most what there may be: latent attention
computes them in other ways the shorter they are, and long histories in passes."""
KINDS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01))
"""Rows that only take the largest logit, and rows that use everything a kernel has for them."""


class MetaMark:
    """A mark in a queue that does nothing."""

    def record(self) -> None:
        """Nothing was queued."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def seconds_until(self, later: object) -> float:
        """No time passes."""
        return 0.0


class MetaGraph:
    """Work that was run once, without memory."""

    def replay(self) -> None:
        """Its launches were noted."""


class MetaStream:
    """`DeviceStream` for the device "meta": work runs at once and computes nothing."""

    device = torch.device("meta")

    def current(self) -> AbstractContextManager[object]:
        """There is one queue."""
        return nullcontext()

    def mark(self, *, is_timed: bool = False) -> MetaMark:
        """See `DeviceStream`."""
        return MetaMark()

    def pinned(self, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Plain host memory, [size]."""
        return torch.zeros(size, dtype=dtype)

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """There is nothing to read."""

    def reserve(self, num_bytes: int) -> None:
        """No memory is ever needed."""

    def release(self) -> None:
        """Nothing was set aside."""

    def capture(self, work: Callable[[], T]) -> tuple[MetaGraph, T]:
        """Run `work`, so that its launches are noted."""
        return MetaGraph(), work()


class Shortcuts(TorchFunctionMode):
    """Results of what torch derives in Python for tensors without memory: that takes long, and imports its compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.Tensor.pin_memory:
            return args[0]  # nothing will be copied from it, and there may be no driver
        shortcut = SHORTCUTS.get(func)
        if shortcut is not None:
            first = args[0][0] if func is torch.cat else args[0]
            where = given.get("device") if func is torch.arange else getattr(first, "device", None)
            if where == MetaStream.device:
                return shortcut(*args, **given)
        return func(*args, **given)


def _like(tensor: torch.Tensor, shape: Sequence[int], **options: Any) -> torch.Tensor:
    return torch.empty(shape, **{"dtype": tensor.dtype, "device": tensor.device, **options})


def _first(tensor: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    return tensor


def _rows(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    if isinstance(index, torch.Tensor) and index.dtype != torch.bool:
        return _like(tensor, (*index.shape, *tensor.shape[1:]))
    return tensor[index]


def _joined(parts: Sequence[torch.Tensor], dim: int = 0, **options: Any) -> torch.Tensor:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return _like(parts[0], shape)


SHORTCUTS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.Tensor.addmm_: _first,
    torch.Tensor.index_copy_: _first,
    torch.Tensor.__getitem__: _rows,
    torch.Tensor.new_empty: lambda x, *shape, **options: _like(x, shape[0] if len(shape) == 1 else shape, **options),
    torch.empty_like: lambda x, **options: _like(x, x.shape, **options),
    torch.nn.functional.embedding: lambda ids, weight, **options: _like(weight, (*ids.shape, weight.shape[1])),
    torch.nn.functional.linear: lambda x, weight, bias=None: _like(x, (*x.shape[:-1], weight.shape[0])),
    torch.bmm: lambda a, b, out=None: _like(a, (*a.shape[:2], b.shape[2])) if out is None else out,
    torch.arange: lambda end, **options: torch.empty(end, **{"dtype": torch.int64, **options}),
    torch.cat: _joined,
}


class Launching(Protocol):
    """What is used of a runner."""

    def launch(self, step: ScheduledStep) -> object: ...


class Bound(Protocol):
    """What is used of a worker whose model is bound without memory."""

    config: EngineConfig
    facts: DeviceFacts
    kernels: Kernels
    model: DecoderLM

    @property
    def num_blocks(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    def make_runner(self, device: torch.device, stream: DeviceStream) -> Launching: ...

    def run_products(self) -> None: ...


def note(worker: Bound) -> LaunchNotes:
    """Every launch that serving with `worker` makes, and those of the comparisons at start. Runs no kernel."""
    config = worker.config
    steps = warm_steps(
        max_num_seqs=num_seqs(config),
        max_num_tokens=config.scheduler.max_num_batched_tokens or 1,
        max_model_len=min(worker.max_model_len, worker.num_blocks * config.cache.block_size),
        block_size=config.cache.block_size,
    )
    with torch.inference_mode(), Shortcuts(), noting() as notes:
        runner = worker.make_runner(MetaStream.device, MetaStream())
        for step in steps:
            runner.launch(step)
        worker.run_products()
        worker.kernels.note_probes()
        note_checks(worker.model, worker.kernels.target.dtype)
    return notes


def warm_steps(
    *, max_num_seqs: int, max_num_tokens: int, max_model_len: int, block_size: int
) -> Iterator[ScheduledStep]:
    """Steps of every kind that differ in their kernels: decode by batch size and by length, prefill, chunks, mixed.

    Blocks are shared between sequences and token ids are 0: only sizes matter.
    """
    make = _Steps(block_size)
    buckets = decode_buckets(max_num_seqs)
    lengths = [length for length in CONTEXTS if length < max_model_len] + [max_model_len]
    for size in buckets:
        yield make.step([(min(64, max_model_len), 1)] * size, KINDS[0])
    yield make.step([(min(LONG_CONTEXT, max_model_len), 1)] * buckets[-1], KINDS[0])
    for length in lengths:
        yield make.step([(length, 1)], KINDS[1])
    longest = min(max_num_tokens, max_model_len)
    chunks = [chunk for chunk in CHUNKS if chunk < longest] + [longest]
    for chunk in chunks:
        yield make.step([(chunk, chunk)], KINDS[0])
    for total, chunk in BEHIND:
        if (total := min(total, max_model_len)) > (chunk := min(chunk, longest)):
            yield make.step([(total, chunk)], KINDS[0])
    rest = min(longest, max_model_len // 2)
    if rest > 1:
        yield make.step([(2 * rest, rest)], KINDS[0])
        yield make.step([(2 * rest, 1), (rest, rest - 1)][:max_num_seqs], KINDS[1])


class _Steps:
    """Makes steps; each takes all its slots anew."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._count = 0

    def step(self, spans: Sequence[tuple[int, int]], params: SamplingParams) -> ScheduledStep:
        """One step of sequences given as (tokens in all, tokens to compute); every one samples."""
        self._count += 1
        starts, sequences = [], []
        for slot, (total, new) in enumerate(spans):
            starts.append(
                SlotStart(
                    slot=slot,
                    params=params,
                    token_ids=[0],
                    num_prompt_tokens=1,
                    stop_token_ids=[],
                    sampling_key=0,
                )
            )
            sequences.append(
                ScheduledSequence(
                    slot=slot,
                    start=total - new,
                    num_new_tokens=new,
                    token_ids=[0] * new,
                    new_blocks=list(range(-(-total // self._block_size))),
                    samples=True,
                    position_of_sample=total,
                )
            )
        freed = [start.slot for start in starts] if self._count > 1 else []
        return ScheduledStep(self._count, started=starts, freed_slots=freed, sequences=sequences)


@dataclass(frozen=True, slots=True)
class Compilation:
    """Kernels that are being compiled on other threads."""

    future: Future[CompileReport]

    def wait(self) -> CompileReport:
        """The outcome."""
        return self.future.result()


def begin(worker: Bound) -> Compilation:
    """Note what `worker` will launch (its model must be bound to "meta") and start compiling it on other threads.

    Without Triton there is nothing to compile: the routes say what runs instead.
    """
    notes = LaunchNotes()
    if is_installed():
        set_cache_folder(kernel_cache())
        notes = note(worker)
    executor = ThreadPoolExecutor(1, "kernels")
    future = executor.submit(compile_each, notes, worker.facts.num_threads, loads=True)
    executor.shutdown(wait=False)
    return Compilation(future)


def compile_for(worker: Bound, is_here: bool) -> CompileReport:
    """Note and compile now. Unless the GPU `is_here`, for the architecture that the worker's facts name.

    Raises `ConfigError` if Triton is not installed.
    """
    if not is_installed():
        raise ConfigError("kernels are compiled by Triton, which is not installed: pip install triton")
    set_cache_folder(kernel_cache())
    notes = note(worker)
    threads = worker.facts.num_threads
    if is_here:
        return compile_each(notes, threads, loads=True)
    with compiling_for(int(worker.facts.architecture.removeprefix("sm_"))):
        return compile_each(notes, threads)


def settle(compilation: Compilation, kernels: Kernels) -> bool:
    """Wait for the compilers, then compare each choice with its reference.

    What fails is refused and logged, until what is chosen in its place agrees. True if that happened: the model must
    then be bound again. Raises `ConfigError` where there is no other choice.
    """
    report = compilation.wait()
    ops = {op.name: op for op, _ in kernels.chosen()}
    refusals = list(dict.fromkeys(refusal for failure in report.failures for refusal in _blame(failure, kernels)))
    if report.outcomes:
        logger.info("%s", report)
    has_refused = False
    while refusals or (refusals := kernels.verify()):
        has_refused = True
        for refusal in refusals:
            logger.warning("%s", refusal)
            kernels.refuse(refusal.op, refusal.impl, refusal.reason)
        for refusal in refusals:
            kernels.use(ops[refusal.op])
        refusals = []
    if is_installed():
        on_compile(_log_late)
    return has_refused


def _log_late(name: str) -> None:
    logger.warning("kernel %s was not prepared: a step waited for it", name)


def _blame(failure: Compiled, kernels: Kernels) -> list[Refusal]:
    """The choices whose files use the kernel of `failure`."""
    kernel, error = failure.launch.kernel, failure.error
    assert error is not None
    reason = f"its kernel {failure.launch.name} cannot be used: {in_one_line(error)}"
    found = [Refusal(op.name, impl.name, reason) for op, impl in kernels.chosen() if _uses(impl.function, kernel)]
    if not found:
        raise ConfigError(
            f"the kernel {failure.launch.name} ({kernel.module}) cannot be used on this GPU: {in_one_line(error)}; "
            "use --attention-backend torch_sdpa, or another version of Triton"
        )
    return found


def _uses(function: Callable[..., Any], kernel: Any) -> bool:
    """Whether the file of `function` defines `kernel` or takes something from the file that does."""
    if function.__module__ == kernel.module:
        return True
    names = vars(sys.modules[function.__module__]).values()
    return any(getattr(value, "__module__", None) == kernel.module for value in names)
