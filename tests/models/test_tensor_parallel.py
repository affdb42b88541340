"""Two real processes over gloo give the logits of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.parallel.mesh import Axis
from tests.models.paged_run import PagedRun, load
from tests.models.transformers_oracle import oracle, tokens

pytestmark = pytest.mark.slow
FAMILIES = ["llama", "llama-bias", "llama-tied", "qwen3", "gemma3", "phi3", "olmo2", "qwen3-moe", "gpt-oss", "glm4-moe"]
FAMILIES += [
    "lfm2-moe",
    "mamba2",
    "granite4",
    "bamba",
    "nemotron-h-moe",
    "falcon-h1",
    "falcon-h1-plain",
    "mamba",
    "jamba",
]
FAMILIES += ["deepseek-v2-lite", "deepseek-v3", "mistral4"]
FAMILIES += ["gemma4", "gemma4-equal", "gemma3n", "cohere-norms", "stablelm", "ernie4-5-moe", "glm", "llama4", "phimoe"]


def rank_main(rank: int, size: int, folder: str) -> None:
    """One rank: join the group, run every family in two chunks, save the logits."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
    torch.set_num_threads(1)
    for name in FAMILIES:
        torch.save(logits_of(name, Axis(rank, size)), f"{folder}/{name}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def logits_of(name: str, axis: Axis) -> torch.Tensor:
    """Logits of a prompt in two chunks on this rank."""
    subject = oracle(name)
    tensors = {k: torch.cat((v, v[:1])) if v.shape[:1] == (131,) else v for k, v in subject.tensors.items()}
    raw = {**subject.raw, "vocab_size": 132}
    run = PagedRun(load(subject.family.architecture, raw, tensors, tp=axis), TorchSdpaAttention())
    ids, stream = tokens(23, 60), run.stream(23)
    return torch.cat([*run.step([(stream, ids[:9])]), *run.step([(stream, ids[9:])])])


def test_two_ranks_give_the_logits_of_one(tmp_path: Path) -> None:
    mp.spawn(rank_main, (2, str(tmp_path)), nprocs=2)  # type: ignore[attr-defined]
    for name in FAMILIES:
        expected = logits_of(name, Axis())
        assert float((expected[:, :131] - oracle(name).logits(tokens(23, 60))).abs().max()) < 1e-4
        for rank in range(2):
            got = torch.load(f"{tmp_path}/{name}.{rank}", weights_only=True)
            assert float((got - expected).abs().max()) < 1e-4, (name, rank)
