"""The same comparisons as in `test_hybrid` for small models of real families: alone and uncached, or any other way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samovar import LLM, RequestOutput, SamplingParams
from samovar.config.engine import EngineConfig
from samovar.engine.prompts import PromptType
from samovar.schedule.options import SchedulerOptions, SnapshotRules

SOON = SnapshotRules(margin=4, least_gain=1, interval=48, decode_interval=16)
VOCAB = 300
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": VOCAB, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": {
        "model_type": "qwen3_5_text", "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "attn_output_gate": True, "hidden_act": "silu", "tie_word_embeddings": False,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
    },
    "Mamba2ForCausalLM": {
        "model_type": "mamba2", "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2,
        "conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    "Lfm2ForCausalLM": {
        "model_type": "lfm2", "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "norm_eps": 1e-5,
        "conv_L_cache": 3, "conv_bias": False, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
    "JambaForCausalLM": {
        "model_type": "jamba", "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_act": "silu", "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
        "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_dt_rank": 5, "mamba_conv_bias": True, "mamba_proj_bias": False, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def make(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LLM]]:
    """Engines of one family with random weights, always the same; snapshots wherever they can be."""
    config = {"architectures": [request.param], **SIZES, **CONFIGS[request.param]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ordinary = SchedulerOptions.from_config

    def from_config(config: EngineConfig) -> SchedulerOptions:
        return replace(ordinary(config), snapshot_rules=SOON)

    monkeypatch.setattr(SchedulerOptions, "from_config", from_config)
    settings: dict[str, Any] = {
        "load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 6, "block_size": 16,
        "max_num_batched_tokens": 128, "max_model_len": 512, "num_gpu_blocks_override": 400, "threads": 1,
    }  # fmt: skip
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(LLM(str(tmp_path), **{**settings, **options}))


def run(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    requests: list[PromptType] = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(requests, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_any_way_is_alone(make: Callable[..., LLM]) -> None:
    """Together, again, the next turn, on a pool that is too small: the tokens of each alone with nothing cached."""
    rng, plain = random.Random(0), make(enable_prefix_caching=False, async_scheduling=False)
    head = [rng.randrange(3, VOCAB) for _ in range(70)]
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 90))] for _ in range(8)]
    prompts = [head + prompt if i % 3 == 0 else prompt for i, prompt in enumerate(prompts)]
    alone = [tokens(run(plain, [prompt]))[0] for prompt in prompts]
    assert len({token for said in alone for token in said}) > 30
    turns = [prompt + said + [5, 6, 7] for prompt, said in zip(prompts, alone, strict=True)]
    llm = make()
    assert tokens(run(llm, prompts)) == alone
    again = run(llm, prompts)
    assert tokens(again) == alone and sum(output.num_cached_tokens or 0 for output in again) > 300
    later = run(llm, turns)
    assert tokens(later) == [tokens(run(plain, [turn]))[0] for turn in turns]
    # A conversation goes on from a border within 16 tokens of its last token, and of the next.
    assert all((o.num_cached_tokens or 0) > len(turn) - 3 - 1 - 2 * 16 for o, turn in zip(later, turns, strict=True))
    small = make(num_gpu_blocks_override=14, max_model_len=200)
    assert tokens(run(small, prompts)) == alone
    assert small._engine.stats().num_preemptions > 0
