"""What the server counts, under vLLM's metric names, and the exact rules. Torch-free; no global registry.

Rules. A request is one `core.Request` that the engine client accepted, whatever its `n`. It ends exactly once, with
the reason of its worst choice (error, abort, length, stop), so that at idle
`sum(vllm:request_success_total) == samovar:requests_accepted_total`. Time to first token is observed once for each
request that produced a token, at the first token of any choice. Tokens are counted as `usage` counts them: those
delivered to the caller. Latencies that a client can see are taken with the front end's clock when the tokens arrive;
queue, prefill and decode times come from the engine's own stamps. Gauges and cache counters are the engine's latest
snapshot. Every label value comes from a closed set.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from samovar.core.events import GenerationEvent
from samovar.core.outputs import EngineInfo, EngineStats, SequenceTiming
from samovar.core.request import Request
from samovar.core.sequence import FinishReason
from samovar.engine.conversation import OVERLOAD_REASONS

REJECTION_REASONS = (*OVERLOAD_REASONS, "other")
HTTP_METHODS = ("GET", "POST", "OPTIONS", "HEAD", "other")

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_CHOICES = (1, 2, 5, 10, 20)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FEW = (0, 1, 2, 5, 10, 20, 50)
_REASON_ORDER = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)


def token_buckets(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `most`."""
    bounds: list[float] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > most:
                return tuple(bounds) or (1.0,)
            bounds.append(digit * scale)
        scale *= 10


class Histogram:
    """Counts per bucket, and the sum. One thread writes; bounds are inclusive and ascending."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as the exposition format wants them."""
        running = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            rows.append(("+Inf" if bound == float("inf") else str(float(bound)), running))
        return rows


HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Arrival to the first token at the front end.", _TTFT),
    "inter_token_latency_seconds": ("Time between tokens of one choice.", _TOKEN),
    "request_time_per_output_token_seconds": ("Mean time per token after the first, per request.", _TOKEN),
    "e2e_request_latency_seconds": ("Arrival to the end of a request.", _LATENCY),
    "request_queue_time_seconds": ("Arrival to the first step of a request.", _LATENCY),
    "request_inference_time_seconds": ("First step to the last token.", _LATENCY),
    "request_prefill_time_seconds": ("First step to the first token.", _LATENCY),
    "request_decode_time_seconds": ("First token to the last.", _LATENCY),
    "request_params_n": ("Choices asked for.", _CHOICES),
    "iteration_tokens_total": ("Tokens computed per step.", _STEP_TOKENS),
    "request_num_preemptions": ("Preemptions of a request.", _FEW),
}
TOKEN_HISTOGRAMS: dict[str, str] = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens delivered by a request.",
    "request_max_num_generation_tokens": "Tokens delivered by the longest choice of a request.",
    "request_params_max_tokens": "max_tokens of a request, after clamping.",
    "request_prefill_kv_computed_tokens": "Prompt tokens computed, not taken from the cache.",
}


class ServingMetrics:
    """Counters of one front end. Belongs to one event loop; `render` may be called at any time on it."""

    def __init__(self, model_name: str, info: EngineInfo) -> None:
        self.labels = {"model_name": model_name, "engine": "0"}
        self.info = info
        self.stats = EngineStats()
        self.accepted = self.prompt_tokens = self.generation_tokens = self.cached_tokens = self.in_flight = 0
        self.finished: Counter[FinishReason] = Counter()
        self.rejected: Counter[str] = Counter()
        self.http: Counter[tuple[str, str, str]] = Counter()
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        tokens = token_buckets(info.max_model_len)
        self.histograms |= {name: Histogram(tokens) for name in TOKEN_HISTOGRAMS}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Exposition(self))
        ProcessCollector(registry=self._registry)

    def begin(self, request: Request) -> RequestRecord:
        """Count an accepted request; the record must be ended exactly once."""
        self.accepted += 1
        self.in_flight += 1
        return RequestRecord(self, request)

    def withdraw(self, record: RequestRecord, reason: str) -> None:
        """A queue limit refused the request after all: it was not accepted, and its record has ended."""
        record.is_ended = True
        self.accepted -= 1
        self.in_flight -= 1
        self.rejected[reason if reason in REJECTION_REASONS else "other"] += 1

    def take_snapshot(self, stats: EngineStats) -> None:
        """Keep the engine's latest snapshot; steps it reports are observed once."""
        self.stats = stats
        observe = self.histograms["iteration_tokens_total"].observe
        for tokens in stats.step_tokens:
            observe(tokens)

    def count_tokens(self, count: int, gap: float) -> None:
        """Count `count` tokens, each of which came `gap` seconds after the one before it of its choice."""
        self.generation_tokens += count
        self.histograms["inter_token_latency_seconds"].observe(gap, count)

    def count_http(self, route: str, method: str, status: int) -> None:
        """Count one answer. `route` is a path of the route table or "other"."""
        self.http[route, method if method in HTTP_METHODS else "other", f"{status // 100}xx"] += 1

    def families(self) -> Iterable[Metric]:
        """Every metric of this front end as it is now, without those of the process."""
        return _Exposition(self).collect()

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)


class RequestRecord:
    """What is measured about one request while it runs."""

    __slots__ = (
        "_arrival", "_first", "_has_output", "_last", "_metrics", "_num_cached", "_num_prompt", "_params", "_timings",
        "_tokens", "is_ended", "reason",
    )  # fmt: skip

    def __init__(self, metrics: ServingMetrics, request: Request) -> None:
        self._metrics = metrics
        self._arrival = request.arrival
        self._params = request.params
        self._num_prompt = len(request.prompt_token_ids)
        self._num_cached = 0
        self._has_output = False
        self._first = 0.0
        self._last: dict[int, float] = {}
        self._tokens = [0] * request.params.n
        self._timings: list[SequenceTiming] = []
        self.reason: FinishReason | None = None
        self.is_ended = False

    def take(self, event: GenerationEvent, now: float) -> None:
        """Count what `event` delivers; `now` is `time.monotonic()` when it arrived."""
        metrics = self._metrics
        if not self._has_output:
            self._has_output = True
            metrics.prompt_tokens += self._num_prompt
            self._num_cached = event.num_cached_tokens
            metrics.cached_tokens += self._num_cached
        count = len(event.token_ids)
        if count:
            self._count_tokens(event.index, count, now)
        if event.finish_reason is not None:
            self._note_end(event.finish_reason)
            if event.timing is not None:
                self._timings.append(event.timing)

    def catch_up(self, num_tokens: int, last: float) -> None:
        """The only choice has `num_tokens` by now, which `ServingMetrics.count_tokens` counted; the last came at `last`."""
        self._tokens[0] = num_tokens
        self._last[0] = last

    def _count_tokens(self, index: int, count: int, now: float) -> None:
        metrics = self._metrics
        self._tokens[index] += count
        if not self._first:
            self._first = now
            metrics.histograms["time_to_first_token_seconds"].observe(now - self._arrival)
        previous = self._last.get(index)
        if previous is None:
            metrics.generation_tokens += count
        else:
            metrics.count_tokens(count, (now - previous) / count)
        self._last[index] = now

    def _note_end(self, reason: FinishReason) -> None:
        if self.reason is None or _REASON_ORDER.index(reason) > _REASON_ORDER.index(self.reason):
            self.reason = reason

    def end(self, *, abandoned: bool, failed: bool) -> None:
        """The request is over. `abandoned`: the caller left; `failed`: it ended in an error. Later calls do nothing."""
        if self.is_ended:
            return
        self.is_ended = True
        metrics, seen = self._metrics, self._metrics.histograms
        metrics.in_flight -= 1
        reason = FinishReason.ERROR if failed else FinishReason.ABORT if abandoned else self.reason
        reason = reason or FinishReason.ABORT
        metrics.finished[reason] += 1
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            return
        now = time.monotonic()
        total = sum(self._tokens)
        seen["e2e_request_latency_seconds"].observe(now - self._arrival)
        seen["request_prompt_tokens"].observe(self._num_prompt)
        seen["request_generation_tokens"].observe(total)
        seen["request_max_num_generation_tokens"].observe(max(self._tokens))
        seen["request_params_n"].observe(self._params.n)
        seen["request_params_max_tokens"].observe(self._params.max_tokens or 0)
        seen["request_prefill_kv_computed_tokens"].observe(self._num_prompt - self._num_cached)
        longest = max(self._tokens)
        if longest > 1:
            seen["request_time_per_output_token_seconds"].observe(
                (max(self._last.values()) - self._first) / (longest - 1)
            )
        self._observe_engine_times()

    def _observe_engine_times(self) -> None:
        """Queue, prefill and decode as the engine stamped them: first choice to start, last one to end."""
        started = [t for t in self._timings if t.first_scheduled]
        seen = self._metrics.histograms
        seen["request_num_preemptions"].observe(sum(t.num_preemptions for t in self._timings))
        if not started:
            return
        scheduled = min(t.first_scheduled for t in started)
        seen["request_queue_time_seconds"].observe(max(0.0, scheduled - self._arrival))
        first = min((t.first_token for t in started if t.first_token), default=0.0)
        if not first:
            return
        last = max(t.last_token for t in started)
        seen["request_prefill_time_seconds"].observe(first - scheduled)
        seen["request_decode_time_seconds"].observe(last - first)
        seen["request_inference_time_seconds"].observe(last - scheduled)


class _Exposition(Collector):
    """Turns the counters into metric families when scraped."""

    def __init__(self, metrics: ServingMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        m, labels = self._metrics, list(self._metrics.labels)
        stats = m.stats
        rows = (
            ("vllm:num_requests_running", "Sequences in execution.", stats.num_running),
            ("vllm:num_requests_waiting", "Sequences in the queue.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Used part of the K/V cache, 0 to 1.", stats.kv_cache_usage),
            ("samovar:kv_cache_free_blocks", "Free K/V blocks.", stats.num_free_blocks),
            ("samovar:requests_in_flight", "Requests that the front end has not finished.", m.in_flight),
        )
        for name, text, value in rows:
            family = GaugeMetricFamily(name, text, labels=labels)
            family.add_metric(list(m.labels.values()), max(0.0, value))
            yield family
        i = m.info
        cache = {
            "block_size": i.block_size, "num_gpu_blocks": i.num_blocks, "cache_dtype": i.kv_cache_dtype,
            "enable_prefix_caching": i.prefix_caching, "engine": "0",
        }  # fmt: skip
        config = GaugeMetricFamily("vllm:cache_config_info", "Settings of the K/V cache.", labels=list(cache))
        config.add_metric([str(value) for value in cache.values()], 1)
        yield config

    def _counters(self) -> Iterator[Metric]:
        m, values = self._metrics, list(self._metrics.labels.values())
        stats = m.stats
        rows = (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("vllm:num_preemptions", "Preemptions.", stats.num_preemptions),
            ("vllm:prompt_tokens", "Prompt tokens of requests that produced output.", m.prompt_tokens),
            ("vllm:generation_tokens", "Tokens delivered.", m.generation_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", m.cached_tokens),
            ("samovar:requests_accepted", "Requests the engine accepted.", m.accepted),
            ("samovar:engine_steps", "Steps run.", stats.num_steps),
            ("samovar:engine_step_seconds", "Seconds spent in steps.", stats.step_seconds),
            ("samovar:engine_host_seconds", "Seconds the engine worked on its host between steps.", stats.host_seconds),
        )
        for name, text, value in rows:
            family = CounterMetricFamily(name, text, labels=list(m.labels))
            family.add_metric(values, value)
            yield family
        ended = CounterMetricFamily("vllm:request_success", "Ended requests.", labels=[*m.labels, "finished_reason"])
        for reason in FinishReason:
            ended.add_metric([*values, reason.value], m.finished[reason])
        yield ended
        refused = CounterMetricFamily("vllm:admission_rejections", "Refused requests.", labels=["model_name", "reason"])
        for name in REJECTION_REASONS:
            refused.add_metric([values[0], name], m.rejected[name])
        yield refused
        http = CounterMetricFamily("http_requests", "Answers.", labels=["handler", "method", "status"])
        for key, count in list(m.http.items()):
            http.add_metric(list(key), count)
        yield http

    def _histograms(self) -> Iterator[Metric]:
        m = self._metrics
        texts = {name: text for name, (text, _) in HISTOGRAMS.items()} | TOKEN_HISTOGRAMS
        for name, histogram in m.histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", texts[name], labels=list(m.labels))
            family.add_metric(list(m.labels.values()), histogram.cumulative(), histogram.total)
            yield family


class Rates:
    """Builds the periodic log line: rates since the last call, and the queue as it stands."""

    def __init__(self, metrics: ServingMetrics, now: float) -> None:
        self._metrics = metrics
        self._then = now
        self._totals = self._read()

    def _read(self) -> tuple[int, int, int, int]:
        m = self._metrics
        return m.prompt_tokens, m.generation_tokens, m.stats.prefix_cache_queries, m.stats.prefix_cache_hits

    def line(self, now: float) -> tuple[str, bool]:
        """(text, whether anything happened since the last line)."""
        seconds = max(now - self._then, 1e-9)
        totals = self._read()
        prompt, generated, queries, hits = (new - old for new, old in zip(totals, self._totals, strict=True))
        self._then, self._totals = now, totals
        stats = self._metrics.stats
        text = (
            f"prompt {prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s, "
            f"running {stats.num_running}, waiting {stats.num_waiting}, preemptions {stats.num_preemptions}, "
            f"KV cache {stats.kv_cache_usage:.1%}, prefix hits {hits / queries if queries else 0.0:.1%}"
        )
        return text, bool(prompt or generated or stats.num_running or stats.num_waiting)
