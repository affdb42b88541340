"""Counters against what clients saw: sums, counts, times, closed labels, zero at idle."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import httpx
import pytest

from samovar.core.events import GenerationEvent
from samovar.core.outputs import EngineStats
from samovar.core.sequence import FinishReason
from samovar.engine.metrics import Rates, ServingMetrics, token_buckets
from samovar.text.prepare import Preparer
from tests.server.live import LiveServer, live_server
from tests.server.scripted_engine import ScriptedEngine, engine_facts
from tests.server.test_disconnect import post, until
from tests.server.wire import CHAT, COMPLETIONS, HELLO, metrics_of, stream

STEP = 0.02


@pytest.fixture
def own(preparer: Preparer) -> Iterator[LiveServer]:
    """A server of its own: 20 tokens, one each 20 ms, after 100 ms of prefill."""
    script = lambda r, i: [-1] if r.params.seed == 13 else [5] * 300 if r.params.seed == 7 else [5] * 19  # noqa: E731
    with live_server(lambda: ScriptedEngine(script, step_seconds=STEP, delay=0.1), preparer) as running:
        yield running


def test_sums_equal_usage(own: LiveServer) -> None:
    """B176: tokens as in usage; accepted == ended; one first token per request that had one; gauges 0 at idle."""
    with httpx.Client(base_url=own.url, verify=False, timeout=30) as http:
        prompt = completion = with_token = 0
        bodies = [
            (CHAT, {"messages": HELLO}), (CHAT, {"messages": HELLO, "n": 3}), (COMPLETIONS, {"prompt": ["a", "bc"], "n": 2}),
            (COMPLETIONS, {"prompt": "x", "max_tokens": 0}), (COMPLETIONS, {"prompt": "x", "max_tokens": 4}),
        ]  # fmt: skip
        for path, body in bodies:
            for streamed in (False, True):
                if streamed:
                    usage = stream(http, path, **body, stream_options={"include_usage": True})[-1]["usage"]
                else:
                    usage = http.post(path, json=body).json()["usage"]
                prompt += usage["prompt_tokens"]
                completion += usage["completion_tokens"]
                requests = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
                with_token += requests if usage["completion_tokens"] else 0
        rows = metrics_of(http)
        assert rows["vllm:prompt_tokens_total"] == prompt and rows["vllm:generation_tokens_total"] == completion
        assert rows["vllm:time_to_first_token_seconds_count"] == with_token == 10
        assert rows["vllm:e2e_request_latency_seconds_count"] == rows["samovar:requests_accepted_total"] == 12
        assert (
            rows["vllm:request_generation_tokens_sum"] == completion
            and rows["vllm:request_prompt_tokens_sum"] == prompt
        )
        assert rows["vllm:inter_token_latency_seconds_count"] == completion - 18

        failed = http.post(CHAT, json={"messages": HELLO, "seed": 13})
        assert failed.status_code == 500
        sock = post(own, CHAT, {"messages": HELLO, "seed": 7, "stream": True})
        until(lambda: own.engine.num_running == 1)
        time.sleep(0.2)
        sock.close()  # type: ignore[attr-defined]
        until(lambda: own.engine.num_running == own.engine.stats.num_running == 0)
        rows = metrics_of(http)
        by_reason = {k: v for k, v in rows.items() if k.startswith("vllm:request_success_total")}
        assert {re.findall(r'finished_reason="(\w+)"', k)[0]: v for k, v in by_reason.items()} == {
            "stop": 4, "length": 8, "abort": 1, "error": 1,
        }  # fmt: skip
        assert sum(by_reason.values()) == rows["samovar:requests_accepted_total"] == 14
        assert rows["vllm:time_to_first_token_seconds_count"] == 11
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "samovar:requests_in_flight"):
            assert rows[gauge] == 0


def test_times_are_a_clients_times(own: LiveServer) -> None:
    """B175: first token and inter-token times agree with a client's clock."""
    with httpx.Client(base_url=own.url, verify=False, timeout=30) as http:
        began = time.monotonic()
        stamps = []
        with http.stream("POST", COMPLETIONS, json={"prompt": "x", "max_tokens": 15, "stream": True}) as answer:
            for part in answer.iter_raw():
                stamps += [time.monotonic()] * part.count(b'"text":"')
        rows = metrics_of(http)
        ttft = rows["vllm:time_to_first_token_seconds_sum"]
        assert 0.1 <= ttft <= stamps[0] - began + 0.005
        assert ttft == pytest.approx(stamps[0] - began, rel=0.5)
        gaps = rows["vllm:inter_token_latency_seconds_sum"]
        assert gaps == pytest.approx(stamps[14] - stamps[0], rel=0.25)
        assert rows["vllm:inter_token_latency_seconds_count"] == 14 and gaps / 14 >= STEP * 0.9
        assert rows["vllm:request_queue_time_seconds_sum"] == pytest.approx(0.1, abs=0.05)
        assert rows["vllm:e2e_request_latency_seconds_sum"] >= ttft + gaps * 0.9


def test_exposition(server: LiveServer, http: httpx.Client) -> None:
    """Names dashboards read are there; names of P0 rows byte for byte; buckets grow; labels come from closed sets."""
    http.request("BREW", "/v1/chat/completions")
    http.get("/v1/models/" + "x" * 50)
    http.get("/some/path/" + "y" * 50)
    text = http.get("/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
        "request_success_total", "admission_rejections_total", "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_sum", "request_time_per_output_token_seconds_count", "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket", "request_inference_time_seconds_bucket", "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket", "request_prompt_tokens_bucket", "request_params_n_bucket",
        "request_params_max_tokens_bucket", "iteration_tokens_total_bucket", "cache_config_info",
    ):  # fmt: skip
        assert f"\nvllm:{name}{{" in text, name
    assert "BREW" not in text and "xxxxx" not in text and "yyyyy" not in text
    handlers = set(re.findall(r'handler="([^"]*)"', text))
    assert handlers <= {*http.get("/openapi.json").json()["paths"], "other"}
    counts = [float(v) for v in re.findall(r"vllm:time_to_first_token_seconds_bucket{.*} (\S+)", text)]
    assert counts == sorted(counts) and len(counts) == 23


def test_gauges_are_never_negative() -> None:
    """A snapshot with nonsense in it does not reach a dashboard."""
    metrics = ServingMetrics("m", engine_facts())
    metrics.take_snapshot(EngineStats(num_running=-1, num_waiting=-5, kv_cache_usage=-0.5))
    for line in metrics.render().decode().splitlines():
        if line.startswith(("vllm:num_requests", "vllm:kv_cache")):
            assert float(line.rsplit(" ", 1)[1]) == 0


def test_a_record_ends_once(preparer: Preparer) -> None:
    """Preemption, aborts and n > 1 do not count a request twice: the worst reason of its choices, once."""
    metrics = ServingMetrics("m", engine_facts())
    request = preparer.from_ids([1], preparer.params({"n": 3}))
    record = metrics.begin(request)
    for index, reason in enumerate((FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP)):
        record.take(GenerationEvent(index=index, token_ids=[1, 2], finish_reason=reason), time.monotonic())
    for _ in range(3):
        record.end(abandoned=False, failed=False)
    assert metrics.finished == {FinishReason.LENGTH: 1} and metrics.in_flight == 0
    assert metrics.generation_tokens == 6 and metrics.prompt_tokens == 1


def test_statistics_line() -> None:
    """G40: rates since the last line, the queue, the cache; says whether anything happened."""
    metrics = ServingMetrics("m", engine_facts())
    rates = Rates(metrics, 0.0)
    assert rates.line(10.0)[1] is False
    metrics.prompt_tokens, metrics.generation_tokens = 100, 50
    metrics.take_snapshot(
        EngineStats(num_running=2, num_waiting=1, kv_cache_usage=0.25, prefix_cache_queries=10, prefix_cache_hits=5)
    )
    text, is_busy = rates.line(20.0)
    assert is_busy and re.fullmatch(
        r"prompt 10\.0 tokens/s, generation 5\.0 tokens/s, running 2, waiting 1, preemptions 0, "
        r"KV cache 25\.0%, prefix hits 50\.0%", text,
    )  # fmt: skip


def test_token_buckets() -> None:
    """1-2-5 up to the context."""
    assert token_buckets(512) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
