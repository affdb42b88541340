"""The test of one architecture: a tiny random checkpoint, saved by Transformers, against the class that saved it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig
from samovar.layers import bind
from samovar.models.decoder import DecoderLM
from samovar.models.generic.model import GenericLM
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.load import load_weights
from tests.models.generic.small_configs import small_config
from tests.models.paged_run import BLOCK, PagedRun, placement

TOLERANCE = 1e-4
MOST_PARAMETERS = 8_000_000
LENGTHS = (41, 18, 9)
"""Tokens of the sequences: longer than every window of a small config."""


@dataclass(frozen=True)
class Subject:
    """A model of Transformers, and its checkpoint as the generic path runs it."""

    reference: Any
    model: DecoderLM

    def logits(self, ids: list[int]) -> torch.Tensor:
        """What Transformers says: [tokens, vocab] of a whole sequence at once."""
        with torch.inference_mode():
            found: torch.Tensor = self.reference(torch.tensor([ids]), use_cache=False).logits[0]
        return found.float()


def reference_of(model_type: str, architecture: str, special: dict[str, Any] | None = None, seed: int = 0) -> Any:
    """Transformers' model with every parameter random, norms and biases too, so that none is forgotten unseen."""
    import transformers

    config = small_config(model_type, special)
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in getattr(transformers, architecture)(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"a config that should be small has {size} parameters")
    model = getattr(transformers, architecture)(config).eval()
    generator = torch.Generator().manual_seed(7 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.mul_(1 + 0.2 * noise).add_(0.05 * noise)
            else:
                parameter.copy_(noise * 1.2 * parameter.shape[-1] ** -0.5)
    return model


def subject(reference: Any, folder: Path) -> Subject:
    """Save, describe, declare, bind and load."""
    reference.save_pretrained(folder)
    description = describe(folder, ModelConfig(model=str(folder)))
    model = GenericLM(description.architecture, description.config)
    with open_checkpoint(description) as checkpoint:
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
        bind(model, placement(max_model_len=96, stored_shapes=shapes))
        load_weights(model, checkpoint)
    return Subject(reference, model)


def check(subject: Subject) -> None:
    """Whole prompts, chunks in mixed batches, a shared prefix, greedy ids; `AssertionError` at the first difference."""
    vocab = subject.model.config.vocab_size
    a, b, c = (tokens(size, seed, vocab) for seed, size in enumerate(LENGTHS))
    expected = [subject.logits(ids) for ids in (a, b, c)]
    spread = float(expected[0].std())
    assert 1e-3 < spread < 1e3, f"the reference's logits say nothing: their deviation is {spread:.3g}"
    run = PagedRun(subject.model, TorchSdpaAttention())
    for got, wanted in zip(run.step([(run.stream(len(ids)), ids) for ids in (a, b, c)]), expected, strict=True):
        _close(got, wanted, "whole prompts")
    _check_chunks(subject, (a, b, c), expected)
    run = PagedRun(subject.model, TorchSdpaAttention())
    first, prefix = run.stream(41), tokens(6 * BLOCK, 20, vocab)
    run.step([(first, prefix)])
    rest = tokens(41 - len(prefix), 21, vocab)
    (got,) = run.step([(run.stream(41, shared=first, shared_tokens=len(prefix)), rest)])
    _close(got, subject.logits(prefix + rest)[len(prefix) :], "a shared prefix")
    _check_greedy(subject, b)


def _check_chunks(subject: Subject, whole: tuple[list[int], ...], expected: list[torch.Tensor]) -> None:
    run = PagedRun(subject.model, TorchSdpaAttention())
    streams = [run.stream(len(ids)) for ids in whole]
    done: list[list[torch.Tensor]] = [[], [], []]
    for step in ({0: 13, 1: 5}, {0: 14, 1: 6, 2: 7}, {1: 7, 0: 31, 2: 8}, {2: 9, 1: 18, 0: 41}):
        work = [(streams[i], whole[i][len(streams[i].ids) : end]) for i, end in step.items()]
        for i, logits in zip(step, run.step(work), strict=True):
            done[i].append(logits)
    for got, wanted in zip(done, expected, strict=True):
        _close(torch.cat(got), wanted, "chunks in mixed batches")


def _check_greedy(subject: Subject, prompt: list[int]) -> None:
    found = list[int]()
    for _ in range(8):
        found.append(int(subject.logits(prompt + found)[-1].argmax()))
    got = PagedRun(subject.model, TorchSdpaAttention()).greedy(prompt, 8)
    assert got == found, f"greedy ids differ: {got} instead of {found}"


def _close(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert got.dtype == torch.float32
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)} logits instead of {tuple(wanted.shape)}"
    difference = float((got - wanted).abs().max())
    limit = TOLERANCE * max(1.0, float(wanted.abs().max()) / 10)
    assert difference <= limit, f"{what}: logits differ by {difference:.2g}"


def tokens(count: int, seed: int, vocab: int) -> list[int]:
    """Random ids; none is among the first, which may mean something to a model."""
    return torch.randint(5, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
