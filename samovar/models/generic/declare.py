"""Declare a generic model: Transformers' class on the meta device, its modules exchanged for our layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from samovar.errors import CheckpointError
from samovar.models.generic.attention import STEP, Step
from samovar.models.generic.exchange import Exchange
from samovar.models.generic.held import Held
from samovar.models.generic.interface import IMPLEMENTATION, register
from samovar.models.generic.layers import GenericEmbedding, GenericHead, GenericLinear
from samovar.models.generic.masks import Unsupported
from samovar.models.generic.names import stored_pieces
from samovar.models.generic.naming import Names, Naming
from samovar.models.generic.rope import depends_on_length, fixed
from samovar.models.generic.trunk import take_trunk

NAMED = (GenericLinear, GenericEmbedding, GenericHead, Held)
ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""What `layer_types` may say; all else has state of its own."""


@dataclass(slots=True)
class Declared:
    """Transformers' model with our layers inside."""

    causal: Any
    """The whole class, of which only the head is used after `take_trunk`."""
    body_name: str
    body: nn.Module
    """Everything below the head."""
    trunk: nn.Module
    """What of it is called: all, or its decoder."""
    step: Step
    names: Names = field(init=False)
    buffers: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Buffers that are computed, not loaded."""
    initializers: dict[nn.Module, Any] = field(default_factory=dict)
    """Module with such buffers -> the model of Transformers whose `_init_weights` computes them."""
    first_position: int = 0
    """What the first token's position is called: families that look positions up begin behind that of padding."""
    ropes: list[tuple[Any, Any]] = field(default_factory=list)
    """Ropes whose frequencies depend on the length, and their kinds."""


def declare(architecture: str, raw: Mapping[str, Any]) -> Declared:
    """The model of a config.json. Raises `CheckpointError`, `Unsupported` if the generic path cannot run it."""
    causal = _meta_model(architecture, raw)
    step = Step()
    pieces = stored_pieces(causal)
    Exchange(causal, pieces).apply()
    declared = Declared(causal, *take_trunk(causal), step)
    naming = Naming(f"{declared.body_name}.")
    declared.names = Names(naming, [re.compile(each) for each in causal._keys_to_ignore_on_load_unexpected or ()])
    for module in (*causal.modules(), *declared.body.modules()):
        setattr(module, STEP, step)
        if isinstance(module, NAMED):
            module.naming = naming
        if hasattr(module, "create_position_ids_from_input_ids"):
            declared.first_position = int(module.padding_idx) + 1
    for model, module in (*_with_models(causal, causal), *_with_models(declared.body, causal)):
        names = module._non_persistent_buffers_set
        buffers = [(module, name) for name in sorted(names) if module._buffers.get(name) is not None]
        declared.buffers += buffers
        declared.initializers |= {module: model} if buffers else {}
        if depends_on_length(module):
            declared.ropes.append((module, module.rope_type))
            module.rope_type = fixed(module.rope_type)
    return declared


def _meta_model(architecture: str, raw: Mapping[str, Any]) -> Any:
    """Transformers' model without memory. Only classes of the library itself: never code from a checkpoint."""
    if find_spec("transformers") is None:
        raise CheckpointError(
            f"{architecture} runs through Transformers, which is not installed: pip install 'samovar[generic]'"
        )
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = getattr(transformers, architecture, None)
    if made is None:
        raise CheckpointError(f"Transformers {transformers.__version__} has no {architecture}")
    config_class = CONFIG_MAPPING.get(raw.get("model_type"), made.config_class)
    if made.config_class is not None and not issubclass(config_class, made.config_class):
        config_class = made.config_class
    fields = {name: value for name, value in raw.items() if name != "quantization_config"}
    config = config_class.from_dict(config_class._decode_special_floats(fields))
    config._attn_implementation, config.use_cache = IMPLEMENTATION, False
    config._experts_implementation = IMPLEMENTATION
    register()
    try:
        with torch.device("meta"):
            model = made(config).eval()
    except KeyError as error:
        raise Unsupported(f"it knows no attention called {error}: it does not use Transformers' interface") from None
    _check_class(model)
    # Or every step would look for padding among its ids, and wait for the device. Some configs refuse None.
    object.__setattr__(model.config, "pad_token_id", None)
    return model


def _with_models(module: nn.Module, model: Any) -> Iterator[tuple[Any, nn.Module]]:
    """Every module below, and the innermost model of Transformers that it belongs to."""
    from transformers import PreTrainedModel

    model = module if isinstance(module, PreTrainedModel) else model
    yield model, module
    for child in module.children():
        yield from _with_models(child, model)


def _check_class(model: Any) -> None:
    """Refuse what a model's class says of itself: state beside keys and values, or positions that it counts."""
    text = model.config.get_text_config()
    if model._is_stateful:
        raise Unsupported("some of its layers have recurrent state")
    kinds = set(getattr(text, "layer_types", None) or ()) - ATTENTION_KINDS
    if kinds:
        raise Unsupported(f"it has layers of the kind {', '.join(sorted(map(str, kinds)))}")
    if getattr(text, "is_encoder_decoder", False):
        raise Unsupported("it is an encoder with a decoder")
