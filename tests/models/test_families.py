"""Every family against Transformers: whole, chunked, mixed, out of order, shared, greedy; and complete coverage."""

from __future__ import annotations

import pytest
import torch

from samovar.attention.base import AttentionBackend
from samovar.attention.reference import ReferenceAttention
from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.layers import Layer, bind
from samovar.models.registry import ARCHITECTURES, build
from tests.models.family_table import FAMILIES
from tests.models.paged_run import BLOCK, PagedRun, fill, load, placement
from tests.models.transformers_oracle import Oracle, oracle, tokens

NAMES = [family.name for family in FAMILIES]
TOLERANCE = 1e-4


@pytest.fixture(params=NAMES)
def subject(request: pytest.FixtureRequest) -> Oracle:
    return oracle(request.param)


@pytest.fixture(params=[TorchSdpaAttention, ReferenceAttention], ids=lambda backend: str(backend.name))
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    made: AttentionBackend = request.param()
    return made


def paged(subject: Oracle, backend: AttentionBackend) -> PagedRun:
    architecture = subject.family.architecture
    return PagedRun(load(architecture, subject.raw, subject.tensors, max_model_len=subject.family.max_len), backend)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == torch.float32
    assert float((got - expected).abs().max()) < TOLERANCE
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def sizes_that_reach_scaling(subject: Oracle) -> tuple[int, int, int]:
    """Lengths of the test's sequences: all beyond the trained length where frequencies depend on the length, because
    Transformers picks them by the sequence and we by the longest one served."""
    return (41, 38, 33) if subject.family.max_len == 41 else (41, 18, 9)


def test_whole_prompts_match(subject: Oracle, backend: AttentionBackend) -> None:
    run = paged(subject, backend)
    prompts = [tokens(size, seed) for seed, size in enumerate(sizes_that_reach_scaling(subject))]
    found = run.step([(run.stream(len(ids)), ids) for ids in prompts])
    for ids, logits in zip(prompts, found, strict=True):
        close(logits, subject.logits(ids))


def test_chunks_and_decodes_in_mixed_batches_match(subject: Oracle, backend: AttentionBackend) -> None:
    """Chunks of every kind beside decoding sequences, blocks out of order, in a cache poisoned with NaN."""
    run = paged(subject, backend)
    a, b, c = (tokens(size, 10 + i) for i, size in enumerate(sizes_that_reach_scaling(subject)))
    one, two, three = run.stream(len(a)), run.stream(len(b)), run.stream(len(c))
    done: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    cuts = [{0: 13, 1: 5}, {0: 14, 1: 6, 2: 7}, {1: 7, 0: 31, 2: len(c) - 1}, {2: len(c), 1: len(b), 0: len(a)}]
    streams, whole = (one, two, three), (a, b, c)
    for step in cuts:
        work = [(streams[i], whole[i][len(streams[i].ids) : end]) for i, end in step.items()]
        for i, logits in zip(step, run.step(work), strict=True):
            done[i].append(logits)
    for i, ids in enumerate(whole):
        close(torch.cat(done[i]), subject.logits(ids))


def test_shared_prefix_blocks_match(subject: Oracle, backend: AttentionBackend) -> None:
    """Two sequences that read the same cached blocks give what each gives cold."""
    run = paged(subject, backend)
    prefix, size = tokens(6 * BLOCK, 20), sizes_that_reach_scaling(subject)[0]
    first = run.stream(size)
    run.step([(first, prefix)])
    for seed in (21, 22):
        rest = tokens(size - len(prefix), seed)
        stream = run.stream(size, shared=first, shared_tokens=len(prefix))
        (logits,) = run.step([(stream, rest)])
        close(logits, subject.logits(prefix + rest)[len(prefix) :])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama-dynamic-long"])
def test_greedy_ids_match(name: str, backend: AttentionBackend) -> None:
    """Dynamic NTK beyond the trained length is left out: Transformers changes its frequencies with every token."""
    subject = oracle(name)
    prompt, expected = tokens(sizes_that_reach_scaling(subject)[2] - 4, 30), list[int]()
    for _ in range(12):
        expected.append(int(subject.logits(prompt + expected)[-1].argmax()))
    assert paged(subject, backend).greedy(prompt, 12) == expected


def test_weight_coverage_is_complete(subject: Oracle) -> None:
    """Every tensor of the checkpoint is claimed or left on purpose, and every claim exists."""
    model = build(subject.family.architecture, subject.raw)
    bind(model, placement())
    claimed = fill(model, subject.tensors)
    unread = set().union(*(m.unread() for m in model.modules() if isinstance(m, Layer)))
    assert claimed <= set(subject.tensors)
    left = {name for name in set(subject.tensors) - claimed - unread if not name.endswith(model.ignore)}
    assert {name for name in left if not name.startswith(model.ignore_beginnings)} == set()
    assert sum(t.numel() for n, t in subject.tensors.items() if n in claimed) == sum(
        s.target.numel() for m in model.modules() if isinstance(m, Layer) for s in m.sources()
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_matters(name: str) -> None:
    """Doubling any one tensor changes the logits: nothing is loaded and then left out of the mathematics."""
    subject = oracle(name)
    model = load(subject.family.architecture, subject.raw, subject.tensors, max_model_len=subject.family.max_len)
    count = 80 if "num_experts_per_tok" in subject.raw else 12  # every expert has some
    run, ids = PagedRun(model, TorchSdpaAttention()), tokens(count, 40)
    (before,) = run.step([(run.stream(count), ids)])
    for layer in (module for module in model.modules() if isinstance(module, Layer)):
        for source in layer.sources():
            kept = source.target.clone()
            source.target.mul_(-1.7).add_(0.3)
            stream = run.stream(count)
            (after,) = run.step([(stream, ids)])
            run.release(stream)
            source.target.copy_(kept)
            assert not torch.equal(after, before), source.name


def test_every_registered_family_is_in_the_table() -> None:
    assert {family.architecture for family in FAMILIES} == set(ARCHITECTURES)


def test_bfloat16_stays_near_float32(backend: AttentionBackend) -> None:
    """16-bit weights, activations and cache: the same mathematics, coarser."""
    for name in ("llama", "qwen3", "gemma3"):
        subject = oracle(name)
        model = load(subject.family.architecture, subject.raw, subject.tensors, dtype=torch.bfloat16)
        run, ids = PagedRun(model, backend, cache_dtype=torch.bfloat16), tokens(20, 50)
        stream = run.stream(20)
        logits = torch.cat([*run.step([(stream, ids[:12])]), *run.step([(stream, ids[12:])])])
        expected = subject.logits(ids)
        assert logits.dtype == torch.float32
        assert float((logits - expected).abs().mean()) < 0.05 * float(expected.abs().mean())


def test_cache_dtype_may_differ_from_activations(backend: AttentionBackend) -> None:
    subject = oracle("llama")
    model = load(subject.family.architecture, subject.raw, subject.tensors, cache_dtype=torch.bfloat16)
    assert {spec.bytes_per_element for spec in model.cache_specs()} == {2}
    run, ids = PagedRun(model, backend, cache_dtype=torch.bfloat16), tokens(20, 51)
    (whole,) = run.step([(run.stream(20), ids)])
    stream = run.stream(20)
    chunked = torch.cat([*run.step([(stream, ids[:7])]), *run.step([(stream, ids[7:])])])
    assert float((whole - chunked).abs().max()) < 1e-5  # the chunk reads what the whole prompt read: rounded keys
    assert 0 < float((whole - subject.logits(ids)).abs().max()) < 0.2
