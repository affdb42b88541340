"""Every type of cache through `LLM` on a CPU: near the plain cache, and the same from the prefix cache as cold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar import LLM, SamplingParams
from samovar.errors import CheckpointError
from tests.checkpoints import write_random_llama

BOUNDS = {"fp8": 1.0, "fp8_e5m2": 1.5, "int8": 0.2, "k8v4": 1.0, "tq3.5": 1.5, "tq2.5": 2.5}
"""Largest change of a logarithm of a likely token's probability. Rows err by 3, 5, 0.7, 10 (values), 19 and 34 % of their
norm; scores of this model differ by some 3, two layers follow each other, and its heads look at few positions: errors grow
some thirtyfold, less where they are so large that softmax bounds them."""
PROMPT = list(range(40, 190))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return write_random_llama(tmp_path_factory.mktemp("heads-of-64"), **sizes)


def open_llm(folder: Path, kind: str, *, eager: bool = True) -> LLM:
    return LLM(str(folder), kv_cache_dtype=kind, enforce_eager=eager, device="cpu", dtype="float32")


def likely(llm: LLM, prompt: list[int] = PROMPT) -> tuple[dict[int, float], int]:
    """Logarithms of the likeliest next tokens' probabilities, and how many prompt tokens came from the prefix cache."""
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=8)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return {token: entry.logprob for token, entry in logprobs[0].items()}, output.num_cached_tokens or 0


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> dict[int, float]:
    with open_llm(checkpoint, "float32") as llm:
        return likely(llm)[0]


@pytest.mark.parametrize("kind", list(BOUNDS))
def test_near_the_plain_cache_and_alike_from_the_prefix_cache(
    checkpoint: Path, plain: dict[int, float], kind: str
) -> None:
    """Attention reads what was stored, also of the step's own tokens: a hit changes nothing but the order of sums."""
    with open_llm(checkpoint, kind) as llm:
        cold, none = likely(llm)
        warm, cached = likely(llm)
    assert none == 0 and cached >= 128
    assert cold.keys() == warm.keys() and all(abs(cold[token] - warm[token]) < 1e-3 for token in cold)
    common = plain.keys() & cold.keys()
    error = max(abs(plain[token] - cold[token]) for token in common)
    assert len(common) >= 3 and 0 < error < BOUNDS[kind], error


def with_scales(folder: Path, source: Path, scales: dict[str, torch.Tensor]) -> Path:
    """The checkpoint with more tensors."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(load_file(source / "model.safetensors") | scales, folder / "model.safetensors", {"format": "pt"})
    return folder


def scales_of(names: tuple[str, str], values: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    layers = ("model.layers.0.self_attn", "model.layers.1.self_attn")
    return {f"{layer}.{name}": value.clone() for layer in layers for name, value in zip(names, values, strict=True)}


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (("k_scale", "v_scale"), (torch.tensor(0.011), torch.tensor([0.0097]))),
        (("k_proj.k_scale", "v_proj.v_scale"), (torch.tensor([0.02, 0.011]), torch.tensor([0.3, 0.007]))),
    ],
)
def test_scales_of_the_checkpoint(
    checkpoint: Path,
    plain: dict[int, float],
    tmp_path: Path,
    names: tuple[str, str],
    values: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Read for 8-bit floats, and used: the result differs, but no more than without; else said to be unused."""
    folder = with_scales(tmp_path / "scaled", checkpoint, scales_of(names, values))
    with open_llm(checkpoint, "fp8", eager=False) as llm:
        without, _ = likely(llm)
    with open_llm(folder, "fp8", eager=False) as llm:
        scaled, _ = likely(llm)
        assert any("4 scales of the checkpoint are used" in line for line in llm.info.routes)
    common = plain.keys() & scaled.keys()
    assert max(abs(plain[token] - scaled[token]) for token in common) < BOUNDS["fp8"]
    assert scaled != without
    with open_llm(folder, "float32") as llm:
        assert likely(llm)[0] == pytest.approx(plain, abs=1e-5)
        assert any("4 scales for an fp8 cache are in the checkpoint and not used" in line for line in llm.info.routes)


@pytest.mark.parametrize(("value", "words"), [(torch.ones(3), "shape"), (torch.tensor(0.0), "divided by")])
def test_scales_that_cannot_be(checkpoint: Path, tmp_path: Path, value: torch.Tensor, words: str) -> None:
    folder = with_scales(tmp_path / "scaled", checkpoint, scales_of(("k_scale", "v_scale"), (value, torch.ones(1))))
    with pytest.raises(CheckpointError, match=f"self_attn.k_scale.*{words}"):
        open_llm(folder, "fp8")
