"""Run as a program: load a dummy SmolLM2, fill every slot, print the peak of the process and what was planned for it.

Prints two integers, bytes: the measured peak, and the plan with only those cache pages that were written.
"""

from __future__ import annotations

import random
from pathlib import Path

from samovar.config.description import ModelDescription
from samovar.config.engine import EngineConfig
from samovar.config.groups import CacheConfig, ModelConfig, SchedulerConfig
from samovar.core.sampling_params import SamplingParams
from samovar.core.step import ScheduledSequence, ScheduledStep, SlotStart
from samovar.hardware.device import probe
from samovar.worker.worker import Worker

SLOTS, PROMPT = 128, 16
PARAMS = SamplingParams(
    top_p=0.95, top_k=5000, min_p=1e-4, repetition_penalty=1.1, logprobs=5, prompt_logprobs=3, max_tokens=9
)


SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 1e5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


def main() -> None:
    described = ModelDescription(
        path=Path("dummy"),
        format="dummy",
        architecture="LlamaForCausalLM",
        config=SMOLLM2,
        max_position_embeddings=8192,
    )
    config = EngineConfig(
        model=ModelConfig(dtype="bfloat16", load_format="dummy", max_model_len=2048),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=2048),
    )
    worker = Worker(config, described, probe("cpu"))
    worker.load()
    starts = [
        SlotStart(slot, PARAMS, [random.randrange(49152) for _ in range(PROMPT)], PROMPT, [], slot)
        for slot in range(SLOTS)
    ]
    prefill = [
        ScheduledSequence(s.slot, 0, PROMPT, s.token_ids, [2 * s.slot, 2 * s.slot + 1], True, PROMPT, PROMPT - 1)
        for s in starts
    ]
    results = [worker.execute(ScheduledStep(0, starts, [], prefill))]
    for end in range(PROMPT + 1, PROMPT + 4):
        decode = [ScheduledSequence(slot, end - 1, 1, [], [], True, end) for slot in range(SLOTS)]
        results.append(worker.execute(ScheduledStep(end, [], [], decode)))
    assert all(len(result.sampled) == SLOTS for result in results)
    lines = dict(worker.memory_plan.lines)
    written = 2 * SLOTS * lines["kv cache"] // worker.num_blocks
    print(worker.memory_reading()[1], sum(lines.values()) - lines["kv cache"] + written)


if __name__ == "__main__":
    main()
