"""Integers in groups as packed weights: less their zero points where they are bytes, with the inputs of a group together."""

from __future__ import annotations

import torch

from samovar.quant.coding import ORDER, Weights, packed_bytes, packed_integers
from samovar.quant.grouped import Grouped


def coded_bytes(method: Grouped, kind: str, weights: Weights) -> Weights | None:
    """What `repack` of `method` kept, as bytes packed for the op `coded_linear`; None if it does not fit."""
    codes = _integers(method, weights)
    if codes is None or "g_idx" not in weights:
        return None if codes is None else packed_bytes(kind, codes, weights["scale"])
    order = _places(method, weights["g_idx"])
    return None if order is None else {**packed_bytes(kind, codes[:, order], weights["scale"]), ORDER: order}


def coded_integers(method: Grouped, kind: str, codes: torch.Tensor, weights: Weights) -> Weights | None:
    """Codes of at most four bits [out, in], packed likewise."""
    if "g_idx" not in weights:
        return packed_integers(kind, codes, weights["scale"], weights.get("zero"))
    order = _places(method, weights["g_idx"])
    if order is None:
        return None
    return {**packed_integers(kind, codes[:, order], weights["scale"], weights.get("zero")), ORDER: order}


def _places(method: Grouped, g_idx: torch.Tensor) -> torch.Tensor | None:
    """Which input to put at each place so that groups lie together, int32 [in], from the group of each input [parts, in];
    None where parts differ, or groups are not of equal size."""
    if method.group_size == -1 or bool((g_idx != g_idx[:1]).any()):
        return None
    found = g_idx[0].argsort(stable=True)
    plain = torch.arange(method.num_inputs, device=g_idx.device) // method.group_size
    return found.to(torch.int32) if bool((g_idx[0][found] == plain).all()) else None


def _integers(method: Grouped, weights: Weights) -> torch.Tensor | None:
    """The small numbers less their zero points, as bytes uint8 [out, in] in two's complement; None if they do not fit."""
    pieces = []
    for part, first, count in method.blocks():
        values = method.numbers(weights, first, count)
        if "zero" in weights:
            order = weights["g_idx"][part].long() if "g_idx" in weights else None
            values -= method.spread(weights["zero"][first : first + count].float(), order)
        if bool((values.abs() > 128).any()) or bool((values == 128).any()):
            return None
        pieces.append(values.to(torch.int8).view(torch.uint8))
    return torch.cat(pieces)
