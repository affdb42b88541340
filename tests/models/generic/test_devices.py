"""Two real processes share a generic model over gloo, and give the logits of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.layers import bind
from samovar.layers.attention import attention_layers
from samovar.models.generic.layers import GenericLinear
from samovar.models.generic.model import GenericLM
from samovar.parallel.mesh import Axis
from tests.models.generic.gate import reference_of, tokens
from tests.models.generic.small_configs import small_config
from tests.models.paged_run import PagedRun, fill, placement
from tests.models.transformers_oracle import published

MODELS = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",  # experts
    "GPT2LMHeadModel": "gpt2",  # no plan
    "GPTNeoXForCausalLM": "gpt_neox",  # q, k and v in one tensor, biases
    "DeepseekV3ForCausalLM": "deepseek_v3",  # attention that is not shared
    "Olmo2ForCausalLM": "olmo2",  # norms over all heads
    "GptOssForCausalLM": "gpt_oss",  # sinks
}


def logits_of(architecture: str, axis: Axis) -> torch.Tensor:
    """Logits of a prompt in two chunks on one rank."""
    reference = reference_of(MODELS[architecture], architecture, {"vocab_size": 132})
    model = GenericLM(architecture, reference.config.to_dict())
    bind(model, placement(tp=axis))
    fill(model, published(reference))
    run, ids = PagedRun(model, TorchSdpaAttention()), tokens(23, 60, 132)
    stream = run.stream(23)
    return torch.cat([*run.step([(stream, ids[:9])]), *run.step([(stream, ids[9:])])])


def rank_main(rank: int, size: int, folder: str) -> None:
    """One rank: join the group, run every model, save the logits."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
    torch.set_num_threads(1)
    for architecture in MODELS:
        torch.save(logits_of(architecture, Axis(rank, size)), f"{folder}/{architecture}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    mp.spawn(rank_main, (2, str(tmp_path)), nprocs=2)  # type: ignore[attr-defined]
    for architecture in MODELS:
        expected = logits_of(architecture, Axis())
        for rank in range(2):
            got = torch.load(f"{tmp_path}/{architecture}.{rank}", weights_only=True)
            assert float((got - expected).abs().max()) < 1e-4, (architecture, rank)


@pytest.mark.parametrize(
    ("architecture", "num_split", "is_attention_split"),
    [("LlamaForCausalLM", 7, True), ("GPT2LMHeadModel", 0, False), ("DeepseekV3ForCausalLM", 3, False)],
)
def test_pairs_of_the_plan_are_shared(architecture: str, num_split: int, is_attention_split: bool) -> None:
    """Per layer; DeepSeek's attention takes all heads, its dense networks are shared."""
    model = GenericLM(architecture, small_config(MODELS[architecture], {"vocab_size": 132}).to_dict())
    bind(model, placement(tp=Axis(0, 2)))
    split = [layer for layer in model.modules() if isinstance(layer, GenericLinear) and layer.split is not None]
    assert len(split) == 3 * num_split
    assert {layer.local_heads for layer in attention_layers(model)} == {2 if is_attention_split else 4}
