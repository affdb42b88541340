"""Codes, scales and zero points as formats have them -> the tensors of a packed weight."""

from __future__ import annotations

import torch

from samovar.kernels.coded_weights import KINDS, pack_codes, pack_scale

CODES, SCALE, ROW_SCALE, ORDER = "codes", "scale_words", "row_scale", "order"
"""What the packed tensors are called among a layer's weights; of act-order, which input comes at each place."""
Weights = dict[str, torch.Tensor]


def kind_of_integers(group_size: int, num_inputs: int, *, has_zero: bool) -> str | None:
    """The kind of four-bit integers with a scale for `group_size` inputs, -1 for all; None if there is none."""
    end = "_zero" if has_zero else ""
    if group_size == 32:
        return f"int4_32{end}"
    if group_size == -1 or group_size == num_inputs or (group_size > 0 and group_size % 64 == 0):
        return f"int4_64{end}"
    return None


def kind_of_bytes(code: str, group_size: int, num_inputs: int) -> str | None:
    """The kind of eight-bit numbers, "int8" or "e4m3", with a scale for `group_size` inputs; None if there is none."""
    return f"{code}_16" if group_size in (-1, num_inputs) or group_size % 16 == 0 else None


def packed_bytes(kind: str, codes: torch.Tensor, scale: torch.Tensor) -> Weights:
    """Codes uint8 [rows, inputs] and scales [rows, groups] -> what a layer keeps. A row's largest scale is the row's, the
    others become bfloat16 numbers relative to it: rows of one scale, and powers of two, are exact."""
    scale = scale.float()
    most = scale.abs().amax(1, keepdim=True)
    most = torch.where(most == 0, 1.0, most)
    groups = -(-codes.shape[1] // KINDS[kind].group)
    relative = scale / most
    if scale.shape[1] == 1:
        relative = relative.expand(-1, groups)
    else:
        relative = relative.repeat_interleave(-(-groups // scale.shape[1]), 1)[:, :groups]
    words = pack_scale(relative * 2.0 ** KINDS[kind].shift, kind)
    return {CODES: pack_codes(codes, kind), SCALE: words, ROW_SCALE: most[:, 0].contiguous()}


def packed_integers(kind: str, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> Weights:
    """Codes [rows, inputs], scales and zero points [rows, groups] -> what a layer keeps. Scales become bfloat16."""
    if KINDS[kind].group == 64:
        bricks = -(-codes.shape[1] // 64)
        scale = _for_each_brick(scale, bricks)
        zero = None if zero is None else _for_each_brick(zero, bricks)
    row_scale = torch.ones(len(codes), device=codes.device)
    return {CODES: pack_codes(codes, kind), SCALE: pack_scale(scale, kind, zero), ROW_SCALE: row_scale}


def _for_each_brick(groups: torch.Tensor, bricks: int) -> torch.Tensor:
    """[rows, groups] of a multiple of 64 inputs, or of all -> [rows, bricks]."""
    if groups.shape[1] == 1:
        return groups.expand(-1, bricks)
    return groups.repeat_interleave(bricks // groups.shape[1], 1)
