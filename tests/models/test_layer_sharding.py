"""Tensor parallelism by construction: the ranks' copies partition every checkpoint tensor, for every family."""

from __future__ import annotations

import pytest
import torch

from samovar.errors import ConfigError
from samovar.layers import Layer, QKVLinear, bind
from samovar.models.registry import build
from samovar.parallel.mesh import Axis
from tests.models.family_table import FAMILIES
from tests.models.paged_run import fill, placement
from tests.models.transformers_oracle import oracle


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_every_element_and_agree_on_names(name: str, size: int) -> None:
    """Over all ranks each element is read at least once, equally often within a tensor, and claims are the same."""
    subject = oracle(name)
    # 131 tokens do not divide: widen the vocabulary as a checkpoint that wants to be split must.
    tensors = {
        key: torch.cat((value, value[:1])) if value.shape[:1] == (131,) else value
        for key, value in subject.tensors.items()
    }
    read = {key: torch.zeros(value.shape, dtype=torch.int32) for key, value in tensors.items()}
    claims = []
    for rank in range(size):
        model = build(subject.family.architecture, {**subject.raw, "vocab_size": 132})
        bind(model, placement(tp=Axis(rank, size), max_model_len=subject.family.max_len))
        claims.append(fill(model, tensors))
        for layer in (module for module in model.modules() if isinstance(module, Layer)):
            for source in layer.sources():
                part = read[source.name]
                if source.axis is not None:
                    width = part.shape[source.axis] // source.shard[1]
                    part = part.narrow(source.axis, source.shard[0] * width, width)
                part += 1
        assert all(spec.num_kv_heads >= 1 for spec in model.cache_specs())
    assert all(claim == claims[0] for claim in claims)
    for key in claims[0]:
        low, high = int(read[key].min()), int(read[key].max())
        # Heads of keys and values, and groups of heads that share b and c, are copied where there are more ranks.
        may_copy = any(part in key for part in ("qkv_proj", "mamba.in_proj", "mixer.in_proj", "conv1d"))
        assert low >= 1 and (low == high or may_copy), key


def test_fused_checkpoints_give_each_rank_its_own_heads() -> None:
    """Phi-3's one qkv tensor: rank r gets the same rows as from three separate tensors."""
    whole = torch.arange(8 * 6 + 2 * 6 * 2, dtype=torch.float32)[:, None].expand(-1, 10)
    q, k, v = whole[:48], whole[48:60], whole[60:]
    for size in (1, 2, 4):
        for rank in range(size):
            layer = QKVLinear(10, 8, 2, 6, stored_fused=True)
            layer.path = "qkv_proj"
            layer.bind(placement(tp=Axis(rank, size)))
            assert fill(layer, {"qkv_proj.weight": whole}) == {"qkv_proj.weight"}
            kv = (
                slice(rank * 12 // size, rank * 12 // size + 12 // size)
                if size <= 2
                else slice(rank // 2 * 6, rank // 2 * 6 + 6)
            )
            share = 48 // size
            expected = torch.cat((q[rank * share : (rank + 1) * share], k[kv], v[kv]))
            assert torch.equal(layer.weights["weight"], expected)


def test_sizes_that_do_not_divide_are_refused_with_a_remedy() -> None:
    subject = oracle("llama")
    for size, what in ((3, "vocabulary size is 131"), (2, "vocabulary size is 131")):
        with pytest.raises(ConfigError, match=f"{what}.*--tensor-parallel-size"):
            bind(build("LlamaForCausalLM", subject.raw), placement(tp=Axis(0, size)))
    with pytest.raises(ConfigError, match="number of attention heads is 4"):
        bind(build("LlamaForCausalLM", {**subject.raw, "vocab_size": 132}), placement(tp=Axis(0, 3)))
