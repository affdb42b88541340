"""How soon the second turn of a long chat is answered, by a model whose layers have states as well as by one without.

    PYTHONPATH=. python3 benchmarks/gpu/second_turn.py CONFIGDIR [--tokens 30000] [--answer 300] [-o key=value ...]

The model is loaded in this process with random weights. First a check: what a second turn that begins from a snapshot
says of its first token is compared with what it says with nothing cached; another chat's figures show how much would be
wrong. Then time to the first token of both turns of some chats, and what snapshots cost: a prompt of 2,000 tokens, which
ends in a step of its own for one, and decode steps, some of which copy states.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from samovar import LLM, RequestOutput, SamplingParams
from samovar.cli.output import table
from samovar.engine.prompts import PromptType

LIKELY = 5
"""Tokens whose logprobs are compared."""


def run(llm: LLM, prompts: list[list[int]], count: int, **params: Any) -> list[RequestOutput]:
    """`count` tokens for each of `prompts`."""
    settings = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, **params)
    requests: list[PromptType] = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(requests, settings, use_tqdm=False)


def first_token_ms(output: RequestOutput) -> float:
    """From arrival to the first token."""
    assert output.metrics is not None
    return 1000 * (output.metrics.first_token - output.metrics.arrival)


def decode_ms(outputs: list[RequestOutput], count: int) -> float:
    """Between two tokens of the one that took longest."""
    spans = [o.metrics.last_token - o.metrics.first_token for o in outputs if o.metrics is not None]
    return 1000 * max(spans) / (count - 1)


class Chats:
    """Random chats of one length, every one another."""

    def __init__(self, llm: LLM, seed: int = 0) -> None:
        self.llm, self.rng = llm, random.Random(seed)

    def words(self, count: int) -> list[int]:
        """Random ids."""
        return [self.rng.randrange(100, self.llm.info.vocab_size - 100) for _ in range(count)]

    def turns(self, tokens: int, answer: int) -> tuple[RequestOutput, list[int], RequestOutput]:
        """Both turns of a chat; the second one's prompt is between them."""
        prompt = self.words(tokens)
        first = run(self.llm, [prompt], answer)[0]
        again = prompt + list(first.outputs[0].token_ids) + self.words(100)
        return first, again, run(self.llm, [again], 8)[0]


def likely(llm: LLM, prompt: list[int]) -> dict[int, float]:
    """Logprobs of the likeliest first tokens."""
    output = run(llm, [prompt], 1, logprobs=LIKELY)[0].outputs[0]
    assert output.logprobs is not None
    return {token: entry.logprob for token, entry in output.logprobs[0].items()}


def distance(one: dict[int, float], other: dict[int, float]) -> str:
    """How far logprobs of the tokens that both have are apart, and how many those are."""
    common = one.keys() & other.keys()
    apart = max((abs(one[token] - other[token]) for token in common), default=float("inf"))
    return f"{len(common)} of {max(len(one), len(other))} in common, apart by up to {apart:.4f}"


def check(llm: LLM) -> None:
    """Warm is cold, up to rounding."""
    _, again, second = Chats(llm, 1).turns(3000, 80)
    warm = likely(llm, again)
    llm.reset_prefix_cache()
    cold = likely(llm, again)
    other = likely(llm, Chats(llm, 2).words(len(again)))
    print(f"second turn of 3,000 tokens: {second.num_cached_tokens} of {len(again)} were cached")
    print(f"  warm and cold: {distance(warm, cold)}; cold and another chat: {distance(cold, other)}")


def show_turns(llm: LLM, tokens: int, answer: int, repeats: int) -> None:
    """The table of both turns."""
    chats, rows = Chats(llm, 3), list[list[str]]()
    chats.turns(min(tokens, 3000), 20)  # Whatever is done once only is done now.
    for _ in range(repeats):
        first, again, second = chats.turns(tokens, answer)
        one, two = first_token_ms(first), first_token_ms(second)
        rows.append(
            [f"{one:.0f}", f"{two:.1f}", f"{100 * two / one:.2f} %", f"{second.num_cached_tokens} / {len(again)}"]
        )
    print(table([["first, ms", "second, ms", "second / first", "cached"], *rows]))


def show_costs(llm: LLM, name: str) -> None:
    """A prompt's time, and a decode step's."""
    chats = Chats(llm, 4)
    times = [first_token_ms(run(llm, [chats.words(2000)], 1)[0]) for _ in range(6)]
    print(f"{name}: a prompt of 2,000 tokens {statistics.median(times):.1f} ms", end="")
    for batch in (1, 16):
        outputs = run(llm, [chats.words(64) for _ in range(batch)], 200)
        print(f", decode of {batch}: {decode_ms(outputs, 200):.3f} ms", end="")
    print()


def main() -> None:
    """With snapshots, then without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="folder with a config.json")
    parser.add_argument("--tokens", type=int, default=30_000, help="of the first prompt")
    parser.add_argument("--answer", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", action="store_true", help="leave out the second engine, which has no snapshots")
    parser.add_argument("-o", action="append", default=[], metavar="KEY=VALUE", help="an argument of LLM")
    options = parser.parse_args()
    flags: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_num_seqs": 32,
        "max_model_len": options.tokens + options.answer + 256,
    }  # fmt: skip
    for pair in options.o:
        key, _, text = pair.partition("=")
        try:
            flags[key] = json.loads(text)
        except json.JSONDecodeError:
            flags[key] = text
    for name, caches in (("with snapshots", True), ("without prefix cache", False)):
        began, flags["enable_prefix_caching"] = time.perf_counter(), caches
        with LLM(str(options.config), **flags) as llm:
            print(f"{options.config.name}, {llm.info.dtype}, {name}, ready after {time.perf_counter() - began:.1f} s")
            if caches:
                print(
                    "\n".join(
                        f"  {line}: {size / 2**30:.2f} GiB" for line, size in llm.info.memory_plan if "state" in line
                    )
                )
                check(llm)
                show_turns(llm, options.tokens, options.answer, options.repeats)
            show_costs(llm, name)
        if options.only:
            return


if __name__ == "__main__":
    main()
