"""Generic models behind the whole engine: `LLM` in this process, and a real server."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from samovar import LLM, SamplingParams
from samovar.errors import MemoryPlanError
from tests.models.generic.gate import reference_of, tokens

SMALL = ["--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "90", "--max-num-seqs", "8"]
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 90, "max_num_seqs": 8}


def greedy(reference: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What Transformers says."""
    found: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            found.append(int(reference(torch.tensor([[*prompt, *found]]), use_cache=False).logits[0, -1].argmax()))
    return found


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("gpt_neox", "GPTNeoXForCausalLM"),
        pytest.param("stablelm", "StableLmForCausalLM", marks=pytest.mark.slow),
        pytest.param("olmo", "OlmoForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_transformers(model_type: str, architecture: str, tmp_path: Path) -> None:
    """Several at once, the second round from the prefix cache, in chunks of few tokens."""
    reference = reference_of(model_type, architecture)
    reference.save_pretrained(tmp_path)
    prefix = tokens(40, 3, 131)
    prompts = [[*prefix, *tokens(8, seed, 131)] for seed in range(3)]
    expected = [greedy(reference, prompt, 8) for prompt in prompts]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(str(tmp_path), model_impl="generic", max_num_batched_tokens=16, **OPTIONS) as llm:
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert outputs[0].num_cached_tokens == 32


def test_a_server_answers_and_says_that_the_path_is_generic(tmp_path: Path) -> None:
    reference = reference_of("gpt_neox", "GPTNeoXForCausalLM")
    reference.save_pretrained(tmp_path / "model")
    log, socket = tmp_path / "log", str(tmp_path / "s")
    with log.open("w") as out:
        words = [sys.executable, "-m", "samovar", "serve", str(tmp_path / "model"), "--uds", socket, *SMALL]
        child = subprocess.Popen(words, stdout=out, stderr=out)
        try:
            end = time.monotonic() + 60
            while "Samovar is ready" not in log.read_text() and time.monotonic() < end and child.poll() is None:
                time.sleep(0.05)
            prompt = tokens(12, 5, 131)
            asked = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            with httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url="http://samovar") as client:
                answer = client.post("/v1/completions", json={"model": str(tmp_path / "model"), **asked}, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == greedy(reference, prompt, 6)
        finally:
            child.send_signal(signal.SIGINT)
            child.wait(30)
    assert "generic path: GPTNeoXForCausalLM of Transformers" in log.read_text(), log.read_text()


def test_memory_is_planned_as_for_native_families(tmp_path: Path) -> None:
    """What does not fit is refused before weights are read."""
    reference_of("gpt_neox", "GPTNeoXForCausalLM").save_pretrained(tmp_path)
    with pytest.raises(MemoryPlanError, match="weights"):
        LLM(str(tmp_path), memory="1MiB", **OPTIONS)
