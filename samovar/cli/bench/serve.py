"""Measures a running server under load. Names of options and of the figures in the JSON are those of vLLM's `bench serve`."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any

from samovar.cli.bench.circumstances import described, software
from samovar.cli.bench.dataset import DatasetOptions, Sample, samples
from samovar.cli.bench.figures import parse_percents, save, spread
from samovar.cli.bench.load import Schedule, Target, Timing, run_load, send
from samovar.cli.http_stream import Address, RequestRefused, ServerUnreachable, authorization, get_json, request
from samovar.cli.output import ProgressLine, table
from samovar.config.field import Group, field
from samovar.config.load import Settings
from samovar.errors import ConfigError, SamovarError

USAGE = "samovar bench serve [flags]"
POSITIONAL = None
PATHS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
METRICS = ("ttft", "tpot", "itl", "e2el")
TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between pieces",
    "e2el": "whole request",
}


class TargetOptions(Group):
    """Where requests go."""

    backend: str = field(default="openai", choices=tuple(PATHS))
    """Kind of endpoint; vllm is another name for openai (completions)."""
    base_url: str | None = field(default=None)
    """Address without path. Default: made of --host and --port."""
    host: str = field(default="127.0.0.1")
    """Host of the server."""
    port: int = field(default=8000, ge=1, le=65535)
    """Port of the server."""
    endpoint: str | None = field(default=None)
    """Path to post to. Default: that of the backend."""
    model: str | None = field(default=None, flags=("--served-model-name",))
    """Model to ask for. Default: the server's first."""
    api_key: str | None = field(default=None, env="SAMOVAR_API_KEY")
    """Key to send."""
    header: list[str] = field(factory=list)
    """NAME=VALUE, repeatable: headers of every request."""
    extra_body: dict[str, Any] = field(factory=dict)
    """JSON object laid over every request body, such as sampling settings."""
    ignore_eos: bool = field(default=False)
    """Generate exactly the asked number of tokens."""
    ready_check_timeout_sec: int = field(default=600, ge=0)
    """Seconds to wait until the server answers."""


class LoadOptions(Group):
    """When requests start, and what becomes of the figures."""

    request_rate: float = field(default=math.inf, ge=0.001)
    """Requests per second; inf sends all at once."""
    burstiness: float = field(default=1.0, ge=0.01)
    """1 is a Poisson process; less is burstier, more is more even."""
    max_concurrency: int | None = field(default=None, ge=1)
    """Requests that may run at the same time."""
    num_warmups: int = field(default=1, ge=0)
    """Requests sent before the clock starts."""
    seed: int = field(default=0)
    """Seed of prompts and arrivals."""
    percentile_metrics: str = field(default="ttft,tpot,itl,e2el")
    """Metrics to report percentiles of."""
    metric_percentiles: str = field(default="50,90,99")
    """Percentiles to report."""
    goodput: list[str] = field(factory=list)
    """METRIC:MILLISECONDS, several: count requests that meet all of them."""
    save_result: bool = field(default=False)
    """Write the figures to a JSON file."""
    save_detailed: bool = field(default=False)
    """Write the times and texts of every request too."""
    result_dir: str = field(default=".")
    """Folder of the JSON file."""
    result_filename: str | None = field(default=None)
    """Name of the JSON file. Default: made of backend, rate, model and time."""
    metadata: list[str] = field(factory=list)
    """NAME=VALUE, several: written into the JSON as they are."""
    disable_tqdm: bool = field(default=False)
    """No progress line."""


OPTIONS = (TargetOptions, DatasetOptions, LoadOptions)


def run(settings: Settings) -> int:
    """Send the load, print the figures; exit code 1 if no request succeeded."""
    result = asyncio.run(measure(settings))
    print(report(result))
    print(described(result["circumstances"]))
    load = settings[LoadOptions]
    if load.save_result or load.save_detailed or load.result_filename:
        name = load.result_filename or f"{result['backend']}-{load.request_rate:g}qps-{result['date']}.json"
        kept = result if load.save_detailed else {k: v for k, v in result.items() if k not in DETAILS}
        save(f"{load.result_dir}/{name}", kept)
    return 0 if result["completed"] else 1


async def measure(settings: Settings) -> dict[str, Any]:
    """The whole run as one flat result."""
    options, load = settings[TargetOptions], settings[LoadOptions]
    limits, percents = parse_goodput(load.goodput), parse_percents(load.metric_percentiles)
    wanted = parse_metrics(load.percentile_metrics)
    target = await make_target(options)
    chosen = samples(settings[DatasetOptions], load.seed)
    is_random = settings[DatasetOptions].dataset_name in ("random", "mixed")
    asked = [(sample, await exact_ids(target, sample) if is_random else None) for sample in chosen]
    for index in range(load.num_warmups):
        timing = await send(target, *asked[index % len(asked)])
        if timing.error:
            raise SamovarError(f"{target.address}: the first request failed: {timing.error}")
    schedule = Schedule(load.request_rate, load.burstiness, load.max_concurrency, load.seed)
    with ProgressLine("requests") as progress:
        timings, seconds = await run_load(target, asked, schedule, progress if not load.disable_tqdm else _ignore)
    head: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "model_id": target.model,
        "num_prompts": len(asked),
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
    }
    head |= dict(pair.partition("=")[::2] for pair in load.metadata)
    # What runs behind the address is the server's own; its version is all it says.
    head["circumstances"] = software() | {"server_version": await server_version(target)}
    return head | figures(timings, seconds, wanted, percents) | goodput(timings, seconds, limits) | details(timings)


def _ignore(done: int, total: int) -> None:
    """No progress line."""


async def make_target(options: TargetOptions) -> Target:
    """Wait for the server and find the model's name. Raises `ServerUnreachable` when it does not come up."""
    address = Address.parse(options.base_url or f"http://{options.host}:{options.port}")
    headers = authorization(options.api_key) | dict(pair.partition("=")[::2] for pair in options.header)
    end = time.monotonic() + options.ready_check_timeout_sec
    while True:
        try:
            models = await get_json(address, "/v1/models", headers)
            break
        except (ServerUnreachable, RequestRefused) as error:
            is_starting = isinstance(error, ServerUnreachable) or error.status == 503
            if not is_starting or time.monotonic() > end:
                raise
            await asyncio.sleep(0.2)
    names = [entry["id"] for entry in models.get("data", [])]
    if not names and options.model is None:
        raise SamovarError(f"{address} serves no model")
    extra = options.extra_body | ({"ignore_eos": True} if options.ignore_eos else {})
    path = options.endpoint or PATHS[options.backend]
    return Target(address, path, options.model or names[0], headers, extra)


async def server_version(target: Target) -> str | None:
    """The version that the server reports; None where it has no /version."""
    try:
        answer = await get_json(target.address, "/version", target.headers)
    except (RequestRefused, ValueError):
        return None
    return str(answer["version"]) if isinstance(answer, dict) and "version" in answer else None


async def exact_ids(target: Target, sample: Sample) -> list[int] | None:
    """Token ids of exactly the sample's length, from the server's own /tokenize; None where it has none, or for chat."""
    if target.is_chat:
        return None
    body = {"model": target.model, "prompt": sample.text, "add_special_tokens": False}
    try:
        async with request(target.address, "POST", "/tokenize", body, target.headers) as answer:
            ids: list[int] = json.loads(await (await answer.check()).body())["tokens"]
    except (RequestRefused, ValueError, KeyError):
        return None
    return (ids * (sample.num_tokens // len(ids) + 1))[: sample.num_tokens] if ids else None


def parse_metrics(text: str) -> list[str]:
    """ "ttft,tpot" -> the names. Raises `ConfigError`."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics {name}: there are {', '.join(METRICS)}")
    return names


def parse_goodput(pairs: list[str]) -> dict[str, float]:
    """["ttft:200"] -> {"ttft": 0.2} in seconds. Raises `ConfigError`."""
    limits = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        try:
            limits[name] = float(text) / 1000
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2el"):
            raise ConfigError(f"--goodput must be ttft, tpot or e2el with milliseconds, such as ttft:200, got {pair!r}")
    return limits


def figures(timings: list[Timing], seconds: float, wanted: list[str], percents: list[float]) -> dict[str, Any]:
    """Counts, throughputs and spreads of the requests that succeeded."""
    good = [timing for timing in timings if not timing.error]
    prompt, output = sum(t.prompt_len for t in good), sum(t.output_len for t in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(timings) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        "max_concurrent_requests": most_at_once(good),
    }
    times = {
        "ttft": [t.ttft for t in good],
        "tpot": [t.tpot for t in good if t.output_len > 1],
        "itl": [gap for t in good for gap in t.itl],
        "e2el": [t.latency for t in good],
    }
    for name in wanted:
        result |= spread(name, times[name], percents)
    return result


def most_at_once(timings: list[Timing]) -> int:
    """Most requests that ran at the same time."""
    edges = sorted([(t.start, 1) for t in timings] + [(t.start + t.latency, -1) for t in timings])
    running = most = 0
    for _, change in edges:
        running += change
        most = max(most, running)
    return most


def goodput(timings: list[Timing], seconds: float, limits: dict[str, float]) -> dict[str, Any]:
    """Requests per second that met every limit; nothing if there are none."""
    if not limits:
        return {}
    good = [t for t in timings if not t.error]
    seen = [{"ttft": t.ttft, "tpot": t.tpot, "e2el": t.latency} for t in good]
    met = sum(all(one[name] <= limit for name, limit in limits.items()) for one in seen)
    return {"request_goodput": met / seconds}


DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")


def details(timings: list[Timing]) -> dict[str, Any]:
    """Every request's own figures, for --save-detailed."""
    return {
        "input_lens": [t.prompt_len for t in timings],
        "output_lens": [t.output_len for t in timings],
        "ttfts": [t.ttft for t in timings],
        "itls": [t.itl for t in timings],
        "start_times": [t.start for t in timings],
        "generated_texts": [t.text for t in timings],
        "errors": [t.error for t in timings],
    }


def report(result: dict[str, Any]) -> str:
    """The figures for people."""
    rows = [
        ("requests", f"{result['completed']} of {result['num_prompts']} succeeded in {result['duration']:.2f} s"),
        ("tokens", f"{result['total_input_tokens']:,} in, {result['total_output_tokens']:,} out"),
        ("throughput", f"{result['request_throughput']:.2f} requests/s, {result['output_throughput']:.1f} tokens/s out, "
                       f"{result['total_token_throughput']:.1f} tokens/s in all"),
        ("at once", f"{result['max_concurrent_requests']} requests"),
    ]  # fmt: skip
    if "request_goodput" in result:
        rows.append(("goodput", f"{result['request_goodput']:.2f} requests/s"))
    for name in METRICS:
        if f"mean_{name}_ms" in result:
            shown = [k for k in result if k.endswith(f"_{name}_ms") and not k.startswith(("std_", "median_"))]
            parts = [f"{key.split('_')[0]} {result[key]:.1f}" for key in shown]
            rows.append((f"{TITLES[name]} ({name})", "  ".join(parts) + " ms"))
    failures = sorted({error for error in result.get("errors", []) if error})
    rows += [("error", error) for error in failures[:3]]
    return table(rows, indent="")
