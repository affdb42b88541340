"""The paged cache's memory: sizes, copies, and pages that cost nothing until they are written."""

from __future__ import annotations

import resource

import pytest
import torch

from samovar.cache.kv_cache import KVCache
from samovar.core.cache_spec import CacheSpec

SPECS = [CacheSpec("full", 2, 8, 2), CacheSpec("sliding", 1, 16, 2, 4)]


def test_shapes_and_bytes_follow_the_specs() -> None:
    cache = KVCache(SPECS, 5, 4, torch.bfloat16)
    assert [tuple(keys.shape) for keys, _ in cache.layers] == [(5, 4, 2, 8), (5, 4, 1, 16)]
    assert cache.nbytes == 5 * 4 * (2 * 2 * 8 * 2 + 2 * 16 * 2)


@pytest.mark.parametrize("is_head_major", [False, True])
def test_copies_read_every_source_first(is_head_major: bool) -> None:
    """A chain (0 -> 1, 1 -> 2) moves both: the second copy must not see the first one's result."""
    cache = KVCache(SPECS, 4, 2, torch.float32, is_head_major=is_head_major)
    for layer in cache.layers:
        for tensor in layer:
            tensor.copy_(torch.randn(tensor.shape))
    before = [[tensor.clone() for tensor in layer] for layer in cache.layers]
    cache.copy_blocks([(0, 1), (1, 2)])
    cache.copy_blocks([])
    for layer, old in zip(cache.layers, before, strict=True):
        for tensor, was in zip(layer, old, strict=True):
            assert torch.equal(tensor, was[[0, 0, 1, 3]])


def test_only_strides_tell_the_layouts_apart() -> None:
    """GPUs keep a block's tokens of one head together, CPUs a token's heads; shapes and sizes are the same."""
    plain, gpu = KVCache(SPECS, 5, 4, torch.float16), KVCache(SPECS, 5, 4, torch.float16, "meta", is_head_major=True)
    assert gpu.nbytes == plain.nbytes
    for (keys, _), (gpu_keys, _) in zip(plain.layers, gpu.layers, strict=True):
        assert gpu_keys.shape == keys.shape and keys.is_contiguous() and gpu_keys.transpose(1, 2).is_contiguous()


def test_untouched_blocks_take_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = KVCache([CacheSpec("full", 8, 128, 4)] * 2, 16384, 16, torch.float32)
    cache.layers[0][0][7].zero_()
    assert cache.nbytes == 4 * 2**30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
