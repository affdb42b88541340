"""Worker: one rank. Plans its memory, binds and fills the model, then runs steps. Knows no requests, only slots."""

from __future__ import annotations

import time

import torch

from samovar.attention.choose import AttentionRoute, choose
from samovar.cache.kv_cache import KVCache
from samovar.config.description import ModelDescription
from samovar.config.engine import EngineConfig
from samovar.core.cache_spec import CacheSpec
from samovar.core.device_facts import DeviceFacts
from samovar.core.step import ScheduledStep, StepResult
from samovar.errors import ConfigError
from samovar.hardware import device
from samovar.hardware.memory import MemoryPlan, ModelShape, plan_memory
from samovar.kernels.op import Kernels, Target
from samovar.layers.attention import attach, attention_layers
from samovar.layers.layer import Placement, bind
from samovar.models.decoder import DecoderLM
from samovar.models.registry import build
from samovar.parallel.mesh import Axis
from samovar.quant.select import select
from samovar.sample.state import SamplingState
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.load import Progress, fill_dummy, load_weights
from samovar.weights.plan import layers_of
from samovar.worker.model_runner import ModelRunner
from samovar.worker.step_builder import StepBuilder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Names that a resolved configuration may hold."""


class Worker:
    """One rank's model and cache.

    Construction declares the model and plans memory exactly, from shapes alone, so what does not fit is refused before
    anything is read. `config` must be resolved (no "auto" but `attention_backend`); `facts` describe the device before
    the model is loaded. Raises `MemoryPlanError`, `CheckpointError` or `ConfigError`.
    """

    def __init__(self, config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> None:
        if config.model.dtype == "auto":
            raise ConfigError("dtype is still 'auto': a worker takes a resolved configuration (config.resolve)")
        self.config, self.description, self.facts = config, description, facts
        device.set_threads(config.device.threads or facts.num_threads)
        self.dtype = DTYPES[config.model.dtype]
        cache_dtype = config.cache.kv_cache_dtype
        self.cache_dtype = self.dtype if cache_dtype == "auto" else DTYPES[cache_dtype]
        self.device = torch.device(facts.kind)
        self.kernels = Kernels(Target(facts.kind, facts.architecture, self.dtype), self.device, config.device.kernel)
        self.model: DecoderLM = build(description.architecture, description.config)
        bind(self.model, self._place(torch.device("meta"), config.model.max_model_len))
        self.weight_bytes = sum(s.target.nbytes for layer in layers_of(self.model) for s in layer.sources())
        """Bytes of every tensor that is filled from the checkpoint; shared (tied) ones count once."""
        self._specs = self.model.cache_specs()
        self.memory_plan: MemoryPlan = plan_memory(self._shape(), facts, config)
        self.attention: AttentionRoute = choose(self.model.attention_specs(), facts, config.device)
        self._runner: ModelRunner | None = None

    @property
    def num_blocks(self) -> int:
        """Cache blocks, from the memory plan."""
        return self.memory_plan.num_blocks

    @property
    def max_model_len(self) -> int:
        """Longest sequence, from the memory plan (it resolves -1)."""
        return self.memory_plan.max_model_len

    @property
    def cache_specs(self) -> list[CacheSpec]:
        """What each layer caches on this rank."""
        return self._specs

    @property
    def vocab_size(self) -> int:
        """Width of the logits, which may exceed the tokenizer's vocabulary."""
        return self.model.config.vocab_size

    def load(self, progress: Progress | None = None) -> None:
        """Allocate, fill the model, allocate the cache (untouched), and make it ready to run."""
        with torch.inference_mode():
            bind(self.model, self._place(self.device, self.max_model_len))
            if self.description.format == "dummy" or self.config.model.load_format == "dummy":
                fill_dummy(self.model, self.config.model.seed, progress=progress)
            else:
                with open_checkpoint(self.description) as checkpoint:
                    load_weights(self.model, checkpoint, progress=progress)
            self._make_cache()
        if self.config.device.require_route:
            self._check_routes()

    def execute(self, step: ScheduledStep) -> StepResult:
        """Run one step; an exception means that the whole step failed. `load` must have been called."""
        if self._runner is None:
            raise RuntimeError(f"step {step.step_id} came before load()")
        began = time.perf_counter()
        result = self._runner.run(step)
        device.synchronize(self.facts.kind)
        result.seconds = time.perf_counter() - began
        return result

    def reset_cache(self) -> None:
        """Give the cache's memory back and start with an untouched one. No sequence may be running."""
        self._make_cache()

    def routes(self) -> list[str]:
        """Which implementation serves each op and each kind of attention, and why."""
        return [*(str(route) for _, route in sorted(self.kernels.routes.items())), *self.attention.lines]

    def memory_reading(self) -> tuple[int, int]:
        """(in use now, at most so far) in bytes, as the system sees it."""
        return device.memory_reading(self.facts.kind)

    def _place(self, where: torch.device, max_model_len: int | None) -> Placement:
        length = max_model_len if max_model_len is not None and max_model_len > 0 else None
        stored = self.description.config
        return Placement(
            dtype=self.dtype,
            device=where,
            kernels=self.kernels,
            cache_dtype=self.cache_dtype,
            tp=Axis(),
            max_model_len=length,
            quant_for=select(
                stored.get("quantization_config") or stored.get("compression_config"), self.dtype, self.kernels
            ),
        )

    def _shape(self) -> ModelShape:
        """The exact sizes of the bound model."""
        c = self.model.config
        return ModelShape(
            weight_bytes=self.weight_bytes,
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_heads=c.num_attention_heads,
            head_dim=c.head_dim,
            max_position_embeddings=self.description.max_position_embeddings or c.max_position_embeddings,
            element_bytes=self.dtype.itemsize,
            cache_specs=tuple(self._specs),
            keeps_scores=any(spec.softcap is not None or spec.has_sinks for spec in self.model.attention_specs()),
        )

    def _make_cache(self) -> None:
        """A fresh cache and fresh per-slot buffers around the loaded model."""
        block_size = self.config.cache.block_size
        # The old cache must be gone before the new one exists: both together were never planned.
        self._runner = None
        for layer in attention_layers(self.model):
            layer.cache = (torch.empty(0), torch.empty(0))
        cache = KVCache(self._specs, self.num_blocks, block_size, self.cache_dtype, self.device)
        attach(self.model, cache, self.attention)
        num_slots = self.config.scheduler.max_num_seqs
        builder = StepBuilder(
            num_slots=num_slots,
            max_model_len=self.max_model_len,
            block_size=block_size,
            num_blocks=self.num_blocks,
            vocab_size=self.vocab_size,
            device=self.device,
        )
        state = SamplingState(num_slots, self.vocab_size, self.max_model_len, self.device)
        self._runner = ModelRunner(self.model, builder, state, plan=self.attention.plan, copy_blocks=cache.copy_blocks)

    def _check_routes(self) -> None:
        fallbacks = [str(route) for route in self.kernels.routes.values() if route.is_fallback]
        if fallbacks:
            raise ConfigError(f"--require-route: these ops would fall back to their reference: {'; '.join(fallbacks)}")
