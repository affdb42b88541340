"""GenericLM: a decoder of Transformers as the engine sees a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from samovar.errors import CheckpointError
from samovar.layers import ForwardBatch, Layer, Linear, Placement
from samovar.layers.attention import attention_layers
from samovar.models.config import FULL, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import integer
from samovar.models.generic.declare import Declared, declare
from samovar.models.generic.look_over import look_over
from samovar.models.generic.masks import Unsupported
from samovar.models.generic.rope import fix_frequencies, fixed
from samovar.models.generic.split import split


class Buffers(Layer):
    """The tensors of a generic model that are computed and not loaded, such as the frequencies of its rope."""

    def __init__(self, declared: Declared) -> None:
        super().__init__()
        self.declared = (declared,)  # a tuple, so that the model does not become a child
        self.weights: dict[str, torch.Tensor] = {}

    def bind(self, place: Placement) -> None:
        """Have Transformers compute them again, on this placement's device."""
        (declared,) = self.declared
        for module, name in declared.buffers:
            old = module._buffers[name]
            assert old is not None, "only buffers that exist are listed"
            module._buffers[name] = torch.empty_like(old, device=place.device)
        if place.device.type == "meta":
            return
        for module, kinds in declared.ropes:
            module.rope_type = kinds
        for module, model in declared.initializers.items():
            model._init_weights(module)
        for module, kinds in declared.ropes:
            module.rope_type = fixed(kinds)
            fix_frequencies(module, kinds, place.max_model_len, place.device)


def generic_line(architecture: str, model: nn.Module) -> str:
    """What a start says of a generic model."""
    from transformers import __version__

    found = Counter(type(layer).__name__ for layer in model.modules() if isinstance(layer, Layer))
    ours = {"linears": "GenericLinear", "experts": "GenericExperts", "attention layers": "RoutedAttention"}
    counts = ", ".join(f"{found[name]} {words}" for words, name in ours.items() if found[name])
    return (
        f"model: generic path: {architecture} of Transformers {__version__}, with {counts} of ours; layer by layer, "
        "slower than a native family"
    )


class GenericLM(DecoderLM):
    """A model of Transformers with our attention, linears and experts. `causal` is the head, around a stand-in."""

    ignore: ClassVar[tuple[str, ...]] = (".rotary_emb.inv_freq", ".attention.masked_bias", ".attn.masked_bias")

    def __init__(self, architecture: str, raw: Mapping[str, Any]) -> None:
        nn.Module.__init__(self)
        self.architecture = architecture
        try:
            declared = declare(architecture, raw)
            look_over(declared)
            split(declared.body_name, declared.body, declared.causal.config.get_text_config().base_model_tp_plan or {})
        except Unsupported as error:
            raise CheckpointError(f"{architecture} cannot run through Transformers: {error}") from None
        self.step, self.first_position = declared.step, declared.first_position
        self._causal = (declared.causal,)  # a tuple: its children are ours, under the names of the checkpoint
        self.samovar_names = declared.names  # first, because the names of the others depend on it
        for name, child in declared.causal.named_children():
            self.add_module(name, declared.body if name == declared.body_name else child)
        self.trunk = (declared.trunk,)
        self.samovar_buffers = Buffers(declared)
        self.config = self._sizes(declared.causal.config)
        self.notes = (generic_line(architecture, self),)

    def _sizes(self, config: Any) -> DecoderConfig:
        """What the memory plan needs to know."""
        text = config.get_text_config()
        layers = attention_layers(self)
        raw = {name: getattr(text, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        widest = max((sum(m.parts.values()) for m in self.modules() if isinstance(m, Linear)), default=0)
        longest = getattr(text, "max_position_embeddings", None)
        return DecoderConfig(
            vocab_size=integer(raw, "vocab_size"),
            hidden_size=integer(raw, "hidden_size"),
            intermediate_size=widest or integer(raw, "hidden_size"),
            num_hidden_layers=integer(raw, "num_hidden_layers"),
            num_attention_heads=max(layer.heads for layer in layers),
            num_key_value_heads=max(layer.kv_heads for layer in layers),
            head_dim=max(layer.head_dim for layer in layers),
            rms_norm_eps=1e-6,
            max_position_embeddings=longest if isinstance(longest, int) else 2048,
            rope={},
            layer_types=(FULL,) * len(layers),
        )

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states after the final norm, [tokens, hidden]."""
        if not isinstance(batch.token_ids, torch.Tensor):
            raise RuntimeError("the generic path runs layer by layer")
        self.step.batch = batch
        try:
            positions = batch.positions + self.first_position if self.first_position else batch.positions
            given = {"input_ids": batch.token_ids[None], "position_ids": positions[None]}
            hidden: torch.Tensor = self.trunk[0](**given, use_cache=False)[0]
        finally:
            self.step.batch = None
            self.step.turns.clear()
        return hidden[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] -> float32 [rows, vocab], through everything that the model's class does there."""
        logits: torch.Tensor = self._causal[0](inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()
