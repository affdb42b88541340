"""The fused model computes what the tree of layers computes, for every family; and no fusion is lost unseen."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from samovar.attention.reference import ReferenceAttention
from samovar.cache.kv_cache import KVCache
from samovar.kernels.linear import linear
from samovar.kernels.op import OPS, Kernels, Target, load_ops
from samovar.layers import (
    AddRMSNorm,
    Embedding,
    ForwardBatch,
    GatedMLP,
    Layer,
    Placement,
    RMSNorm,
    Rope,
    RowLinear,
    bind,
)
from samovar.layers.attention import attach, attention_layers
from samovar.layers.fuse import FusedModel, fuse
from samovar.layers.fusions import RULES
from samovar.models.decoder import DecoderLM
from samovar.models.mixture import MixtureConfig
from samovar.models.registry import build
from samovar.parallel.mesh import Axis
from samovar.quant.base import QuantMethod, TensorSpec
from samovar.weights.load import fill_dummy
from tests.models.family import SMALL
from tests.models.family_table import FAMILIES
from tests.models.paged_run import BLOCK, PagedRun, Stream, fill
from tests.models.transformers_oracle import oracle, tokens

NAMES = [family.name for family in FAMILIES]
VARIANTS = [
    "llama",
    "llama-bias",
    "llama-gelu",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "smollm3",
    "olmo2",
]
"""Families whose blocks differ as the rules see them."""
MIXTURES = ["gpt-oss", "glm4-moe"]
"""More of them, in which rounding may give a token to another expert."""

WITH_SHARED_EXPERTS = (
    *("qwen2-moe", "glm4-moe", "glm4-moe-air", "glm4-moe-lite", "dots1", "solar-open"),
    *("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3-bias", "mistral4", "deepseek-v32", "glm-moe-dsa"),
)
"""Families in which experts are added to a network beside them, and not to the stream."""

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}


def expected_counts(name: str) -> dict[str, int]:
    """How often each rule must hold: everywhere, unless a family's blocks say otherwise."""
    raw, given = oracle(name).raw, oracle(name).family.fused
    if given is not None:
        return {rule.name: given.get(rule.name, 0) for rule in RULES}
    layers = raw["num_hidden_layers"]
    counts = {
        "rope_write_kv": layers,
        "experts_add": 0,
        "linear_add": 2 * layers,
        "norm_gated_linear": layers,
        "norm_linear": layers,
        "add_rms_norm": 0,
    }
    if name.startswith("gemma"):
        # A norm stands between each product and the stream; what joins with the first block's norm is q, k and v.
        counts |= {"linear_add": 0, "norm_linear": 1, "add_rms_norm": layers}
    elif name.startswith("smollm3"):
        counts["rope_write_kv"] = sum(raw["no_rope_layers"])
    elif name.startswith(("olmo2", "flexolmo")):
        # No norm before a product, one norm over all heads; only the last norm adds.
        counts = dict.fromkeys(counts, 0) | {"add_rms_norm": 1}
    elif name.startswith(("granite", "minicpm3")):
        # What is added to the stream is scaled first; one more norm has several readers where there are experts.
        sparse = layers if name == "granitemoe" else 0
        counts |= {"linear_add": 0, "norm_linear": 1, "norm_gated_linear": layers - sparse}
        counts["add_rms_norm"] = layers + sparse
    elif mixtures := mixtures_of(name):
        counts["norm_gated_linear"] -= len(mixtures)
        counts["linear_add"] -= len(mixtures)
        if name.startswith(("olmoe", "minimax")):
            counts["rope_write_kv"] = 0  # one norm over all heads
        if name in WITH_SHARED_EXPERTS:
            counts["add_rms_norm"] = len(mixtures)
            counts["norm_linear"] -= sum(layer < layers - 1 for layer in mixtures)
        else:
            counts["experts_add"] = len(mixtures)
    if "kv_lora_rank" in raw:
        # Latent rows are normed, turned and written by one op as it is. Queries have a norm and a product more, or else the
        # first norm has two readers.
        counts["rope_write_kv"] = 0
        counts["norm_linear"] = counts["norm_linear"] + layers if raw["q_lora_rank"] else 0
    return counts


def mixtures_of(name: str) -> tuple[int, ...]:
    """The layers that have experts."""
    config = build(oracle(name).family.architecture, oracle(name).raw).config
    return config.sparse_layers if isinstance(config, MixtureConfig) else ()


@cache
def reference_kernels(dtype: torch.dtype) -> Kernels:
    """Every op by its reference."""
    load_ops()
    return Kernels(Target("cpu", "", dtype), "cpu", [f"{name}=reference" for name in OPS])


def place(dtype: torch.dtype = torch.float32, **fields: Any) -> Placement:
    """A place on the CPU with reference kernels."""
    values = {"kernels": reference_kernels(dtype), "device": torch.device("cpu"), **fields}
    return Placement(dtype=dtype, **values)


def loaded(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> DecoderLM:
    """The model of a row of the table with its random weights."""
    subject = oracle(name)
    model = build(subject.family.architecture, subject.raw)
    bind(model, place(dtype, max_model_len=subject.family.max_len, **fields))
    fill(model, subject.tensors)
    return model


@dataclass
class HiddenOnly:
    """Takes the model's place in a `PagedRun` and gives its hidden states as the logits."""

    forward: Callable[[ForwardBatch], torch.Tensor]

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        return self.forward(batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Pair:
    """The same steps on the tree and on the fused model, each with a cache of its own."""

    def __init__(self, tree: DecoderLM, fused: DecoderLM, kernels: Kernels, dtype: torch.dtype = torch.float32) -> None:
        self.fused = fuse(fused, kernels)
        self.runs = [PagedRun(model, ReferenceAttention(), cache_dtype=dtype) for model in (tree, fused)]
        for run, forward in zip(self.runs, (tree, self.fused), strict=True):
            run.model = HiddenOnly(forward)  # type: ignore[assignment]
        self.streams: list[list[Stream]] = []

    def start(self, length: int) -> int:
        self.streams.append([run.stream(length) for run in self.runs])
        return len(self.streams) - 1

    def step(self, work: list[tuple[int, list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        """One step on both; hidden states of all rows."""
        tree, fused = (
            torch.cat(run.step([(self.streams[index][side], ids) for index, ids in work]))
            for side, run in enumerate(self.runs)
        )
        return tree, fused

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything both have cached and remember; slots never written hold NaN."""
        tree, fused = (
            torch.cat(
                [t.flatten().float() for layer in [*run.cache.layers, *(r.state for r in run.recurrent)] for t in layer]
            )
            for run in self.runs
        )
        return tree, fused


def pair_of(name: str, dtype: torch.dtype = torch.float32) -> Pair:
    tree, fused = loaded(name, dtype), loaded(name, dtype)
    return Pair(tree, fused, reference_kernels(dtype), dtype)


def every_kind_of_step(pair: Pair) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Prefill of two, a chunk with history, decode, and all of these in one step."""
    a, b, c = pair.start(30), pair.start(30), pair.start(30)
    return [
        pair.step([(a, tokens(13, 0)), (b, tokens(5, 1))]),
        pair.step([(b, tokens(7, 2))]),
        pair.step([(a, tokens(1, 3)), (b, tokens(1, 4))]),
        pair.step([(a, tokens(1, 5)), (c, tokens(9, 6)), (b, tokens(4, 7))]),
        pair.step([(c, tokens(1, 8))]),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_fused_computes_what_the_tree_computes(name: str) -> None:
    pair = pair_of(name)
    for tree, fused in every_kind_of_step(pair):
        assert fused.shape == tree.shape and bool(tree.isfinite().all())
        torch.testing.assert_close(fused, tree, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(*pair.caches(), atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_no_fusion_is_lost(name: str) -> None:
    fused = fuse(model := loaded(name), reference_kernels(torch.float32))
    assert fused.counts == expected_counts(name)
    layers = len(attention_layers(model))
    if layers and "kv_lora_rank" not in oracle(name).raw:
        assert fused.lines[0] == f"fused rope_write_kv: {fused.counts['rope_write_kv']} of {layers} attention layers"
    elif layers:
        assert "only rows that sample pass the last layer" in fused.lines
    assert all(
        any(f"fused {rule}: {count} of " in line for line in fused.lines)
        for rule, count in fused.counts.items()
        if count
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_16_bits_are_as_near_to_float32_as_the_tree_is(name: str, dtype: torch.dtype) -> None:
    """Fused calls round less often, so they may not be farther from the float32 result than a little."""
    exact, rounded = pair_of(name), pair_of(name, dtype)
    for (expected, _), (tree, fused) in zip(every_kind_of_step(exact), every_kind_of_step(rounded), strict=True):
        assert fused.dtype == dtype
        own, size = float((tree - expected).abs().mean()), float(expected.abs().mean())
        assert float((fused - expected).abs().mean()) < 1.3 * own + 1e-3 * size
        assert own < 0.1 * size


def test_chosen_kernels_of_a_cpu_agree_too() -> None:
    """Whatever is chosen beside the references."""
    kernels = Kernels(Target("cpu", "", torch.float32), "cpu")
    for name in VARIANTS:
        pair = Pair(loaded(name, kernels=kernels), loaded(name, kernels=kernels), kernels)
        for tree, fused in every_kind_of_step(pair):
            torch.testing.assert_close(fused, tree, atol=1e-5, rtol=1e-5)


class OnlyMultiplies(QuantMethod):
    """A weight format with no kernels of its own."""

    tensors = (TensorSpec("weight", torch.float32),)

    def multiply(
        self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x W^T + b."""
        return torch.nn.functional.linear(x, weights["weight"], bias)


@pytest.mark.parametrize("name", [*VARIANTS, *MIXTURES])
def test_a_format_without_kernels_is_composed(name: str) -> None:
    """The compositions of `QuantMethod` are what the ops of plain weights do."""
    kernels = reference_kernels(torch.float32)
    composed = loaded(name, quant_for=lambda path: OnlyMultiplies(kernels))
    pair = Pair(loaded(name), composed, kernels)
    for tree, fused in every_kind_of_step(pair):
        torch.testing.assert_close(fused, tree, atol=1e-5, rtol=1e-5)
    assert pair.fused.counts == expected_counts(name)


def test_partial_sums_of_a_split_model_are_not_added_to_the_stream() -> None:
    subject = oracle("llama")
    model = build("LlamaForCausalLM", {**subject.raw, "vocab_size": 132})
    bind(model, place(tp=Axis(0, 2)))
    counts = fuse(model, reference_kernels(torch.float32)).counts
    # The first block's norm reads the embedding; every other norm adds what all ranks have reduced.
    assert counts == {
        "rope_write_kv": 3,
        "experts_add": 0,
        "linear_add": 0,
        "norm_gated_linear": 3,
        "norm_linear": 1,
        "add_rms_norm": 3,
    }


def test_caches_and_weights_are_read_at_every_call() -> None:
    """Another cache, another backend and replaced weights need no new fusion."""
    models = [loaded("gemma3"), loaded("gemma3")]
    fused = fuse(models[1], reference_kernels(torch.float32))
    runs = []
    for model, forward in zip(models, (models[0], fused), strict=True):
        for layer in model.modules():
            if isinstance(layer, Layer):
                for source in layer.sources():
                    source.target.mul_(0.9)
                if isinstance(layer, RMSNorm):
                    layer.weight = layer.weight.float() * 1.1
        run = PagedRun(model, ReferenceAttention())
        run.model = HiddenOnly(forward)  # type: ignore[assignment]
        runs.append(run)
    tree, other = (run.step([(run.stream(9), tokens(9, 1))])[0] for run in runs)
    torch.testing.assert_close(other, tree, atol=1e-5, rtol=1e-5)
    layer = attention_layers(models[1])[0]
    before = layer.cache[0]
    attach(models[1], KVCache(models[1].cache_specs(), 64, BLOCK, torch.float32), runs[1].route)
    runs[1].step([(runs[1].stream(9), tokens(9, 1))])
    assert layer.cache[0] is not before and not torch.equal(layer.cache[0].nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma3-scaled", 2)])
def test_rope_tables_are_made_once_per_step(name: str, kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = loaded(name), list[int]()
    for rope in (layer for layer in model.modules() if isinstance(layer, Rope)):

        def counting(*args: Any, table: Callable[..., Any] = rope.rope_table) -> Any:
            calls.append(1)
            return table(*args)

        monkeypatch.setattr(rope, "rope_table", counting)
    run = PagedRun(model, ReferenceAttention())
    for forward in (model, fuse(model, reference_kernels(torch.float32))):
        run.model = HiddenOnly(forward)  # type: ignore[assignment]
        calls.clear()
        run.step([(run.stream(9), tokens(9, 1))])
        assert len(calls) == kinds


class Branching(nn.Module):
    """Looks at data."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x = batch.token_ids.float()[:, None]
        return x if bool(x.sum() > 0) else -x


class Unpacking(nn.Module):
    """Hands a record on where a stand-in cannot be unpacked."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.stack([*batch.token_ids])[:, None]


@pytest.mark.parametrize("model", [Branching(), Unpacking()], ids=["Branching", "Unpacking"])
def test_a_model_that_cannot_be_traced_runs_as_it_is_and_says_so(model: nn.Module) -> None:
    fused = fuse(model, reference_kernels(torch.float32))
    assert fused.counts == {}
    (line,) = fused.lines
    assert line.startswith(f"nothing is fused, {type(model).__name__} cannot be traced: TraceError: ")
    ids = torch.tensor([1, 2])
    assert torch.equal(fused(ForwardBatch(ids, ids, ids, ())), model(ForwardBatch(ids, ids, ids, ())))


class Made(nn.Module):
    """An embedding, two branches and their norms, put together by `way`."""

    def __init__(self, way: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.embed, self.way = Embedding(20, 16), way
        self.first, self.second = GatedMLP(16, 24), GatedMLP(16, 24)
        self.proj = RowLinear(16, 16)
        self.norms = nn.ModuleList([AddRMSNorm(16, 1e-6), RMSNorm(16, 1e-6), AddRMSNorm(16, 1e-6)])

    def forward(self, batch: ForwardBatch) -> Any:
        return self.way(self, self.embed(batch.token_ids), None)


def reads_late(m: Made, x: Any, residual: Any) -> Any:
    """The stream is normed, written, and only then is the norm used."""
    x, residual = m.norms[0](x, residual)
    early = m.norms[1](residual)
    x, residual = m.norms[2](m.first(x), residual)
    return m.second(early) + x


def reads_afterwards(m: Made, x: Any, residual: Any) -> Any:
    """The old stream is normed once more after the add."""
    x, old = m.norms[0](x, residual)
    x, residual = m.norms[2](m.first(x), old)
    return m.second(m.norms[1](old)) + x


def norms_for_two(m: Made, x: Any, residual: Any) -> Any:
    """Two branches read one norm, which is computed once."""
    x, residual = m.norms[0](x, residual)
    x, residual = m.norms[2](m.first(x) + m.second(x), residual)
    return x


def keeps_the_stream(m: Made, x: Any, residual: Any) -> Any:
    """The old stream is used after the add."""
    x, old = m.norms[0](x, residual)
    x, residual = m.norms[2](m.first(x), old)
    return x + old + residual


def adds_to_itself(m: Made, x: Any, residual: Any) -> Any:
    """The product reads the very stream that it is added to."""
    x, residual = m.norms[0](x, residual)
    y, residual = m.norms[2](m.proj(residual), residual)
    return m.second(y) + x


def uses_a_product_twice(m: Made, x: Any, residual: Any) -> Any:
    """What is added is needed elsewhere, too."""
    x, residual = m.norms[0](x, residual)
    y = m.first(x)
    z, residual = m.norms[2](y, residual)
    return z + y


def hands_the_pair_on(m: Made, x: Any, residual: Any) -> Any:
    """The pair of a norm is returned whole."""
    return m.norms[0](m.first(x), x)[0] + sum_of(m.norms[2](m.second(x), x))


def sum_of(pair: Any) -> Any:
    return pair[0] + pair[1]


def views_the_stream(m: Made, x: Any, residual: Any) -> Any:
    """A view of the old stream lives on."""
    x, residual = m.norms[0](x, residual)
    view = residual.view(-1, 4, 4)
    x, residual = m.norms[2](m.first(x), residual)
    return x + view.flatten(1)


@pytest.mark.parametrize(
    ("way", "adds", "gated"),
    [
        (reads_late, 1, 1),
        (reads_afterwards, 0, 2),
        (norms_for_two, 0, 0),
        (keeps_the_stream, 0, 1),
        (adds_to_itself, 0, 1),
        (uses_a_product_twice, 0, 1),
        (hands_the_pair_on, 0, 0),
        (views_the_stream, 0, 1),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_would_change_the_result_is_left(way: Callable[[Any, Any, Any], Any], adds: int, gated: int) -> None:
    """Writing in place, and moving a read over a write, are only done where nobody can tell."""
    model = Made(way)
    bind(model, place())
    fill_dummy(model, 3)
    fused = fuse(model, reference_kernels(torch.float32))
    ids = torch.tensor([3, 1, 4])
    batch = ForwardBatch(ids, ids, ids, ())
    torch.testing.assert_close(fused(batch), model(batch), atol=1e-5, rtol=1e-5)
    assert (fused.counts["linear_add"], fused.counts["norm_gated_linear"]) == (adds, gated)


def test_the_embedding_is_not_written_to() -> None:
    """The stream begins as a copy of rows of the embedding."""
    model = loaded("llama-tied")
    before = model.model.embed_tokens.weight.clone()
    run = PagedRun(model, ReferenceAttention())
    run.model = HiddenOnly(fuse(model, reference_kernels(torch.float32)))  # type: ignore[assignment]
    run.step([(run.stream(9), tokens(9, 1))])
    assert torch.equal(model.model.embed_tokens.weight, before)


def test_the_head_of_a_cpu_is_the_linear_of_a_cpu() -> None:
    """Float32 logits cost one conversion beside the product that is fastest here, and have its very values."""
    kernels = Kernels(Target("cpu", "", torch.bfloat16), "cpu")
    model = loaded("llama", torch.bfloat16, kernels=kernels)
    assert kernels.routes["logits"].chosen == kernels.routes["linear"].chosen == "torch_column"
    for rows in (1, 5):
        hidden = torch.randn(rows, 64).bfloat16()
        expected = kernels.use(linear)(hidden, model.lm_head.weight).float()
        assert torch.equal(model.logits(hidden), expected)


class Shapes:
    """Attention as shapes alone."""

    def run(self, q: torch.Tensor, cache: Any, plan: Any, call: Any, sinks: Any = None) -> torch.Tensor:
        return torch.empty_like(q)


def bound_to_nothing(architecture: str, raw: dict[str, Any], kernels: Kernels) -> tuple[DecoderLM, FusedModel]:
    """A model without memory, loaded so to say, with a cache of 64 blocks."""
    model = build(architecture, raw)
    bind(model, replace(place(torch.bfloat16), kernels=kernels, device=torch.device("meta")))
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.after_load()
    cache = KVCache(model.cache_specs(), 64, 16, torch.bfloat16, "meta")
    for attention, tensors in zip(attention_layers(model), cache.layers, strict=True):
        attention.attach(Shapes(), tensors, 0)  # type: ignore[arg-type]
    return model, fuse(model, kernels)


def test_a_trace_is_quick() -> None:
    kernels = reference_kernels(torch.bfloat16)
    model, _ = bound_to_nothing("LlamaForCausalLM", LLAMA_8B, kernels)
    start = time.process_time()
    fused = fuse(model, kernels)
    assert time.process_time() - start < 1.0
    assert fused.counts["linear_add"] == 64


def pass_over_meta() -> dict[str, list[str]]:
    """For three families: names of the kernels that a pass without memory notes, with nothing left for torch's data."""
    os.environ.pop("TRITON_INTERPRET", None)  # Nothing runs here: the kernels are those that a device would compile.
    from samovar.kernels.triton_launch import noting

    found = {}
    for architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"):
        kernels = Kernels(Target("cuda", "sm_90", torch.bfloat16), "meta")
        raw = {**SMALL, "rms_norm_eps": 1e-6, "head_dim": 64, "hidden_size": 256, "sliding_window": 64}
        model, fused = bound_to_nothing(architecture, raw, kernels)
        names: set[str] = set()
        for rows in (1, 2, 33, 300):
            ids = torch.empty(rows, dtype=torch.int64, device="meta")
            with torch.inference_mode(), noting() as notes:
                hidden = fused(ForwardBatch(ids, ids, ids, (None,)))  # type: ignore[arg-type]
                logits = model.logits(hidden)
            assert hidden.device.type == "meta" and hidden.shape == (rows, 256)
            assert logits.dtype == torch.float32 and logits.shape == (rows, 131)
            names |= {launch.kernel.__name__ for launch in notes.launches.values()}
        found[architecture] = sorted(names)
    return found


def test_a_pass_without_memory_notes_every_kernel() -> None:
    """What compiles ahead sees the kernels that the device will run. In a process of its own: it imports Triton's
    implementations, which the others here must not see."""
    pytest.importorskip("triton")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        found = process.submit(pass_over_meta).result()
    for names in found.values():
        assert {"rope_write_kv_kernel", "rope_table_kernel", "rms_norm_kernel"} <= set(names)
    assert "add_rms_norm_kernel" in found["Gemma3ForCausalLM"]
    assert "add_rms_norm_kernel" not in found["LlamaForCausalLM"]
