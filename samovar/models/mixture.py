"""What families with mixtures of experts share: their fields of config.json, and the block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from samovar.errors import CheckpointError
from samovar.layers import Experts, ExpertStorage, GatedMLP, Router, Routing, SparseMLP
from samovar.models.config import DecoderConfig
from samovar.models.fields import integer, positive
from samovar.models.llama import LlamaBlock

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How config.json files call the number of experts."""


EACH = ExpertStorage()
"""Every expert has linears of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig(DecoderConfig):
    """A decoder some or all of whose layers are mixtures of experts.

    `sparse_layers` says which; `shared_intermediate_size` is the width of the network beside the experts, if any; groups,
    and factors, are those of `layers.Routing`.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    sparse_layers: tuple[int, ...]
    norm_topk_prob: bool = True
    shared_intermediate_size: int | None = None
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0

    @property
    def active_intermediate_size(self) -> int:
        """See `DecoderConfig`. A token's experts keep their inner states and their results: three times this is more."""
        chosen = -(-self.num_experts_per_tok * (self.moe_intermediate_size + self.hidden_size) // 3)
        return max(self.intermediate_size, chosen + (self.shared_intermediate_size or 0))


def with_mixture(raw: Mapping[str, Any], sparse_layers: Iterable[int], default: int | None = None) -> dict[str, Any]:
    """`raw` with the number of experts under its usual name, and the layers that are mixtures. Raises `CheckpointError`
    for a choice that cannot be made, or if the number is not there and has no `default`."""
    values = dict(raw)
    count = next((integer(values, name) for name in EXPERT_COUNTS if values.get(name) is not None), default)
    if count is None:
        raise CheckpointError(f"config.json has none of {', '.join(EXPERT_COUNTS)}, which this architecture needs")
    chosen, groups = integer(values, "num_experts_per_tok"), positive(values, "n_group", 1)
    kept = positive(values, "topk_group", 1)
    if count % groups or kept > groups or chosen > count // groups * kept:
        raise CheckpointError(
            f"config.json: {chosen} experts a token cannot be chosen from {kept} of {groups} groups of {count} experts"
        )
    return {**values, "num_experts": count, "sparse_layers": list(sparse_layers)}


def softmax_routing(c: MixtureConfig) -> Routing:
    """Softmax over all experts; weights of the chosen as they are, or divided by their sum."""
    return Routing(top_k=c.num_experts_per_tok, renormalize=c.norm_topk_prob)


def biased_routing(c: MixtureConfig) -> Routing:
    """DeepSeek V3's: sigmoid scores, a bias that only decides who is chosen, groups of experts."""
    return Routing(
        top_k=c.num_experts_per_tok,
        scoring="sigmoid",
        renormalize=c.norm_topk_prob,
        scale=c.routed_scaling_factor,
        groups=c.n_group,
        top_groups=c.topk_group,
        bias="e_score_correction_bias",
    )


def mixture(
    c: MixtureConfig, routing: Routing, storage: ExpertStorage = EACH, shared: nn.Module | None = None
) -> SparseMLP:
    """Router, experts, and the network beside them: `shared`, or the usual one if the config has a width for it."""
    wide = c.shared_intermediate_size
    if shared is None and wide is not None:
        shared = GatedMLP(c.hidden_size, wide, c.hidden_act)
    return SparseMLP(
        Router(c.hidden_size, c.num_experts, routing),
        Experts(c.hidden_size, c.moe_intermediate_size, c.num_experts, c.hidden_act, storage=storage),
        shared,
    )


class MixtureBlock(LlamaBlock):
    """Pre-norm attention, and experts or in some layers one network for all tokens."""

    def __init__(self, c: MixtureConfig, layer: int) -> None:
        super().__init__(c, layer)
        if layer in c.sparse_layers:
            self.mlp = self.mixture(c)

    def mixture(self, c: MixtureConfig) -> SparseMLP:
        """Softmax over all experts, unless a family says otherwise."""
        return mixture(c, softmax_routing(c))


class BiasedMixtureBlock(MixtureBlock):
    """The same with DeepSeek V3's router."""

    def mixture(self, c: MixtureConfig) -> SparseMLP:
        """See `biased_routing`."""
        return mixture(c, biased_routing(c))
