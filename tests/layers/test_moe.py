"""Routers and experts as layers: split over ranks both ways, stored in every way, refused in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from samovar.errors import CheckpointError, ConfigError
from samovar.kernels.expert_products import expert_products
from samovar.layers import Experts, ExpertStorage, Router, Routing, SharedGate, bind
from samovar.models.qwen3_moe import Qwen3MoeForCausalLM
from samovar.parallel.mesh import Axis
from samovar.weights.plan import check_coverage
from tests.models.paged_run import fill, placement
from tests.models.transformers_oracle import oracle

HIDDEN, INNER, COUNT = 32, 24, 8
GPT_OSS = ExpertStorage(stacked=True, bare=True, transposed=True, interleaved=True)
STORAGES = {
    "each": ExpertStorage(),
    "stacked": ExpertStorage(stacked=True),
    "bare": ExpertStorage(stacked=True, bare=True),
    "gpt-oss": GPT_OSS,
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def weights() -> dict[str, torch.Tensor]:
    """Gate, up and down of all experts, and biases."""
    return {
        "gate": torch.randn(COUNT, INNER, HIDDEN) / HIDDEN**0.5,
        "up": torch.randn(COUNT, INNER, HIDDEN) / HIDDEN**0.5,
        "down": torch.randn(COUNT, HIDDEN, INNER) / INNER**0.5,
        "gate_bias": torch.randn(COUNT, INNER),
        "up_bias": torch.randn(COUNT, INNER),
        "down_bias": torch.randn(COUNT, HIDDEN),
    }


def stored(name: str, w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a checkpoint in this storage holds."""
    storage = STORAGES[name]
    if not storage.stacked:
        kinds = {"weight": "", "bias": "_bias"}
        return {
            f"experts.{e}.{part}_proj.{kind}": w[part + tail][e]
            for e in range(COUNT)
            for part in ("gate", "up", "down")
            for kind, tail in kinds.items()
        }
    axis = 2 if storage.interleaved else 1
    joined = [torch.stack((w["gate" + t], w["up" + t]), axis).reshape(COUNT, 2 * INNER, -1) for t in ("", "_bias")]
    tensors = {"gate_up_proj": joined[0], "down_proj": w["down"]}
    biases = {"gate_up_proj": joined[1].squeeze(2), "down_proj": w["down_bias"]}
    if storage.transposed:
        tensors = {key: value.transpose(1, 2).contiguous() for key, value in tensors.items()}
    if storage.bare:
        return {f"experts.{key}": value for key, value in tensors.items()} | {
            f"experts.{key}_bias": value for key, value in biases.items()
        }
    return {f"experts.{key}.weight": value for key, value in tensors.items()} | {
        f"experts.{key}.bias": value for key, value in biases.items()
    }


def made(name: str, tensors: dict[str, torch.Tensor], **place: Axis) -> Experts:
    layer = Experts(HIDDEN, INNER, COUNT, bias=True, storage=STORAGES[name])
    layer.path = "experts"
    layer.bind(placement(**place))
    check_coverage([layer], layer.sources())
    assert fill(layer, tensors) == set(tensors)
    return layer


def expected(x: torch.Tensor, routing: torch.Tensor, ids: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    gate_up, bias = torch.cat((w["gate"], w["up"]), 1), torch.cat((w["gate_bias"], w["up_bias"]), 1)
    return expert_products(x, ids, routing, gate_up, w["down"], "silu", bias, w["down_bias"])


def routed(tokens: int = 9, k: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.rand(tokens, COUNT).argsort(-1)[:, :k].int()
    return torch.randn(tokens, HIDDEN), torch.rand(tokens, k), ids


@pytest.mark.parametrize("name", STORAGES)
def test_every_storage_is_read(name: str) -> None:
    w, (x, routing, ids) = weights(), routed()
    layer = made(name, stored(name, w))
    torch.testing.assert_close(layer(x, routing, ids), expected(x, routing, ids, w), atol=1e-5, rtol=1e-5)
    beside = torch.randn(9, HIDDEN)
    torch.testing.assert_close(layer(x, routing, ids, beside), expected(x, routing, ids, w) + beside)
    floats = sum(value.numel() for value in w.values())
    assert layer.resident_bytes() == 4 * floats


@pytest.mark.parametrize("axis", ["tp", "ep"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", STORAGES)
def test_ranks_add_up(name: str, size: int, axis: str) -> None:
    """Whole experts, or a part of each: the sum over ranks is the result, biases counted once."""
    w, (x, routing, ids) = weights(), routed()
    tensors, total = stored(name, w), torch.zeros(9, HIDDEN)
    for rank in range(size):
        layer = made(name, tensors, **{axis: Axis(rank, size)})
        total += layer.project(x, routing, ids)
        assert 4 * sum(w[part].numel() for part in ("gate", "up", "down")) // size < layer.resident_bytes()
    torch.testing.assert_close(total, expected(x, routing, ids, w), atol=1e-5, rtol=1e-5)


def test_experts_that_do_not_divide_are_refused() -> None:
    layer = Experts(HIDDEN, INNER, COUNT)
    with pytest.raises(ConfigError, match="number of experts is 8.*3 devices"):
        layer.bind(placement(ep=Axis(0, 3)))
    with pytest.raises(CheckpointError, match="'relu' .* for experts"):
        Experts(HIDDEN, INNER, COUNT, "relu")


def test_a_router_chooses_by_score_and_bias_and_counts_by_score() -> None:
    layer = Router(HIDDEN, COUNT, Routing(top_k=2, scoring="sigmoid", renormalize=False, bias="choice"))
    layer.path = "gate"
    layer.bind(placement())
    weight, bias = torch.randn(COUNT, HIDDEN), torch.zeros(COUNT)
    bias[5] = 10.0
    assert fill(layer, {"gate.weight": weight, "gate.choice": bias}) == {"gate.weight", "gate.choice"}
    x = torch.randn(6, HIDDEN)
    routing, ids = layer(x)
    scores = torch.sigmoid(x @ weight.t())
    assert ids[:, 0].tolist() == [5] * 6 and routing.dtype == torch.float32
    torch.testing.assert_close(routing[:, 0], scores[:, 5])
    rest = scores.clone()
    rest[:, 5] = -1
    torch.testing.assert_close(routing[:, 1], rest.amax(1))


def test_a_shared_gate_weighs_every_token() -> None:
    layer = SharedGate(HIDDEN)
    layer.path = "gate"
    layer.bind(placement())
    weight, x, y = torch.randn(1, HIDDEN), torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    fill(layer, {"gate.weight": weight})
    torch.testing.assert_close(layer(x, y), torch.sigmoid(x @ weight.t()) * y)


def test_a_model_has_the_same_tensors_with_whole_experts_on_each_rank() -> None:
    """The claims of ranks that hold different experts are equal, and together they read everything."""
    subject = oracle("qwen3-moe")
    claims, read = [], set[str]()
    for rank in range(2):
        model = Qwen3MoeForCausalLM(Qwen3MoeForCausalLM.read_config(subject.raw))
        bind(model, placement(ep=Axis(rank, 2)))
        claims.append(fill(model, subject.tensors))
        read |= {source.name for layer in model.modules() if isinstance(layer, Experts) for source in layer.sources()}
    assert claims[0] == claims[1] == set(subject.tensors)
    assert read == {name for name in subject.tensors if ".experts." in name}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": None, "num_local_experts": 3, "num_experts_per_tok": 4}, "4 experts a token cannot be chosen"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be a positive integer"),
    ],
)
def test_what_cannot_be_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Qwen3MoeForCausalLM.read_config({**oracle("qwen3-moe").raw, **fields})


def test_rows_are_alike_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding anew, as after a kernel was refused, forgets nothing."""
    w, (x, routing, ids) = weights(), routed()
    layer = made("gpt-oss", stored("gpt-oss", w))
    first: Callable[..., torch.Tensor] = layer
    before = first(x, routing, ids)
    layer.bind(replace(placement()))
    fill(layer, stored("gpt-oss", w))
    assert torch.equal(before, layer(x, routing, ids))
