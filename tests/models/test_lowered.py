"""Every family as one list of instructions, against Transformers: whole, chunked, mixed, and last rows only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.layers import ForwardBatch, bind
from samovar.layers.lower import CannotLower, lower
from samovar.models.decoder import DecoderLM
from samovar.models.llama import LlamaBlock
from samovar.models.registry import build
from samovar.native.abi import Op
from samovar.native.team import Team
from tests.models.family import Family
from tests.models.family_table import FAMILIES
from tests.models.native_run import NativeRun, load_packed, team_or_skip
from tests.models.paged_run import PagedRun, placement
from tests.models.transformers_oracle import Oracle, oracle, tokens

NAMES = [family.name for family in FAMILIES if not family.unlowered]
TOLERANCE = 1e-4
"""The same as for layers that run one by one: float32 sums in another order."""


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with team_or_skip() as made:
        yield made


@pytest.fixture(params=NAMES)
def subject(request: pytest.FixtureRequest) -> Oracle:
    return oracle(request.param)


def native(subject: Oracle, team: Team) -> NativeRun:
    family = subject.family
    model = load_packed(family.architecture, subject.raw, subject.tensors, team, max_model_len=family.max_len)
    return NativeRun(model, team)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == torch.float32
    assert float((got - expected).abs().max()) < TOLERANCE
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def sizes(subject: Oracle) -> tuple[int, int, int]:
    """As in `test_families`: beyond the trained length where frequencies depend on the length."""
    return (41, 38, 33) if subject.family.max_len == 41 else (41, 18, 9)


def test_chunks_and_decodes_in_mixed_batches_match(subject: Oracle, team: Team) -> None:
    """Whole prompts, chunks of every kind beside decoding sequences, blocks out of order, a cache poisoned with NaN; then
    the same steps for their last rows only, of some of the sequences."""
    whole = [tokens(size, 10 + i) for i, size in enumerate(sizes(subject))]
    expected = [subject.logits(ids) for ids in whole]
    cuts = [{0: 13, 1: 5}, {0: 14, 1: 6, 2: 7}, {1: 7, 0: 31, 2: len(whole[2]) - 1}]
    cuts.append({2: len(whole[2]), 1: len(whole[1]), 0: len(whole[0])})
    for only_last in (False, True):
        run = native(subject, team)
        streams = [run.stream(len(ids)) for ids in whole]
        for step in cuts:
            begins = {i: len(streams[i].ids) for i in step}
            work = [(streams[i], whole[i][begins[i] : end]) for i, end in step.items()]
            if only_last:
                wanted = list(range(len(step)))[::2]
                rows = [expected[i][end - 1] for n, (i, end) in enumerate(step.items()) if n in wanted]
                close(run.last(work, wanted), torch.stack(rows))
            else:
                for i, logits in zip(step, run.step(work), strict=True):
                    close(logits, expected[i][begins[i] : step[i]])


def test_decoding_gives_the_most_likely_ids(subject: Oracle, team: Team) -> None:
    """Two sequences side by side, one token a step, through the program that ends in an argmax."""
    run, prompts = native(subject, team), [tokens(size, 30 + i) for i, size in enumerate(sizes(subject)[1:])]
    streams = [run.stream(len(ids)) for ids in prompts]
    run.load([(stream, ids[:-3]) for stream, ids in zip(streams, prompts, strict=True)])
    run.native.most_likely("last")
    for at in (-3, -2, -1):
        run.load([(stream, [ids[at]]) for stream, ids in zip(streams, prompts, strict=True)])
        found = run.native.most_likely("every").tolist()
        assert found == [int(subject.logits(ids)[at].argmax()) for ids in prompts]


def test_a_layer_is_five_instructions() -> None:
    """And one more makes the rope tables of all of them: nothing of a Llama is left to its parts."""
    body = lower(_bound("llama"))
    kinds = [instruction.op for instruction in body.every.instructions]
    layer = [Op.LINEAR, Op.ROPE_WRITE, Op.ATTENTION, Op.LINEAR, Op.GATED_LINEAR, Op.LINEAR]
    assert [kind for kind in kinds if kind not in (Op.ROPE_TABLE, Op.EMBED)] == 3 * layer
    assert kinds.count(Op.ROPE_TABLE) == kinds.count(Op.EMBED) == 1


class Doubling(LlamaBlock):
    """A block that does what no instruction does."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = super().forward(x, residual, batch)
        return x * 2, residual


class DoublingLM(DecoderLM):
    """A family that cannot be lowered."""

    block = Doubling


def test_what_has_no_instruction_is_named() -> None:
    model = DoublingLM(DoublingLM.read_config({**oracle("llama").raw}))
    with pytest.raises(CannotLower, match="mul"):
        lower(_bind(model))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.unlowered], ids=lambda each: each.name)
def test_what_cannot_be_lowered_runs_layer_by_layer_on_the_library(family: Family, team: Team) -> None:
    """Mixtures of experts, with every expert's weights packed; and the reason is told."""
    subject = oracle(family.name)
    model = load_packed(family.architecture, subject.raw, subject.tensors, team, max_model_len=family.max_len)
    with pytest.raises(CannotLower, match=family.unlowered):
        lower(model)
    run, ids = PagedRun(model, TorchSdpaAttention()), tokens(18, 70)
    stream = run.stream(18)
    close(torch.cat([*run.step([(stream, ids[:11])]), *run.step([(stream, ids[11:])])]), subject.logits(ids))


def test_weights_of_another_kind_are_named() -> None:
    family = oracle("llama").family
    model = build(family.architecture, oracle("llama").raw)
    bind(model, placement())
    with pytest.raises(CannotLower, match=r"model.embed_tokens has weights of another kind \(Unquantized\)"):
        lower(model)


def _bound(name: str) -> nn.Module:
    return _bind(build(oracle(name).family.architecture, oracle(name).raw))


def _bind(model: DecoderLM) -> DecoderLM:
    from samovar.kernels.op import Kernels, Target
    from samovar.quant.formats import PLAIN
    from samovar.quant.packed import Packed
    from samovar.quant.products import Products

    def no_team() -> Team:
        raise AssertionError("nothing is computed")

    kernels = Kernels(Target("cpu", "", torch.float32), "cpu")
    packed = Packed(PLAIN[torch.float32], Products(no_team), kernels)
    bind(model, placement(quant_for=lambda path: packed))
    return model
