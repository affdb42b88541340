"""Worker: one rank. Plans its memory, binds and fills the model, then runs steps. Knows no requests, only slots."""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import nullcontext
from typing import Protocol

import torch

from samovar.attention.choose import AttentionRoute, choose
from samovar.attention.cudnn import CudnnAttention
from samovar.attention.native import NativeAttention
from samovar.cache.kv_cache import KVCache
from samovar.cache.state_pool import StatePool
from samovar.config.description import ModelDescription
from samovar.config.engine import EngineConfig, with_settings
from samovar.config.weight_formats import at_load, stored_config
from samovar.core.cache_spec import PACKED, CacheSpec, StateSpec
from samovar.core.device_facts import DeviceFacts
from samovar.core.step import PendingStep, ScheduledStep, StepResult
from samovar.errors import ConfigError
from samovar.hardware import device
from samovar.hardware.memory import (
    CACHE_LINES,
    DEFAULT_STEP_TOKENS,
    GRAPH_BYTES,
    LOGITS_BYTES,
    MemoryPlan,
    ModelShape,
    decode_buckets,
    logits_rows,
    num_seqs,
    plan_memory,
    rows_at_once,
    step_tokens,
)
from samovar.hardware.stream import CudaStream, DeviceStream
from samovar.kernels.decode_inputs import decode_inputs
from samovar.kernels.op import OPS, Kernels, Target
from samovar.kernels.sample_tokens import sample_tokens
from samovar.layers.attention import attach, attention_layers
from samovar.layers.fuse import FusedModel, fuse
from samovar.layers.layer import Placement, bind
from samovar.layers.lower import CannotLower
from samovar.layers.recurrent import attach_states, recurrent_layers
from samovar.models.decoder import DecoderLM
from samovar.models.registry import build
from samovar.parallel.mesh import Axis
from samovar.quant.base import QuantMethod
from samovar.quant.gguf_on_gpu import GGUFOnGPU
from samovar.quant.select import select
from samovar.sample.state import SamplingState
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.gguf import matrix_types
from samovar.weights.host_copy import HostCopy
from samovar.weights.load import Progress, fill_dummy, load_weights
from samovar.weights.plan import layers_of
from samovar.worker import warmup
from samovar.worker.block_tables import BlockTables
from samovar.worker.device_builder import DeviceStepBuilder
from samovar.worker.device_runner import DeviceModel, DeviceRunner
from samovar.worker.graphs import DecodeGraphs
from samovar.worker.model_runner import LogitsWatch, ModelRunner
from samovar.worker.native_inputs import StepInputs
from samovar.worker.native_model import Lowered, NativeModel
from samovar.worker.native_runner import NativeRunner
from samovar.worker.native_support import NativeSupport, find_support, weight_notes
from samovar.worker.products import run_products
from samovar.worker.profile import Profile
from samovar.worker.route_lines import cache_lines, step_lines
from samovar.worker.self_test import SelfTest
from samovar.worker.slots import Slots
from samovar.worker.step_builder import StepBuilder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Names that a resolved configuration may hold."""
CACHE_DTYPES = {
    **DTYPES,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    **dict.fromkeys(PACKED, torch.uint8),
}
"""The same for cached keys and values."""
FIXED = "triton_fixed"
"""The implementation that an op has for --deterministic, if its others depend on the batch."""


class Runner(Protocol):
    """What the worker needs of that which runs its steps."""

    watch: LogitsWatch | None

    def launch(self, step: ScheduledStep) -> PendingStep: ...

    def prepare(self) -> bool: ...

    def synchronize(self) -> None: ...


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
        num_threads = config.device.threads or facts.num_threads
        device.set_threads(num_threads)
        weight_dtype = DTYPES[config.model.dtype]
        cache_dtype = config.cache.kv_cache_dtype
        self.cache_dtype = weight_dtype if cache_dtype == "auto" else CACHE_DTYPES[cache_dtype]
        support = find_support(facts, num_threads)
        self.native: NativeSupport | None = None if isinstance(support, str) else support
        """The CPU library, if it is there: activations are float32 then, whatever the weights are."""
        self.dtype = weight_dtype if self.native is None else torch.float32
        self.device = torch.device(facts.kind)
        target = Target(facts.kind, facts.architecture, self.dtype, config.device.deterministic)
        self.kernels = Kernels(target, self.device, config.device.kernel)
        self._stored_shapes = self._shapes_of_tensors()
        self._block_names: Container[str] = ()
        """Tensors of a GGUF file that are wanted as they are stored."""
        self._quant_for = self._formats(weight_dtype)
        self.model: DecoderLM = build(description.architecture, description.config, config.model.model_impl)
        bind(self.model, self._place(torch.device("meta"), config.model.max_model_len))
        self.weight_bytes = sum(layer.resident_bytes() for layer in layers_of(self.model))
        """Bytes of every tensor that is filled from the checkpoint, as it lies in memory; shared (tied) ones count once."""
        self._lowered = self._lower(support)
        self._specs = self.model.cache_specs()
        self.state_specs: list[StateSpec] = self.model.state_specs()
        """What each recurrent layer remembers of a sequence on this rank."""
        self.attention: AttentionRoute = choose(self.model.attention_specs(), facts, config.device)
        self.memory_plan: MemoryPlan = plan_memory(self._shape(), facts, config)
        self.config = with_settings(config, max_num_seqs=self.memory_plan.num_seqs)
        self._stream: DeviceStream | None = None
        self._runner: Runner | None = None
        self._fused: FusedModel | None = None
        self._host_copy: HostCopy | None = None
        self._self_test = SelfTest()
        self._has_weights = False
        self._profile = Profile(config.device.profiler_dir, self.device)

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
        """Allocate, fill the model, allocate the cache (untouched), and make it ready to run.

        On a GPU, kernels are compiled meanwhile, and compared with their references before anything is served.
        """
        if self.facts.kind == "cpu":
            self._fill(progress)
            self._self_test.refuses(self.model, self.kernels)
            self.restore_cache()
        else:
            device.limit_memory(self.memory_plan.total_bytes)
            compilation = warmup.begin(self)
            self._stream = stream = CudaStream()
            with stream.current():
                self._fill(progress)
                if warmup.settle(compilation, self.kernels):
                    self._fill(progress)
                while self._self_test.refuses(self.model, self.kernels):
                    self._fill(progress)
                self.restore_cache()
                self.run_products()
                device.synchronize(self.facts.kind)
                device.drop_unused(self.facts.kind)
            device.synchronize(self.facts.kind)
        self._check_routes()

    def _fill(self, progress: Progress | None) -> None:
        """Bind the model to the device and read its weights."""
        self._fused = None
        with torch.inference_mode():
            bind(self.model, self._place(self.device, self.max_model_len))
            if self.description.format == "dummy" or self.config.model.load_format == "dummy":
                fill_dummy(self.model, self.config.model.seed, progress=progress)
            else:
                with open_checkpoint(self.description, blocks=self._block_names) as checkpoint:
                    load_weights(self.model, checkpoint, progress=progress)
        self._has_weights = True

    def run_products(self) -> None:
        """Queue products of every size, so that the matrix library loads its kernels before a step needs them."""
        buckets = decode_buckets(num_seqs(self.config))
        max_rows = self.config.scheduler.max_num_batched_tokens or DEFAULT_STEP_TOKENS
        run_products(self.model, max_rows, buckets, rows_at_once(self.vocab_size, LOGITS_BYTES["cuda"]))

    def launch(self, step: ScheduledStep) -> PendingStep:
        """Start one step; an exception, now or from its `result`, means that the whole step failed.

        A GPU's steps are queued, and run in order; a CPU's are over when this returns. `load` must have been called.
        """
        if self._runner is None:
            raise RuntimeError(f"step {step.step_id} came before load()")
        return self._runner.launch(step)

    def execute(self, step: ScheduledStep) -> StepResult:
        """Run one step and wait for it; raises as `launch` does."""
        return self.launch(step).result()

    def prepare(self) -> bool:
        """Use a moment without steps to make later ones faster; False once there is nothing left to prepare."""
        return self._runner is not None and self._runner.prepare()

    def synchronize(self) -> None:
        """Wait for every step that was launched."""
        if self._runner is not None:
            self._runner.synchronize()

    def watch_logits(self, watch: LogitsWatch | None) -> None:
        """Show `watch` the logits behind prompt logprobs from now on, until the cache is released; None ends it."""
        assert self._runner is not None, "watch_logits came before load()"
        self._runner.watch = watch

    def reset_cache(self) -> None:
        """Give the cache's memory back and start with an untouched one. No sequence may be running."""
        self.release_cache()
        self.restore_cache()

    # Sleep. No sequence may be running, and no step may come before weights and cache are back.

    def release_cache(self) -> int:
        """Give back the memory of the cache, and of everything else that exists for running steps; returns the bytes that
        were planned for the cache, 0 if it was gone already."""
        if self._runner is None:
            return 0
        self._drop_runner()
        device.release_memory(self.facts.kind)
        return sum(size for name, size in self.memory_plan.lines if name in CACHE_LINES)

    def restore_cache(self) -> None:
        """A fresh cache, and fresh per-slot buffers."""
        if self._runner is not None:
            return
        if self._stream is None:
            self._runner = self.make_runner(self.device, None)
            return
        with self._stream.current():
            self._runner = self.make_runner(self.device, self._stream)

    def release_weights(self, level: int, progress: Progress | None = None) -> None:
        """Level 1 moves a GPU's weights to host memory; on a CPU they are there, and stay. Level 2 drops them.

        Raises `ConflictError` if the host has no room for them; then they stay. The cache must have been released.
        """
        if level == 1 and self._has_weights and self.device.type != "cpu":
            self._host_copy = HostCopy(self.model, progress)
            self._has_weights = False
        elif level == 2:
            self._has_weights, self._host_copy, self._fused = False, None, None
            bind(self.model, self._place(torch.device("meta"), self.max_model_len))
        device.release_memory(self.facts.kind)

    def restore_weights(self, progress: Progress | None = None) -> None:
        """Bring the weights back, from host memory or from the checkpoint; nothing to do if they are here."""
        if self._has_weights:
            return
        with nullcontext() if self._stream is None else self._stream.current():
            if self._host_copy is None:
                self._fill(progress)
            else:
                self._host_copy.restore(progress)
        device.synchronize(self.facts.kind)
        self._host_copy, self._has_weights = None, True

    def holds_weights(self) -> bool:
        """Whether the model's weights are where steps need them."""
        return self._has_weights

    def start_profile(self, prefix: str = "") -> None:
        """Note what runs from now on; see `Profile`."""
        self._profile.start(prefix)

    def stop_profile(self) -> str:
        """Write what was noted; returns the file."""
        self.synchronize()
        return self._profile.stop()

    def routes(self) -> list[str]:
        """Which implementation serves each op and each kind of attention, and why; then what is fused, once it is."""
        fused = [] if self._fused is None else self._fused.lines
        routes = [*(str(route) for _, route in sorted(self.kernels.routes.items())), *self.attention.lines, *fused]
        routes += cache_lines(self.model, self._stored_shapes)
        step = step_lines(self.model, self.native, self._lowered) if self.facts.kind == "cpu" else []
        return [*self.model.notes, *step, *weight_notes(self.model), *self._self_test.lines, *routes]

    def memory_reading(self) -> tuple[int, int]:
        """(in use now, at most so far) in bytes, as the system sees it."""
        return device.memory_reading(self.facts.kind)

    def _place(self, where: torch.device, max_model_len: int | None) -> Placement:
        length = max_model_len if max_model_len is not None and max_model_len > 0 else None
        return Placement(
            dtype=self.dtype,
            device=where,
            kernels=self.kernels,
            cache_dtype=self.cache_dtype,
            packed_cache=self.config.cache.kv_cache_dtype if self.config.cache.kv_cache_dtype in PACKED else None,
            stored_shapes=self._stored_shapes,
            tp=Axis(),
            max_model_len=length,
            quant_for=self._quant_for,
        )

    def _shapes_of_tensors(self) -> dict[str, tuple[int, ...]]:
        """What headers say, by name; nothing for files that are described otherwise, or not read."""
        if self.description.format != "safetensors" or self.config.model.load_format == "dummy":
            return {}
        with open_checkpoint(self.description) as checkpoint:
            return {name: info.shape for name, info in checkpoint.tensors.items()}

    def _formats(self, dtype: torch.dtype) -> Callable[[str], QuantMethod]:
        """The format of a layer's weights by its path; `dtype` is that of plain ones."""
        description, stored = self.description, stored_config(self.description.config)
        shapes = self._stored_shapes if stored is not None and self._stored_shapes else None
        plain: QuantMethod | None = None
        if self.native is not None:
            plain = self.native.quant(description, dtype, self.kernels)
            self._block_names = self.native.block_names
        elif description.format == "gguf" and self.facts.kind == "cuda" and self.config.model.load_format != "dummy":
            plain = coded = GGUFOnGPU(matrix_types(description.path), dtype, self.kernels)
            self._block_names = coded.coded
        online = at_load(self.config.model.quantization, description)
        return select(stored, dtype, self.kernels, plain=plain, shapes=shapes, online=online)

    def _lower(self, support: NativeSupport | str) -> Lowered | str:
        """The programs of whole steps, or why layers run one by one."""
        if isinstance(support, str):
            return support
        if self.config.device.enforce_eager:
            return "--enforce-eager"
        try:
            return Lowered(self.model)
        except CannotLower as error:
            return str(error)

    def _shape(self) -> ModelShape:
        """The exact sizes of the bound model."""
        c, lowered = self.model.config, self._lowered
        return ModelShape(
            weight_bytes=self.weight_bytes,
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.active_intermediate_size,
            num_heads=c.num_attention_heads,
            head_dim=max((spec.head_dim for spec in self._specs), default=c.head_dim),
            max_position_embeddings=self.description.max_position_embeddings or c.max_position_embeddings,
            element_bytes=self.dtype.itemsize,
            cache_specs=tuple(self._specs),
            state_specs=tuple(self.state_specs),
            reads_pages=all(
                backend.captures or backend.name == NativeAttention.name for backend in self.attention.backends
            ),
            gathers_chunks=any(backend.name == CudnnAttention.name for backend in self.attention.backends),
            columns=None if isinstance(lowered, str) else lowered.columns,
            keeps_scores=any(spec.softcap is not None or spec.has_sinks for spec in self.model.attention_specs()),
        )

    def _drop_runner(self) -> None:
        """Let go of the cache, the per-slot buffers and the graphs, of which the last replay may still be under way."""
        self.synchronize()
        if isinstance(self._runner, NativeRunner):
            self._runner.close()
        self._runner = None
        if self.native is not None:
            self.native.close()
        for layer in attention_layers(self.model):
            layer.cache = (torch.empty(0), torch.empty(0))
        for recurrent in recurrent_layers(self.model):
            recurrent.attach_state(())
        if self._stream is not None:
            self._stream.release()

    def make_runner(self, where: torch.device, stream: DeviceStream | None) -> Runner:
        """A cache on `where` and what runs steps on it, around the model as it is bound there.

        Steps are queued on `stream`; without one they run at once, as on a CPU.
        """
        block_size = self.config.cache.block_size
        cache = KVCache(self._specs, self.num_blocks, block_size, self.cache_dtype, where)
        attach(self.model, cache, self.attention)
        num_slots = num_seqs(self.config)
        states = None
        if self.state_specs:
            states = StatePool(self.state_specs, num_slots, self.memory_plan.num_snapshots, where)
            attach_states(self.model, states.layers)
        state = SamplingState(num_slots, self.vocab_size, self.max_model_len, where)
        tables = BlockTables(
            num_slots, max_model_len=self.max_model_len, block_size=block_size, num_blocks=self.num_blocks
        )
        if stream is not None:
            return self._device_runner(stream, state, tables, cache, states)
        slots = Slots(state, tables.free, self.vocab_size)
        if self.native is None or isinstance(self._lowered, str):
            has_states, plan, copy = states is not None, self.attention.plan, cache.copy_blocks
            builder = StepBuilder(tables, state.last_sampled, vocab_size=self.vocab_size, has_states=has_states)
            return ModelRunner(self.model, builder, state, slots, plan=plan, copy_blocks=copy, states=states)
        max_tokens = step_tokens(self.config, self.max_model_len)
        native = NativeModel(
            self._lowered,
            self.native.team(),
            StepInputs(max_tokens, num_slots, block_size),
            max_tokens=max_tokens,
            logits_rows=logits_rows(self.vocab_size, self.config, self.facts.kind),
        )
        return NativeRunner(self.model, native, tables, state, slots, copy_blocks=cache.copy_blocks)

    def _device_runner(
        self,
        stream: DeviceStream,
        state: SamplingState,
        tables: BlockTables,
        cache: KVCache,
        states: StatePool | None,
    ) -> DeviceRunner:
        """With the fused model, and graphs unless `enforce_eager`."""
        kernels, lines = self.kernels, dict(self.memory_plan.lines)
        graphs = None
        if not self.config.device.enforce_eager:
            stream.reserve(lines.get("graph pool", 0))
            graphs = DecodeGraphs(stream, lines.get("graphs", 0) // GRAPH_BYTES)
        builder = DeviceStepBuilder(
            stream,
            tables,
            state.last_sampled,
            max_tokens=step_tokens(self.config, self.max_model_len),
            vocab_size=self.vocab_size,
            gathers=not all(backend.captures for backend in self.attention.backends),
        )
        self._fused = fused = self._fused or fuse(self.model, kernels)
        model = DeviceModel(
            forward=fused,
            logits=self.model.logits,
            decode_inputs=kernels.use(decode_inputs),
            sample_tokens=kernels.use(sample_tokens),
            copy_blocks=cache.copy_blocks,
            last_rows=fused.last_rows,
            states=states,
        )
        return DeviceRunner(
            model,
            builder,
            state,
            self.attention,
            stream,
            slots=Slots(state, builder.free, self.vocab_size),
            graphs=graphs,
            buckets=decode_buckets(num_seqs(self.config)),
        )

    def _check_routes(self) -> None:
        """Refuse to serve with kernels that break what was asked for. Only now is known what runs."""
        if self.config.device.deterministic:
            routes = self.kernels.routes.items()
            varying = [str(route) for name, route in routes if FIXED in OPS[name].prefer and route.chosen != FIXED]
            if varying:
                raise ConfigError(f"--deterministic: these ops would depend on the batch: {'; '.join(varying)}")
        if not self.config.device.require_route:
            return
        fallbacks = [str(route) for route in self.kernels.routes.values() if route.is_fallback] + self._self_test.lines
        if fallbacks:
            raise ConfigError(f"--require-route: these ops would fall back to their reference: {'; '.join(fallbacks)}")
