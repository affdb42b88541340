"""InternLM 3 as it is published: Transformers serves it as a Llama."""

from __future__ import annotations

from transformers import InternLM3Config, LlamaForCausalLM


class InternLM3ForCausalLM(LlamaForCausalLM):
    """A Llama of such a config."""

    config_class = InternLM3Config
