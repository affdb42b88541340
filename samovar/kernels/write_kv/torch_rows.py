"""Two calls into C++ for a cache whose slots lie one after the other, as they do on a CPU."""

from __future__ import annotations

import torch

from samovar.kernels.write_kv import write_kv


@write_kv.impl("torch_rows", devices=("cpu",))
def write_kv_torch_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Copy rows to slots; codes, a cache in another order, or a row to skip take the reference's longer way."""
    if key_cache.itemsize > 1 and key_cache.is_contiguous() and value_cache.is_contiguous():
        try:
            key_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k.to(key_cache.dtype))
            value_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v.to(value_cache.dtype))
        except IndexError:
            # A negative slot: being told of one costs less than looking for it. All rows are written again.
            pass
        else:
            return
    write_kv.reference(k, v, key_cache, value_cache, slot_mapping, key_scales, value_scales)
