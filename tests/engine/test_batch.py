"""run_batch on requests whose ids become nothing else: taken in at once, they give what each taken in alone gives."""

from __future__ import annotations

from typing import Any

import pytest

from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.engine import batch
from samovar.engine.batch import run_batch
from samovar.engine.metrics import ServingMetrics
from tests.engine.fakes import FakeWorker, expected, fake_engine, fake_info


def served(num_blocks: int, **options: Any) -> tuple[list[tuple[Any, ...]], dict[str, Any], ServingMetrics]:
    """Outputs, counts and metrics of requests of several kinds, those with one choice and no logprobs among them."""
    worker = FakeWorker(num_blocks)
    engine = fake_engine(worker, max_num_seqs=6, **options)
    metrics = ServingMetrics("fake", fake_info(worker))
    requests = []
    for i in range(12):
        params = SamplingParams(max_tokens=1 + 5 * i, n=1 + (i % 4 == 3), temperature=1.0, ignore_eos=True)
        prompt = [3 + i] * (1 + 7 * i % 40)
        request = Request(request_id=f"r{i}", prompt_token_ids=prompt, params=params, eos_token_ids=[], arrival=0.0)
        requests.append((request, None))
    outputs = run_batch(engine, None, requests, metrics)
    engine.close()
    said = [
        (o.request_id, o.finished, o.num_cached_tokens, [(c.token_ids, c.text, c.finish_reason) for c in o.outputs])
        for o in outputs
    ]
    for (request, _), output in zip(requests, outputs, strict=True):
        for choice in output.outputs:
            assert choice.token_ids == expected(request.prompt_token_ids, request.params.max_tokens or 0)
    counts = {name: sum(one.counts) for name, one in metrics.histograms.items()}
    counts |= {"generation": metrics.generation_tokens, "prompt": metrics.prompt_tokens, "ended": metrics.finished}
    for name in ("request_generation_tokens", "request_max_num_generation_tokens"):
        counts[f"{name} sum"] = metrics.histograms[name].total
    return said, counts, metrics


@pytest.mark.parametrize(("num_blocks", "overlap"), [(64, True), (64, False), (13, True)])
def test_taken_in_at_once(num_blocks: int, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few blocks sequences are preempted: their tokens do not come with every step."""
    said, counts, metrics = served(num_blocks, overlap=overlap)
    monkeypatch.setattr(batch, "_take_bare", lambda outputs, *_: outputs)
    alone, counts_alone, _ = served(num_blocks, overlap=overlap)
    assert said == alone
    del counts["iteration_tokens_total"], counts_alone["iteration_tokens_total"]
    assert counts == counts_alone
    gaps = metrics.histograms["inter_token_latency_seconds"]
    per_token = metrics.histograms["request_time_per_output_token_seconds"]
    assert gaps.total > 0 and per_token.total > 0
    if num_blocks == 13:
        assert metrics.stats.num_preemptions > 0
