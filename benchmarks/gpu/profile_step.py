"""Where the time of a decode step goes, kernel by kernel, against the bytes and the arithmetic that it cannot avoid.

    PYTHONPATH=. python3 benchmarks/gpu/profile_step.py CONFIGDIR [--batch 1 32 256] [--prefill 2048] [-o key=value ...]

The model is loaded in this process with random weights. Each batch runs to its first token and to its last; what the
second has more of, divided by the steps between, is a decode step. That is measured twice: with a clock alone, and
under torch's profiler, whose times per kernel are true but whose steps are a little longer.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from samovar import LLM, SamplingParams
from samovar.cli.output import table
from samovar.engine.metric_snapshots import Counter

KINDS: tuple[tuple[str, str], ...] = (
    ("attention", r"attention|attend|fmha|flash|sdpa|paged|decode_split|merge|prefill"),
    (
        "linears",
        r"linear|gemm|gemv|cutlass|nvjet|matmul|logits|splitk|xmma|wgmma|dot_kernel|reduce_kernel|::dot|aten::mm|addmm",
    ),
    ("sampling", r"sampl|summarize|top_?k|top_?p|softmax|argmax|sort|radix|gumbel|penalt|exponential"),
    ("norm, rope, K/V", r"norm|rope|write_kv|gated|silu|gelu|embed|index_select|gather"),
    ("copies", r"memcpy|memset|copy"),
)
"""Kind of work -> words in the names of its kernels; the first that matches."""
NAME = 46
"""Characters of a kernel's name that are shown."""


@dataclass(frozen=True, slots=True)
class Event:
    """One kernel; microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Floor:
    """What one decode step must read and compute, and how fast the device can."""

    weight_bytes: int
    kv_bytes_per_token: int
    bandwidth: float
    flops: float

    def seconds(self, batch: int, context: float) -> dict[str, float]:
        """Least time of the linears and of attention for a step of `batch` sequences of `context` tokens."""
        multiply = 2 * batch * self.weight_bytes / 2 / self.flops
        return {
            "linears": max(self.weight_bytes / self.bandwidth, multiply),
            "attention": batch * context * self.kv_bytes_per_token / self.bandwidth,
        }


def short(name: str) -> str:
    """A kernel's name without namespaces, template arguments and parameters."""
    name = re.sub(r"^(void|std::|at::native::|\(anonymous namespace\)::)\s*", "", name)
    plain = re.sub(r"<.*|\(.*", "", name) or name
    inner = re.search(r"(\w+Functor|\w+_kernel_cuda|\w+Op)\b", name)
    return (f"{plain} {inner[1]}" if inner and inner[1] not in plain else plain)[:NAME]


def kind_of(name: str) -> str:
    """Which kind of work a kernel does, judged by its name."""
    lowered = name.lower()
    return next((kind for kind, words in KINDS if re.search(words, lowered)), "other")


def run(llm: LLM, prompts: list[list[int]], count: int) -> float:
    """Seconds until every prompt has `count` more tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return time.perf_counter() - began


def profiled(llm: LLM, prompts: list[list[int]], count: int, device: str) -> list[Event]:
    """The kernels of such a run, in order of time (on a CPU: the innermost operators)."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    # On a CPU the operators run on a thread of the executor.
    everywhere = _ExperimentalConfig(profile_all_threads=device == "cpu")
    with profile(activities=[activity], experimental_config=everywhere) as recorded:
        run(llm, prompts, count)
        if device == "cuda":
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    found = []
    for event in recorded.events() or ():
        if event.device_type != wanted or event.is_user_annotation or (device == "cpu" and event.cpu_children):
            continue
        found.append(Event(event.name, event.time_range.start, event.time_range.end))
    return sorted(found, key=lambda event: event.start)


def busy(events: Iterable[Event], start: float, end: float) -> float:
    """Microseconds between `start` and `end` in which at least one kernel ran; events in order of time."""
    covered, last = 0.0, start
    for event in events:
        low, high = max(event.start, last), min(event.end, end)
        if high > low:
            covered += high - low
        last = max(last, min(event.end, end))
    return covered


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step: kernels as (name -> calls, microseconds in all), and the times around them."""

    kernels: dict[str, tuple[float, float]]
    step_ms: float
    host_ms: float
    profiled_ms: float
    busy_share: float


def host_seconds(llm: LLM) -> float:
    """What the engine's thread has worked so far instead of waiting."""
    found = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
    return found["samovar:engine_host_seconds"]


def decode_step(llm: LLM, prompts: list[list[int]], count: int, device: str) -> Step:
    """Measure one batch: the clock first, then the profiler."""
    steps = count - 1
    run(llm, prompts, count)
    first = run(llm, prompts, 1)
    wholes, hosts = [], []
    for _ in range(2):
        before = host_seconds(llm)
        wholes.append(run(llm, prompts, count))
        hosts.append((host_seconds(llm) - before) / steps)
    before_events = profiled(llm, prompts, 1, device)
    events = profiled(llm, prompts, count, device)
    kernels = less(totals(events), totals(before_events), steps)
    span = sum(us for _, us in kernels.values()) * steps
    # The last part of the run is nothing but decode steps: three quarters of them, to keep clear of the prefill.
    end = events[-1].end if events else 0.0
    decoding = (end - events[0].start) - (before_events[-1].end - before_events[0].start) if events else 0.0
    start = end - 0.75 * max(decoding, span if device == "cuda" else 0.0)
    share = busy(events, start, end) / (end - start) if end > start else 0.0
    return Step(kernels, 1000 * (min(wholes) - first) / steps, 1000 * min(hosts), decoding / steps / 1000, share)


def totals(events: Sequence[Event]) -> dict[str, tuple[float, float]]:
    """Name -> (calls, microseconds)."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        entry = found[short(event.name)]
        entry[0] += 1
        entry[1] += event.end - event.start
    return {name: (calls, us) for name, (calls, us) in found.items()}


def less(
    whole: dict[str, tuple[float, float]], prefill: dict[str, tuple[float, float]], steps: int
) -> dict[str, tuple[float, float]]:
    """What `whole` has more than `prefill`, per step."""
    made = {}
    for name, (calls, us) in whole.items():
        calls_before, us_before = prefill.get(name, (0.0, 0.0))
        made[name] = ((calls - calls_before) / steps, (us - us_before) / steps)
    return made


def kernel_rows(kernels: dict[str, tuple[float, float]], lines: int) -> list[list[str]]:
    """The longest kernels and the rest, with their shares."""
    everything = sum(us for _, us in kernels.values()) or 1.0
    ordered = sorted(kernels.items(), key=lambda item: -item[1][1])
    rest = ordered[lines:]
    shown = [*ordered[:lines]]
    if rest:
        shown.append((f"{len(rest)} more", (sum(c for _, (c, _) in rest), sum(us for _, (_, us) in rest))))
    return [
        [name, f"{calls:.1f}", f"{us / calls:.2f}" if calls > 0.01 else "-", f"{us:.1f}", f"{us / everything:.1%}"]
        for name, (calls, us) in shown
    ]


def kind_rows(kernels: dict[str, tuple[float, float]], floors: dict[str, float]) -> list[list[str]]:
    """Sums by kind of work, against the floor where there is one."""
    sums: dict[str, float] = defaultdict(float)
    for name, (_, us) in kernels.items():
        sums[kind_of(name)] += us
    rows = []
    for kind, us in sorted(sums.items(), key=lambda item: -item[1]):
        least = floors.get(kind, 0.0) * 1e6
        rows.append([kind, f"{us:.1f} us", f"floor {least:.1f} us, {us / least:.2f} times" if least else "no floor"])
    return rows


def show_batch(llm: LLM, batch: int, options: argparse.Namespace, floor: Floor, device: str) -> None:
    """Measure and print one batch size."""
    rng = random.Random(batch)
    prompts = [[rng.randrange(10, llm.info.vocab_size) for _ in range(options.prompt)] for _ in range(batch)]
    step = decode_step(llm, prompts, options.output, device)
    floors = floor.seconds(batch, options.prompt + options.output / 2)
    least = 1000 * sum(floors.values())
    inside = sum(us for _, us in step.kernels.values()) / 1000
    print(
        f"\nbatch {batch}: step {step.step_ms:.3f} ms (floor {least:.3f}, {step.step_ms / least:.2f} times), kernels "
        f"{inside:.3f} ms in {sum(c for c, _ in step.kernels.values()):.0f} launches, host {step.host_ms:.3f} ms; under the "
        f"profiler {step.profiled_ms:.3f} ms, device busy {step.busy_share:.1%}"
    )
    head = ["kernel", "calls", "us each", "us a step", "share"]
    print(table([head, *kernel_rows(step.kernels, options.lines)], right=range(1, 5), indent="  "))
    print(table(kind_rows(step.kernels, floors), right=[1], indent="  "))


def show_prefill(llm: LLM, length: int, options: argparse.Namespace, floor: Floor, device: str) -> None:
    """Measure and print one prompt on an idle engine."""
    rng = random.Random(length)
    prompts = [[rng.randrange(10, llm.info.vocab_size) for _ in range(length)]]
    run(llm, prompts, 1)
    seconds = sorted(run(llm, prompts, 1) for _ in range(3))[1]
    events = profiled(llm, prompts, 1, device)
    kernels = totals(events)
    attention = 2 * length * length * options.heads * options.head_dim * options.layers
    floors = {"linears": floor.weight_bytes * length / floor.flops, "attention": attention / floor.flops}
    span = (events[-1].end - events[0].start) if events else 0.0
    share = busy(events, events[0].start, events[-1].end) / span if span else 0.0
    least = sum(floors.values())
    print(
        f"\nprompt of {length}: {1000 * seconds:.2f} ms, {length / seconds:,.0f} tokens/s (floor {1000 * least:.2f} ms, "
        f"{seconds / least:.2f} times), kernels {sum(us for _, us in kernels.values()) / 1000:.2f} ms, device busy {share:.1%}"
    )
    head = ["kernel", "calls", "us each", "us in all", "share"]
    print(table([head, *kernel_rows(kernels, options.lines)], right=range(1, 5), indent="  "))
    print(table(kind_rows(kernels, floors), right=[1], indent="  "))


def floor_of(llm: LLM, config: dict[str, Any], options: argparse.Namespace) -> Floor:
    """From the sizes of the loaded model: an untied embedding table is only looked up, so a step does not read it."""
    element = 4 if llm.info.dtype == "float32" else 2
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    options.heads, options.layers = heads, config["num_hidden_layers"]
    options.head_dim = config.get("head_dim") or hidden // heads
    table_bytes = 0 if config.get("tie_word_embeddings") else config["vocab_size"] * hidden * element
    kv_heads = config.get("num_key_value_heads") or heads
    per_token = 2 * options.layers * kv_heads * options.head_dim * element
    return Floor(llm.info.weight_bytes - table_bytes, per_token, options.bandwidth * 1e12, options.flops * 1e12)


def main() -> None:
    """Load, then one table for each batch size and prompt length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="folder with a config.json")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--prefill", type=int, nargs="*", default=[2048])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=33)
    parser.add_argument("--lines", type=int, default=14, help="kernels in a table")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s of the device")
    parser.add_argument("--flops", type=float, default=790, help="TFLOP/s of its 16-bit products")
    parser.add_argument("-o", action="append", default=[], metavar="KEY=VALUE", help="an argument of LLM")
    options = parser.parse_args()
    config = json.loads((options.config / "config.json").read_text(encoding="utf-8"))
    flags: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "enable_prefix_caching": False,
        "max_model_len": max([options.prompt + options.output, *options.prefill]) + 64, "gpu_memory_utilization": 0.9,
    }  # fmt: skip
    for pair in options.o:
        key, _, text = pair.partition("=")
        try:
            flags[key] = json.loads(text)
        except json.JSONDecodeError:
            flags[key] = text
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    with LLM(str(options.config), **flags) as llm:
        print(f"{options.config.name}, {llm.info.dtype}, ready after {time.perf_counter() - began:.1f} s")
        floor = floor_of(llm, config, options)
        run(llm, [[11, 12, 13, 14]], 2)
        # The profiler's own first start takes seconds, and is not what is to be seen.
        profiled(llm, [[11, 12, 13, 14]], 2, device)
        for batch in options.batch:
            show_batch(llm, batch, options, floor, device)
        for length in options.prefill:
            show_prefill(llm, length, options, floor, device)


if __name__ == "__main__":
    main()
