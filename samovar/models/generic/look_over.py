"""The look-over: two passes of a declared model on tensors without numbers.

They find the attention layers and what each sees, and code that looks at a number: that could not be captured in a graph,
and would make the host wait for the device in every step.
"""

from __future__ import annotations

import torch

from samovar.models.generic.attention import STEP
from samovar.models.generic.declare import Declared
from samovar.models.generic.interface import IMPLEMENTATION, LOOK_OVER
from samovar.models.generic.masks import Masks, Unsupported

LOOKS_AT_NUMBERS = (RuntimeError, NotImplementedError, TypeError, AttributeError, KeyError, ValueError, IndexError)
"""What code raises that wants to know what is in a tensor, or that misses what it usually gets."""
EXAMPLE_TOKENS = 5
"""Length of the example that a model is looked over with."""


def look_over(declared: Declared) -> None:
    """Find the attention layers and what each sees, with two passes on tensors without numbers: one in which masks are
    made, and one as steps will be."""
    ids = torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.int64, device="meta")
    step, config = declared.step, declared.causal.config
    step.chunk = getattr(config.get_text_config(), "attention_chunk_size", None)
    for each in {id(c): c for m in declared.body.modules() if (c := getattr(m, "config", None)) is not None}.values():
        setattr(each, STEP, step)
    setattr(config, STEP, step)
    try:
        with torch.inference_mode():
            config._attn_implementation = LOOK_OVER
            hidden = declared.trunk(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)[0]
            config._attn_implementation = IMPLEMENTATION
            found, step.turns, step.masks = dict(step.turns), {}, Masks()
            declared.trunk(input_ids=ids, position_ids=ids, use_cache=False)
            declared.causal(inputs_embeds=hidden, use_cache=False)
    except LOOKS_AT_NUMBERS as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise Unsupported(f"its code does not run without numbers: {said}") from error
    if not found:
        raise Unsupported("none of its layers attends through Transformers' attention interface")
    if found != step.turns:
        raise Unsupported("its layers attend differently with positions that are given")
    step.turns.clear()
