"""Transformers in float32, eager attention: what every family is compared with."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tests.models.family import Family
from tests.models.family_table import FAMILIES

BY_NAME = {family.name: family for family in FAMILIES}


@dataclass(frozen=True, eq=False)
class Oracle:
    """A random model of one row of the table, with the config.json it would be saved with."""

    family: Family
    model: Any
    raw: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits [tokens, vocab] of a whole sequence at once."""
        with torch.inference_mode():
            is_broken = self.family.architecture == "Llama4ForConditionalGeneration"  # without images, in 5.24
            model = self.model.language_model if is_broken else self.model
            found: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
        return found


@cache
def oracle(name: str) -> Oracle:
    """The model of a row."""
    return oracle_of(BY_NAME[name])


def oracle_of(family: Family) -> Oracle:
    """A model with every parameter random: norms and biases too, so that none can be forgotten unseen."""
    made = getattr(importlib.import_module(family.reference), family.architecture)
    given = {**family.raw, "eos_token_id": None, "bos_token_id": None}
    config = made.config_class(**(given if family.outer is None else {"text_config": given, **family.outer}))
    config._attn_implementation = "eager"
    model = made(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                has_offset = family.architecture.startswith(("Gemma", "Qwen3Next", "Qwen3_5"))
                around_one = "norm" in path and "bias" not in path and (not has_offset or "linear_attn" in path)
                parameter.copy_(noise * 0.15 + float(around_one))
            elif path.endswith("e_score_correction_bias"):
                parameter.copy_(noise * 0.05)
            elif path.endswith(("A_log", "conv.weight", "conv1d.weight")):
                parameter.copy_(noise * 0.5)
            else:
                parameter.copy_(noise * 1.2 * parameter.shape[-1] ** -0.5)
        for path, buffer in model.named_buffers():
            if path.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.05)
            elif path.endswith("layer_scalar"):
                buffer.copy_(1 + torch.randn(buffer.shape, generator=generator) * 0.1)
    raw = config.to_dict()
    return Oracle(family, model, raw if family.outer is None else raw["text_config"], published(model))


def published(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: of mixtures each expert's, as Transformers writes them back."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if not hasattr(model, "save_pretrained"):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    written: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return written


def tokens(count: int, seed: int) -> list[int]:
    """Random ids inside the table's vocabulary."""
    return torch.randint(0, 131, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
