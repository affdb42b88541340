"""What Transformers calls in our name: attention, experts, and masks while a model is looked over."""

from __future__ import annotations

from typing import Any

import torch

from samovar.models.generic.attention import STEP, Step, attend

IMPLEMENTATION = "samovar"
"""Name of `attend` and `run_experts` among the implementations of Transformers."""
LOOK_OVER = "samovar_look_over"
"""Name under which `attend` has masks made, in place of none."""


def run_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function of Transformers, for experts that are none of our layers: x [tokens, hidden], and who computes
    them, each [tokens, top_k] -> [tokens, hidden]."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    step: Step = getattr(module, STEP)
    if step.batch is None:
        return torch.empty_like(hidden_states)
    own = type(module).forward.__wrapped__  # a loop over the experts that have tokens: it looks at numbers
    compute = grouped_mm_experts_forward if hidden_states.device.type == "cuda" else own
    y: torch.Tensor = compute(module, hidden_states, top_k_index, top_k_weights)
    return y


def register() -> None:
    """Make `attend` and `run_experts` known to Transformers. No masks are made for them but while a model is looked over."""
    from transformers.integrations.moe import ExpertsInterface
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionInterface.register(LOOK_OVER, attend)
    AttentionMaskInterface.register(LOOK_OVER, make_mask)
    ExpertsInterface.register(IMPLEMENTATION, run_experts)


def make_mask(*, config: Any, **given: Any) -> torch.Tensor:
    """The mask function of Transformers: lets the model that asks note the mask."""
    step: Step = vars(config)[STEP]
    return step.masks.make(**given)
