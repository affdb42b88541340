"""Requests, what came of them, and when two ways of computing them agree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samovar import LLM, SamplingParams
from tests.gpu.tiny_models import VOCAB

Case = tuple[list[int], SamplingParams]

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "num_gpu_blocks_override": 1200,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
}
"""Settings that all engines of a comparison share unless it is about them."""

NEAR_TIE = {"float32": 2e-3, "bfloat16": 0.2}
"""Difference of log-probabilities under which rounding may decide between two tokens."""


@dataclass(frozen=True)
class Outcome:
    """What one request gave: ids, why it ended, and log-probabilities (token -> value at each position) if asked for."""

    ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[int, float]]
    prompt_logprobs: list[dict[int, float]]


def params(**values: Any) -> SamplingParams:
    """Sampling without text."""
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "detokenize": False, **values})


def greedy_cases(count: int, seed: int = 0, longest: int = 200) -> list[Case]:
    """Prompts of 1 to `longest` tokens, outputs of 1 to 40."""
    rng = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, *(rng.randint(1, longest) for _ in range(count))][:count]
    return [
        ([rng.randrange(2, VOCAB) for _ in range(min(length, longest))], params(max_tokens=rng.randint(1, 40)))
        for length in lengths
    ]


def growing_cases(count: int, seed: int = 3) -> list[Case]:
    """Prompts of 1 to 12 tokens, outputs of 30 to 110: what makes running sequences take each other's blocks."""
    rng = random.Random(seed)
    return [
        ([rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 12))], params(max_tokens=rng.randint(30, 110)))
        for _ in range(count)
    ]


def sampled_cases(count: int, seed: int = 1) -> list[Case]:
    """The same with seeded sampling: temperature, top-k, top-p, min-p, in all combinations."""
    rng = random.Random(seed)
    cases: list[Case] = []
    for ids, _ in greedy_cases(count, seed):
        values: dict[str, Any] = {"temperature": rng.choice([0.4, 0.8, 1.0, 1.5]), "seed": rng.randrange(2**40)}
        if rng.random() < 0.4:
            values["top_k"] = rng.choice([1, 5, 40, 900])
        if rng.random() < 0.4:
            values["top_p"] = rng.uniform(0.3, 0.99)
        if rng.random() < 0.3:
            values["min_p"] = rng.uniform(0.01, 0.3)
        cases.append((ids, params(max_tokens=rng.randint(1, 40), **values)))
    return cases


def rich_cases(count: int, seed: int = 2) -> list[Case]:
    """Requests that need more than a token: penalties, biases, masks, stops, log-probabilities; plain ones between them."""
    rng = random.Random(seed)

    def maybe(chance: float, value: Any) -> Any:
        return value if rng.random() < chance else None

    cases: list[Case] = []
    for ids, plain in greedy_cases(count, seed):
        wanted = {
            "repetition_penalty": maybe(0.3, rng.uniform(0.8, 1.6)),
            "presence_penalty": maybe(0.3, rng.uniform(-1, 1)),
            "frequency_penalty": maybe(0.3, rng.uniform(-1, 1)),
            "logit_bias": maybe(0.2, {rng.randrange(VOCAB): rng.uniform(-4, 4) for _ in range(5)}),
            "allowed_token_ids": maybe(0.15, rng.sample(range(VOCAB), 60)),
            "stop_token_ids": maybe(0.3, [rng.randrange(VOCAB) for _ in range(40)]),
            "min_tokens": maybe(0.2, rng.randint(0, plain.max_tokens or 1)),
            "logprobs": maybe(0.4, rng.randint(0, 8)),
            "prompt_logprobs": maybe(0.2, rng.randint(0, 4)),
        }
        sampled = {"temperature": 0.9, "seed": rng.randrange(2**40)} if rng.random() < 0.5 else {}
        given = {name: value for name, value in wanted.items() if value is not None} if rng.random() < 0.75 else {}
        cases.append((ids, params(max_tokens=plain.max_tokens, **given, **sampled)))
    return cases


def run(llm: LLM, cases: Sequence[Case]) -> list[Outcome]:
    """All cases at once."""
    prompts = [{"prompt_token_ids": ids} for ids, _ in cases]
    outputs = llm.generate(prompts, [p for _, p in cases], use_tqdm=False)  # type: ignore[arg-type]
    made = []
    for output in outputs:
        choice = output.outputs[0]
        made.append(
            Outcome(
                list(choice.token_ids),
                choice.finish_reason,
                [{token: entry.logprob for token, entry in at.items()} for at in choice.logprobs or []],
                [{token: entry.logprob for token, entry in (at or {}).items()} for at in output.prompt_logprobs or []],
            )
        )
    return made


def check_ids(
    llm: LLM, cases: Sequence[Case], expected: Sequence[Outcome], got: Sequence[Outcome], *, flips: int
) -> None:
    """Greedy ids are equal; at most `flips` cases may part where two tokens are nearly equally likely.

    Whether they are, `llm` is asked afresh, with everything before that place as the prompt.
    """
    parted = []
    for index, ((prompt, _), one, other) in enumerate(zip(cases, expected, got, strict=True)):
        assert other.finish_reason == one.finish_reason, f"case {index}: {one} and {other}"
        if one.ids == other.ids:
            continue
        at = next((i for i, (a, b) in enumerate(zip(one.ids, other.ids)) if a != b), None)
        assert at is not None, f"case {index}: {len(one.ids)} and {len(other.ids)} tokens"
        before = prompt + one.ids[:at]
        likely = run(llm, [(before, params(max_tokens=1, logprobs=20))])[0].logprobs[0]
        a, b = one.ids[at], other.ids[at]
        gap = abs(likely[a] - likely[b]) if a in likely and b in likely else float("inf")
        assert gap <= NEAR_TIE[llm.info.dtype], f"case {index} parts at token {at}: {a} or {b}, {gap:.4f} apart"
        parted.append(index)
    assert len(parted) <= flips, f"{len(parted)} of {len(cases)} cases hang on rounding: {parted}"


def check_rich(expected: Sequence[Outcome], got: Sequence[Outcome], *, flips: int, tolerance: float) -> None:
    """Ids and ends are equal but for at most `flips` cases; log-probabilities of equal ids agree within `tolerance`."""
    parted = 0
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        assert one.finish_reason != "error" and other.finish_reason != "error", f"case {index}: {one}, {other}"
        check_logprobs(one.prompt_logprobs, other.prompt_logprobs, tolerance, f"prompt of case {index}")
        if (one.ids, one.finish_reason) != (other.ids, other.finish_reason):
            parted += 1
            continue
        check_logprobs(one.logprobs, other.logprobs, tolerance, f"case {index}")
    assert parted <= flips, f"{parted} of {len(expected)} cases differ"


def check_logprobs(
    one: Sequence[dict[int, float]], other: Sequence[dict[int, float]], tolerance: float, where: str
) -> None:
    """Same positions; tokens that both name have nearly the same value, and only the least likely may differ."""
    assert len(one) == len(other), f"{where}: {len(one)} and {len(other)} positions"
    for at, (a, b) in enumerate(zip(one, other, strict=True)):
        assert len(a.keys() ^ b.keys()) <= 2, f"{where}, position {at}: {a} and {b}"
        for token in a.keys() & b.keys():
            assert abs(a[token] - b[token]) <= tolerance, f"{where}, position {at}, token {token}: {a} and {b}"
