"""Random requests that use everything a request can ask for, and what must be equal between two ways of running them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from samovar import LLM, RequestOutput, SamplingParams
from samovar.engine.prompts import PromptType

Case = tuple[PromptType, SamplingParams]

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 320,
    "num_gpu_blocks_override": 1500,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 1024,
    "step_time_target_ms": 10_000.0,
    "threads": 1,
    "generation_config": "vllm",
}
"""Settings all engines of a comparison share unless it is about them."""

VOCAB = 370
"""Ids below this are in the vocabulary of the tiny model."""

WORDS = "the a of engine sea Paris story answer 12 def return naïve 世界 🙂 \n\n . , to and write question small".split(
    " "
)


def random_params(rng: random.Random) -> SamplingParams:
    """Every sampling feature, most of them off most of the time; always reproducible."""

    def maybe(chance: float, value: Any) -> Any:
        return value if rng.random() < chance else None

    greedy = rng.random() < 0.35
    max_tokens = rng.randint(1, 30)
    return SamplingParams.from_optional(
        temperature=0.0 if greedy else rng.choice([0.3, 0.8, 1.0, 1.7]),
        seed=None if greedy else rng.randrange(-(2**63), 2**63),
        n=1 if greedy else rng.choice([1, 1, 1, 2, 3]),
        top_k=maybe(0.3, rng.choice([-1, 1, 5, 40, 9999])),
        top_p=maybe(0.3, rng.uniform(0.2, 1.0)),
        min_p=maybe(0.2, rng.uniform(0.0, 0.3)),
        repetition_penalty=maybe(0.2, rng.uniform(0.8, 1.5)),
        presence_penalty=maybe(0.2, rng.uniform(-1, 1)),
        frequency_penalty=maybe(0.2, rng.uniform(-1, 1)),
        logit_bias=maybe(0.2, {rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(5)}),
        allowed_token_ids=maybe(0.1, rng.sample(range(VOCAB), 60)),
        bad_words=maybe(0.15, ["the", "a of", "sun"]),
        stop=maybe(0.3, rng.sample(["e", "the", " a", "an", "st", "\n", "?"], 2)),
        include_stop_str_in_output=maybe(0.3, True),
        stop_token_ids=maybe(0.2, [rng.randrange(VOCAB) for _ in range(8)]),
        min_tokens=maybe(0.2, rng.randint(0, max_tokens)),
        ignore_eos=rng.random() < 0.5,
        max_tokens=max_tokens,
        logprobs=maybe(0.3, rng.randint(0, 5)),
        prompt_logprobs=maybe(0.1, rng.randint(0, 3)),
        skip_special_tokens=rng.random() < 0.8,
    )


def random_cases(count: int, seed: int = 0) -> list[Case]:
    """Prompts of 1 to 200 tokens; half of them begin like another one."""
    rng = random.Random(seed)
    heads = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (16, 33, 48, 100, 161)]
    cases: list[Case] = []
    for _ in range(count):
        kind = rng.random()
        prompt: PromptType
        if kind < 0.3:
            prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))
        else:
            head = rng.choice(heads) if kind < 0.7 else []
            prompt = {"prompt_token_ids": head + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))]}
            if rng.random() < 0.15:
                prompt["cache_salt"] = rng.choice(["red", "blue"])
        cases.append((prompt, random_params(rng)))
    return cases


def growing_cases(count: int, seed: int = 1) -> list[Case]:
    """Prompts of 1 to 12 tokens, outputs of 30 to 110."""
    rng = random.Random(seed)
    cases: list[Case] = []
    for _ in range(count):
        params = random_params(rng).clone(max_tokens=rng.randint(30, 110), stop=[], stop_token_ids=[], ignore_eos=True)
        cases.append(([rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 12))], params))
    return cases


def run(llm: LLM, cases: Sequence[Case]) -> list[RequestOutput]:
    """All cases at once."""
    return llm.generate([prompt for prompt, _ in cases], [params for _, params in cases], use_tqdm=False)


def run_alone(llm: LLM, cases: Sequence[Case]) -> list[RequestOutput]:
    """One case after the other."""
    return [run(llm, [case])[0] for case in cases]


class Expectation:
    """What each case gives alone in the plainest engine, and what else rounding alone may make of it.

    A matrix product of one row and of five rounds differently. Once in some ten thousand tokens that decides between
    two tokens: the random number fell on the border between them. Such a case is known by running it five times side by
    side in the same plain engine; then that answer counts as well, and no other.
    """

    def __init__(self, llm: LLM, cases: list[Case]) -> None:
        self._llm = llm
        self._cases = cases
        self.outputs = run_alone(llm, cases)

    def check(self, got: list[RequestOutput]) -> None:
        """Fail with the first few cases whose tokens, text, ends or logprobs differ."""
        rounded, wrong = 0, []
        for case, expected, output in zip(self._cases, self.outputs, got, strict=True):
            if same(expected, output):
                continue
            if any(same(twin, output) for twin in run(self._llm, [case] * 5)):
                rounded += 1
            else:
                wrong.append(f"{case}\n  expected {essence(expected)}\n  got      {essence(output)}")
        assert not wrong, f"{len(wrong)} cases differ\n" + "\n".join(wrong[:3])
        assert rounded <= 1 + len(got) // 100, f"{rounded} cases hang on rounding; that is too many to be chance"


def same(one: RequestOutput, other: RequestOutput) -> bool:
    """Whether two runs of one case agree."""
    return essence(one) == essence(other) and logprobs_agree(one, other)


def essence(output: RequestOutput) -> list[tuple[Any, ...]]:
    """What must be exactly equal."""
    return [(c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]


def logprobs_agree(one: RequestOutput, other: RequestOutput, tolerance: float = 1e-4) -> bool:
    """Logprobs of outputs and prompts: same tokens, same values up to rounding."""
    pairs = [(a.logprobs or [], b.logprobs or []) for a, b in zip(one.outputs, other.outputs, strict=True)]
    pairs.append((one.prompt_logprobs or [], other.prompt_logprobs or []))  # type: ignore[arg-type]
    for left, right in pairs:
        if len(left) != len(right):
            return False
        for a, b in zip(left, right, strict=True):
            if (a is None) != (b is None):
                return False
            for token in (a or {}).keys() & (b or {}).keys():
                if abs(a[token].logprob - b[token].logprob) > tolerance:
                    return False
            # Alternatives of nearly equal probability may change places; most must be there in both.
            if len((a or {}).keys() ^ (b or {}).keys()) > 2:
                return False
    return True
