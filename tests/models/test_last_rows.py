"""From the last attention on only the rows that sample are computed; their hidden states and the cache stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from samovar.attention.base import Spans
from samovar.attention.reference import ReferenceAttention
from samovar.layers import ForwardBatch, bind
from samovar.layers.attention import Attention
from samovar.layers.fuse import FusedModel, fuse
from samovar.layers.recurrent import Recurrent
from samovar.models.decoder import DecoderLM
from samovar.models.llama import LlamaForCausalLM
from samovar.weights.load import fill_dummy
from tests.models.family_table import FAMILIES
from tests.models.paged_run import PagedRun
from tests.models.test_fusion import (
    HiddenOnly,
    Made,
    loaded,
    place,
    reads_late,
    reference_kernels,
)
from tests.models.transformers_oracle import oracle, tokens

NAMES = [family.name for family in FAMILIES if not family.has_state]
STATEFUL = [family.name for family in FAMILIES if family.has_state]
CUT, WHOLE = "only rows that sample pass the last layer", "all rows pass the last layer: "


@dataclass
class OnlySampling:
    """Takes the model's place in a `PagedRun`: computes the last rows of the sequences `sampling`; NaN for the rest."""

    model: FusedModel
    sampling: list[int]
    found: torch.Tensor | None = None

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        (spans,) = batch.plans
        assert isinstance(spans, Spans) and self.model.last_rows is not None
        rows = torch.tensor(spans.new_tokens).cumsum(0)[self.sampling] - 1
        totals = [spans.total_tokens[i] for i in self.sampling]
        plans = (Spans([1] * len(totals), totals, spans.block_tables[self.sampling]),) if totals else ()
        self.found = self.model.last_rows(batch, rows, plans)
        full = torch.full((len(batch.token_ids), self.found.shape[1]), torch.nan)
        full[rows] = self.found
        return full

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


Work = list[tuple[int, int, bool]]
"""(stream, new tokens, whether it samples) of each sequence of a step."""
STEPS: list[Work] = [
    [(0, 13, True), (1, 5, False)],  # a whole prompt, and a chunk that ends before its prompt does
    [(1, 7, False)],  # nothing samples
    [(1, 3, True)],  # a chunk with history
    [(0, 1, True), (1, 1, True)],
    [(0, 1, True), (2, 9, False), (3, 6, True), (1, 4, True)],
]


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_sample_are_those_of_the_whole_model(name: str) -> None:
    whole, cut = loaded(name), fuse(model := loaded(name), reference_kernels(torch.float32))
    assert cut.lines[-1] == CUT
    check_rows(name, whole, model, cut)


@pytest.mark.parametrize("name", STATEFUL)
def test_states_see_every_token(name: str) -> None:
    """Where a layer with a state comes after the last attention, nothing is cut; where none does, its rows are right."""
    whole, cut = loaded(name), fuse(model := loaded(name), reference_kernels(torch.float32))
    order = [isinstance(layer, Attention) for layer in model.modules() if isinstance(layer, (Attention, Recurrent))]
    if cut.last_rows is None:
        assert cut.lines[-1].startswith(WHOLE) and not (order[-1] and name.startswith("qwen3"))
    else:
        assert order[-1]
        check_rows(name, whole, model, cut)


def check_rows(name: str, whole: DecoderLM, model: DecoderLM, cut: FusedModel) -> None:
    """Steps of `model`, cut, and of `whole` agree in the rows that sample, and in what they leave behind."""
    runs = [PagedRun(each, ReferenceAttention()) for each in (whole, model)]
    only = OnlySampling(cut, [])
    runs[0].model, runs[1].model = HiddenOnly(whole), only  # type: ignore[assignment]
    streams = [[run.stream(30) for _ in range(4)] for run in runs]
    for seed, work in enumerate(STEPS):
        only.sampling = [i for i, (_, _, samples) in enumerate(work) if samples]
        expected, found = (
            run.step([(of[stream], tokens(new, 10 * seed + stream)) for stream, new, _ in work])
            for run, of in zip(runs, streams, strict=True)
        )
        assert only.found is not None
        assert only.found.shape == (len(only.sampling), oracle(name).raw["hidden_size"])
        for i in only.sampling:
            torch.testing.assert_close(found[i][-1], expected[i][-1], atol=1e-5, rtol=1e-5)
    for layers in zip(*(run.cache.layers for run in runs), strict=True):
        for one, other in zip(*layers, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, equal_nan=True)
    for one, other in zip(*(run.recurrent for run in runs), strict=True):
        for left, right in zip(one.state, other.state, strict=True):
            torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_the_last_layer_multiplies_only_those_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("llama")
    fused, seen = fuse(model, reference_kernels(torch.float32)), list[int]()
    down = model.model.layers[-1].mlp.down_proj
    multiply = down.quant.add_multiply

    def counting(x: torch.Tensor, *args: object) -> None:
        seen.append(len(x))
        multiply(x, *args)

    monkeypatch.setattr(down.quant, "add_multiply", counting)
    run = PagedRun(model, ReferenceAttention())
    only = OnlySampling(fused, [])
    run.model = only  # type: ignore[assignment]
    run.step([(run.stream(9), tokens(9, 1))])
    assert seen == []
    only.sampling = [1]
    run.step([(run.stream(9), tokens(9, 1)), (run.stream(5), tokens(5, 1))])
    assert seen == [1]


class Centred(LlamaForCausalLM):
    """Rows depend on each other at the end."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = super().forward(batch)
        return hidden - hidden.mean(0)


class Shifted(LlamaForCausalLM):
    """The batch is read at the end."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return super().forward(batch) + batch.positions[:, None]


class Unnormed(LlamaForCausalLM):
    """Ends in the stream itself."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, residual = self.model.embed_tokens(batch.token_ids), None
        for block in self.model.layers:
            x, residual = block(x, residual, batch)
        return x + residual


class UnpackedLate(LlamaForCausalLM):
    """What a norm returned lives across the last attention as a pair."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        block, x = self.model.layers[0], self.model.embed_tokens(batch.token_ids)
        pair = block.input_layernorm(x, x)
        y = block.self_attn(pair[-2], batch)
        hidden: torch.Tensor = self.model.norm(y, pair[-1])[0]
        return hidden


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Centred, "mean may need all of them"),
        (Shifted, "getattr_2 may need all of them"),
        (Unnormed, "it does not end in a norm"),
        (UnpackedLate, "forward_1 may have other rows"),
    ],
)
def test_what_needs_all_rows_gets_them_and_says_so(model: type[LlamaForCausalLM], why: str) -> None:
    subject = oracle("llama")
    whole = model(model.read_config({**subject.raw, "num_hidden_layers": 1}))
    bind(whole, place())
    fill_dummy(whole, 3)
    fused = fuse(whole, reference_kernels(torch.float32))
    assert fused.last_rows is None and fused.lines[-1] == WHOLE + why
    run = PagedRun(whole, ReferenceAttention())
    results = []
    forwards: list[Callable[[ForwardBatch], torch.Tensor]] = [whole, fused]
    for forward in forwards:
        run.model = HiddenOnly(forward)  # type: ignore[assignment]
        results += run.step([(run.stream(9), tokens(9, 1))])
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)


def test_without_attention_there_is_nothing_to_cut() -> None:
    made: nn.Module = Made(reads_late)
    bind(made, place())
    fused = fuse(made, reference_kernels(torch.float32))
    assert fused.last_rows is None and fused.lines[-1] == WHOLE + "it has no attention"
