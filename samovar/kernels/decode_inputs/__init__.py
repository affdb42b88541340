"""What a decode step needs to know of its rows, derived on the device from one small upload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op


@op(
    prefer=("triton",),
    mutates=("token_ids", "positions", "slot_mapping", "totals"),
    plain_is_best=("cpu",),
)
def decode_inputs(
    packed: torch.Tensor,
    last_sampled: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    totals: torch.Tensor,
) -> None:
    """Fill the model's inputs for rows of one token each.

    packed int32 [4, rows]: the sequence's slot, the token's position (-1: a padding row), its id (-1: the one that was
    sampled last in that slot), and a fourth row for the sampler. last_sampled [slots] int64; tables int32
    [slots, width]: block ids by slot. Every slot must be a valid index, also that of a padding row.

    Written, all [rows]: token_ids, positions int64 (0 for padding); slot_mapping int64, where the token's keys and
    values go (-1 for padding); totals int32, tokens to attend to, its own included (0 for padding).
    """
    slots, position, given = packed[0].long(), packed[1].long(), packed[2].long()
    is_real = position >= 0
    token = torch.where(given >= 0, given, last_sampled[slots])
    token_ids.copy_(torch.where(is_real, token, 0))
    positions.copy_(position.clamp(min=0))
    block = tables[slots, positions // block_size].long()
    slot_mapping.copy_(torch.where(is_real, block * block_size + positions % block_size, -1))
    totals.copy_(position + 1)


@decode_inputs.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for rows, padding, slots, width in ((4, 1, 6, 5), (1, 0, 2, 3), (150, 30, 200, 4), (0, 0, 2, 3)):
        packed = torch.stack(
            (
                torch.randperm(slots)[:rows],
                torch.randint(0, width * 16, (rows,)),
                torch.randint(0, 1000, (rows,)).where(torch.rand(rows) < 0.5, -1),
                torch.randint(0, 100, (rows,)),
            )
        ).int()
        packed[0, rows - padding :] = slots
        packed[1, rows - padding :] = -1
        tables = torch.randint(0, 1_000_000, (slots + 1, width), dtype=torch.int32)
        written = (torch.full((rows,), 77, dtype=dtype) for dtype in (torch.int64,) * 3 + (torch.int32,))
        yield packed, torch.randint(0, 1000, (slots + 1,)), tables, 16, *written


decode_inputs.tolerance[torch.float32] = (0.0, 0.0)
decode_inputs.tolerance[torch.bfloat16] = (0.0, 0.0)
decode_inputs.tolerance[torch.float16] = (0.0, 0.0)
