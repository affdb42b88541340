"""MiniMax-M2. Read beside transformers/models/minimax_m2/modeling_minimax_m2.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samovar.layers import SparseMLP
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import integer, num_layers
from samovar.models.mixtral import MIXTRAL_NAMES
from samovar.models.mixture import MixtureBlock, MixtureConfig, biased_routing, mixture, with_mixture
from samovar.models.olmo2 import Olmo2Attention


class MiniMaxM2Block(MixtureBlock):
    """q and k are normed over all heads; experts are chosen by sigmoid scores and a bias."""

    attention = Olmo2Attention

    def mixture(self, c: MixtureConfig) -> SparseMLP:
        """See `MixtureBlock`."""
        return mixture(c, biased_routing(c))


class MiniMaxM2ForCausalLM(DecoderLM):
    """MiniMax-M2."""

    block = MiniMaxM2Block
    config_class = MixtureConfig
    config_defaults = {"head_dim": 128, "num_experts_per_tok": 8}
    renames = {"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias", **MIXTRAL_NAMES}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers are mixtures; older files give the width that is rotated as `rotary_dim`."""
        values = {**cls.config_defaults, **raw}
        if values.get("rotary_dim") is not None:
            values.setdefault("partial_rotary_factor", integer(values, "rotary_dim") / integer(values, "head_dim"))
        values |= {"moe_intermediate_size": values.get("intermediate_size"), "norm_topk_prob": True}
        return super().read_config(with_mixture(values, range(num_layers(values)), 256))
