"""What bitsandbytes says beside each of its weights of four bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from samovar.errors import CheckpointError
from samovar.quant.coding import packed_integers
from samovar.quant.numbers.codebooks import VALUES
from samovar.quant.numbers.packing import unpack_pairs

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


def coded_blocks(
    kind: str, weights: dict[str, torch.Tensor], part_rows: Sequence[int], num_inputs: int
) -> dict[str, torch.Tensor] | None:
    """What `Bnb4.repack` kept, as one packed weight; None for blocks that are not parts of rows, and tables of one's own."""
    codes, scales = [], []
    for part, rows in enumerate(part_rows):
        table = weights[f"map.{part}"]
        known = torch.tensor(VALUES[kind], device=table.device)
        if num_inputs % BLOCK_SIZE or not torch.allclose(table, known, rtol=0, atol=2.0**-16):
            return None
        codes.append(unpack_pairs(weights[f"weight.{part}"], high_first=True).view(rows, num_inputs))
        scales.append(weights[f"absmax.{part}"].view(rows, -1))
    return packed_integers(f"{kind}_{BLOCK_SIZE}", torch.cat(codes), torch.cat(scales), None)
