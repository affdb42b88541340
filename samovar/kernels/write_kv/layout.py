"""How one layer's rows and their scales lie in memory."""

from __future__ import annotations

import torch

from samovar.core.cache_spec import CacheSpec, RowFormat

SCALE_TYPES = {4: torch.float32, 2: torch.float16}
"""By `RowFormat.scale_bytes`."""
SCALE_ALIGNMENT = 4
"""Of scales, in bytes."""


def layer_cache(
    spec: CacheSpec, blocks: tuple[int, int], dtype: torch.dtype, device: torch.device | str, is_head_major: bool
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """(what to copy when a block is copied, the tensors of the layer's cache) for `blocks`: how many, and their size.

    The memory is not touched. `is_head_major`: a block's tokens of one head lie together, not a token's heads. Scales of
    rows stand behind the rows of their block and head, or, token by token, each behind its row. A latent layer has one
    tensor.
    """
    num_blocks, size = blocks
    if spec.kind == "latent":
        rows = torch.empty((num_blocks, size, spec.num_kv_heads, spec.head_dim), dtype=dtype, device=device)
        return [rows], (rows,)
    if not spec.has_row_scales:
        tokens_and_heads = (spec.num_kv_heads, size) if is_head_major else (size, spec.num_kv_heads)
        shape = (num_blocks, *tokens_and_heads, spec.head_dim)
        plain = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]
        return plain, tuple(rows.transpose(1, 2) if is_head_major else rows for rows in plain)
    # Packed rows are of any size: behind such a row a scale would not be aligned.
    is_apart = is_head_major or spec.packed is not None or spec.head_dim % SCALE_ALIGNMENT > 0
    made = [_scaled_rows(spec, form, blocks, device, is_apart) for form in spec.formats]
    memory, codes, scales = (list(tensors) for tensors in zip(*made, strict=True))
    return memory, (*codes, *scales)


def _scaled_rows(
    spec: CacheSpec, form: RowFormat, blocks: tuple[int, int], device: torch.device | str, is_apart: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(memory, codes [num_blocks, size, kv_heads, bytes], scales [num_blocks, size, kv_heads]); the last two are views.
    `is_apart`: head by head, scales behind all rows."""
    (num_blocks, size), heads = blocks, spec.num_kv_heads
    code, scale = form.code_bytes(spec.head_dim), form.scale_bytes
    row, block = code + scale, heads * size * (code + scale)
    memory = torch.empty((num_blocks, block), dtype=torch.uint8, device=device)
    if is_apart:
        (token, head), (scale_token, scale_head), first = (code, size * row), (scale, size * row), size * code
    else:
        (token, head), (scale_token, scale_head), first = (heads * row, row), (heads * row, row), code
    codes = memory.view(torch.int8 if form.bits == 8 else torch.uint8)
    scales = memory.view(SCALE_TYPES[scale])
    strides = tuple(stride // scale for stride in (block, scale_token, scale_head))
    return (
        memory,
        codes.as_strided((num_blocks, size, heads, code), (block, token, head, 1)),
        scales.as_strided((num_blocks, size, heads), strides, first // scale),
    )
