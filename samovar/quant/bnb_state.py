"""What bitsandbytes says beside each of its weights of four bits."""

from __future__ import annotations

import json
from typing import Any

import torch

from samovar.errors import CheckpointError

BLOCK_SIZE, NESTED_BLOCK_SIZE = 64, 256


def described(raw: torch.Tensor, name: str) -> dict[str, Any]:
    """The description of the linear `name`, which is bytes of JSON; `CheckpointError` if it is not as expected."""
    try:
        state: dict[str, Any] = json.loads(bytes(raw.tolist()))
    except ValueError as error:
        raise CheckpointError(f"{name}: its quant_state is not JSON: {error}") from None
    sizes = (state.get("blocksize"), state.get("nested_blocksize", NESTED_BLOCK_SIZE))
    if sizes != (BLOCK_SIZE, NESTED_BLOCK_SIZE):
        raise CheckpointError(f"{name}: bitsandbytes blocks of {sizes} are not supported, only of 64 and 256")
    return state


def made_up(length: int) -> torch.Tensor:
    """A description in `length` bytes, for weights of no meaning."""
    state = {"blocksize": BLOCK_SIZE, "nested_blocksize": NESTED_BLOCK_SIZE, "nested_offset": 2.0**-5}
    return torch.tensor(list(json.dumps(state).encode().ljust(length)), dtype=torch.uint8)
