"""Masks through the whole worker, on a CPU and as a GPU runs steps: greedy decoding within them is Transformers' argmax."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from samovar.core.outputs import SequenceOutput
from samovar.core.request import Request
from samovar.engine.engine import Engine
from samovar.engine.executors.in_process import InProcessExecutor
from samovar.engine.executors.on_stream import StreamExecutor
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.scheduler import Scheduler
from samovar.worker.worker import Worker
from tests.engine.fakes import request
from tests.schedule.scripted import Script, ScriptedEnforcer, script_of
from tests.worker.host_stream import put_on_stream
from tests.worker.tiny_llama import BLOCK, CONTEXT, VOCAB, Oracle, make_worker, no_library, prompt


def asked(count: int) -> list[Request]:
    """Constrained and free ones in turn; some want logprobs, some have other rules, too."""
    rng = random.Random(8)
    requests = []
    for i in range(count):
        params = {"logprobs": 1} if i % 5 == 0 else {"logit_bias": {3: 4.0}} if i % 7 == 0 else {}
        one = request(prompt(rng.randint(1, 30), i), rng.randint(5, 40), temperature=0, ignore_eos=True, **params)
        script = Script(i, rng.randint(3, 60), free=rng.choice([0, 0, 3]), vocab=VOCAB)
        requests.append(replace(one, constraint=script.constraint()) if i % 2 else one)
    return requests


def expected(oracle: Oracle, one: Request) -> list[int]:
    script, ids, output = script_of(one), list(one.prompt_token_ids), list[int]()
    assert one.params.max_tokens is not None
    while len(output) < min(one.params.max_tokens, 999 if script is None else script.length):
        logits = oracle.logits(ids)[-1].clone()
        for token, bias in (one.params.logit_bias or {}).items():
            logits[token] += bias
        allowed = None if script is None else script.allowed(tuple(output))
        if allowed is not None:
            mask = torch.full_like(logits, -torch.inf)
            mask[list(allowed)] = 0
            logits = logits + mask
        output.append(int(logits.argmax()))
        ids.append(output[-1])
    return output


@pytest.mark.parametrize("kind", ["cpu", "graphs", "eager", "gathers"])
def test_masked_greedy_is_the_allowed_argmax(checkpoint: tuple[Path, Oracle], oracle: Oracle, kind: str) -> None:
    """Mixed batches, two steps in flight, preemption on a small pool: every token of every request."""
    if kind == "cpu":
        worker: Worker = make_worker(checkpoint[0])
    else:
        with no_library():
            worker = make_worker(checkpoint[0])
        put_on_stream(worker, kind)
    options = SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=32, block_size=BLOCK, max_model_len=CONTEXT)
    scheduler = Scheduler(options, 13, cache_specs=worker.cache_specs, enforcer=ScriptedEnforcer())
    engine = Engine(InProcessExecutor(worker) if kind == "cpu" else StreamExecutor(worker), scheduler)
    requests = asked(14)
    for one in requests:
        engine.add(one)
    got: dict[str, list[SequenceOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            got.setdefault(output.request_id, []).append(output)
    assert engine.stats().num_preemptions > 0
    engine.close()
    for one in requests:
        outputs = got[one.request_id]
        assert outputs[-1].error is None
        assert [t for output in outputs for t in output.token_ids] == expected(oracle, one)
