"""Latent attention: both ways against float64, checkpoints as they are published, the cache's size, whole engines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar import LLM, SamplingParams
from samovar.attention import torch_sdpa
from samovar.attention.base import AttentionCall
from samovar.attention.latent import attend_chunk, attend_each, expands
from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig
from samovar.core.cache_spec import LatentDims
from samovar.errors import CheckpointError, ConfigError
from samovar.layers import bind
from samovar.layers.latent_attention import Expansion
from samovar.models.decoder import DecoderLM
from samovar.models.registry import build
from samovar.quant.select import select
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.load import load_weights
from tests.models.paged_run import PagedRun, load, placement
from tests.models.transformers_oracle import oracle, oracle_of, tokens

DIMS = LatentDims(rank=24, rope=8, nope=12, value=10)
CALL = AttentionCall(DIMS.query**-0.5, latent=DIMS)
REAL = LatentDims(rank=512, rope=64, nope=128, value=128)


def exact(q: torch.Tensor, rows: torch.Tensor, expansion: torch.Tensor) -> torch.Tensor:
    """The definition in float64: every head's keys and values made, causal softmax."""
    q, rows, expansion = q.double(), rows.double(), expansion.double()
    made = torch.einsum("kr,hdr->khd", rows[:, : DIMS.rank], expansion)
    turned = rows[:, None, DIMS.rank :].expand(-1, q.shape[1], -1)
    k, v = torch.cat((made[..., : DIMS.nope], turned), -1), made[..., DIMS.nope :]
    scores = torch.einsum("qhd,khd->hqk", q, k) * CALL.scale
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(rows) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def random(new: int, total: int, heads: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, rows, expansion."""
    torch.manual_seed(new)
    expansion = torch.randn(heads, DIMS.nope + DIMS.value, DIMS.rank) * DIMS.rank**-0.5
    return torch.randn(new, heads, DIMS.query), torch.randn(total, DIMS.row), expansion


@pytest.mark.parametrize("sizes", [(1, 1), (1, 40), (7, 7), (9, 50), (60, 60)])
@pytest.mark.parametrize("scores", [1 << 20, 300], ids=("whole", "tiles"))
def test_both_ways_are_exact(sizes: tuple[int, int], scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are near one, and sums have fewer than 100 terms: float32 keeps five digits."""
    monkeypatch.setattr("samovar.attention.latent.LATENT_SCORES", scores)
    q, rows, expansion = random(*sizes)
    for expand in (False, True):
        got = attend_chunk(q, rows, expansion, CALL, expand=expand)
        torch.testing.assert_close(got.double(), exact(q, rows, expansion), atol=1e-5, rtol=1e-5)


def test_single_queries_of_several_sequences() -> None:
    sequences = [random(1, total) for total in (13, 40, 1)]
    expansion = sequences[0][2]
    rows, hidden = torch.full((3, 40, DIMS.row), 1e3), torch.ones((3, 1, 1, 40), dtype=torch.bool)
    for i, (_, own, _) in enumerate(sequences):
        rows[i, : len(own)], hidden[i, ..., : len(own)] = own, False
    got = attend_each(torch.cat([q for q, _, _ in sequences]), rows, expansion, hidden, CALL)
    expected = torch.cat([exact(q, own, expansion) for q, own, _ in sequences])
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_cheaper_way_is_taken() -> None:
    """Prompts are expanded, decoding and short chunks behind long histories are not; near the border costs are close."""
    assert expands(64, 64, REAL) and expands(4096, 65536, REAL)
    assert not any(expands(new, 30_000, REAL) for new in (1, 16, 128))
    border = next(new for new in range(1, 1000) if expands(new, 30_000, REAL))
    assert 150 < border < 200  # 131,072 products a key are won back at 768 a pair


@pytest.mark.parametrize("expand", [False, True])
def test_a_model_gives_the_same_either_way(expand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = oracle("deepseek-v3")
    monkeypatch.setattr(torch_sdpa, "expands", lambda new, total, dims: expand)
    run = PagedRun(load(subject.family.architecture, subject.raw, subject.tensors), torch_sdpa.TorchSdpaAttention())
    ids, stream = tokens(40, 3), run.stream(40)
    got = torch.cat(
        [*run.step([(stream, ids[:17])]), *run.step([(stream, ids[17:20])]), *run.step([(stream, ids[20:])])]
    )
    assert float((got - subject.logits(ids)).abs().max()) < 1e-4


def opened(folder: Path) -> DecoderLM:
    """The model of a checkpoint."""
    description = describe(folder, ModelConfig())
    model = build(description.architecture, description.config)
    place = placement()
    quantized = description.config.get("quantization_config")
    with open_checkpoint(description) as checkpoint:
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
        quant_for = select(quantized, torch.float32, place.kernels, shapes=shapes)
        bind(model, placement(quant_for=quant_for, stored_shapes=shapes))
        load_weights(model, checkpoint)
    return model


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    run = PagedRun(opened(folder), torch_sdpa.TorchSdpaAttention())
    (found,) = run.step([(run.stream(len(ids)), ids)])
    return found


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "glm4-moe-lite", "youtu", "minicpm3"])
def test_a_published_checkpoint_is_read(name: str, tmp_path: Path) -> None:
    """As Transformers writes it, fields that equal its defaults left out; layers that guess further tokens unread."""
    subject, ids = oracle(name), tokens(15, 80)
    subject.model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.self_attn.kv_b_proj.weight" in tensors
    if name == "deepseek-v3":
        extra = {"model.layers.3.eh_proj.weight": torch.ones(4, 4), "model.layers.4.embed_tokens.weight": torch.ones(3)}
        save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    assert float((logits_of(tmp_path, ids) - subject.logits(ids)).abs().max()) < 1e-4


def in_blocks(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 codes, scales of blocks, and what they stand for."""
    rows, columns = (-(-n // size) for n in weight.shape)
    padded = torch.zeros(rows * size, columns * size)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, size, columns, size)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    meant = (codes.float() * scale).view_as(padded)[: weight.shape[0], : weight.shape[1]]
    return (
        codes.view_as(padded)[: weight.shape[0], : weight.shape[1]].contiguous(),
        scale[:, 0, :, 0],
        meant.contiguous(),
    )


WIDE = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 24, "v_head_dim": 32, "num_hidden_layers": 2,
}  # fmt: skip
"""Inputs of whole blocks of 128, as those of real checkpoints are; outputs that are not."""


def test_a_checkpoint_of_fp8_blocks_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek publishes them: scales of 128 by 128 numbers, of which the last are cut off. Activations are not rounded
    here: that may give a token to another expert."""
    monkeypatch.setattr("samovar.quant.rounded.round_inputs", lambda x, *rest: x)
    family, size = oracle("deepseek-v3").family, 128
    subject, ids = oracle_of(dataclasses.replace(family, fields={**family.fields, **WIDE})), tokens(15, 80)
    subject.model.save_pretrained(tmp_path)
    stored, meant = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        is_linear = "_proj" in name and name.endswith(".weight")
        stored[name], scale, meant[name] = in_blocks(tensor, size) if is_linear else (tensor, tensor, tensor)
        if is_linear:
            stored[f"{name}_scale_inv"] = scale
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [size, size],
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    model = opened(tmp_path)
    expansion = next(layer for layer in model.modules() if isinstance(layer, Expansion))
    torch.testing.assert_close(expansion.of_heads.flatten(0, 1), meant["model.layers.0.self_attn.kv_b_proj.weight"])
    assert expansion.resident_bytes() == expansion.of_heads.nbytes
    run = PagedRun(model, torch_sdpa.TorchSdpaAttention())
    (got,) = run.step([(run.stream(15), ids)])
    plain = PagedRun(load(subject.family.architecture, subject.raw, meant), torch_sdpa.TorchSdpaAttention())
    (expected,) = plain.step([(plain.stream(15), ids)])
    assert float((got - expected).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"rope_interleave": 3}, "rope_interleave must be true or false"),
    ],
)
def test_what_would_be_another_model_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build("DeepseekV3ForCausalLM", {**oracle("deepseek-v3").raw, **fields})


def test_sequences_among_whose_keys_an_indexer_would_choose_are_refused() -> None:
    subject = oracle("deepseek-v32")
    with pytest.raises(ConfigError, match=r"--max-model-len 97: .*indexer.* use --max-model-len 96"):
        load(subject.family.architecture, subject.raw, subject.tensors, max_model_len=97)


def test_caches_of_codes_are_refused() -> None:
    subject = oracle("deepseek-v3")
    with pytest.raises(ConfigError, match=r"kv-cache-dtype float8_e4m3fn: latent rows .* use auto"):
        load(subject.family.architecture, subject.raw, subject.tensors, cache_dtype=torch.float8_e4m3fn)


def test_a_row_is_stored_once() -> None:
    """1,152 bytes a token and layer in bfloat16 at DeepSeek's size."""
    raw = {**oracle("deepseek-v3").raw, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    model = build("DeepseekV3ForCausalLM", raw)
    bind(model, placement(cache_dtype=torch.bfloat16))
    assert {spec.bytes_per_token for spec in model.cache_specs()} == {1152}


def test_an_engine_chunks_preempts_and_shares_prefixes(tmp_path: Path) -> None:
    """More sequences than the cache holds, prompts longer than a step, and twice the same prompts."""
    subject = oracle("deepseek-v3")
    subject.model.save_pretrained(tmp_path)
    options: dict[str, Any] = {"max_model_len": 96, "num_gpu_blocks_override": 14, "block_size": 16, "threads": 1}
    options |= {"max_num_seqs": 4, "max_num_batched_tokens": 24, "dtype": "float32", "skip_tokenizer_init": True}
    prompts = [tokens(size, seed) for seed, size in enumerate((60, 45, 50, 40))]
    prompts.append(prompts[0][:40] + tokens(5, 9))
    expected = []
    for prompt in prompts:
        ids = list[int]()
        for _ in range(8):
            ids.append(int(subject.logits(prompt + ids)[-1].argmax()))
        expected.append(ids)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), **options) as llm:
        assert dict(llm.info.memory_plan)["kv cache"] == 14 * 16 * 3 * 32 * 4
        for prompt_list in (prompts, prompts[::-1], prompts[:1]):
            outputs = llm.generate(prompt_list, greedy, use_tqdm=False)
            wanted = [expected[prompts.index(prompt)] for prompt in prompt_list]
            assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
        assert outputs[0].num_cached_tokens
