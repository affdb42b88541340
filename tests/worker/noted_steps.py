"""Random steps launch nothing that `warmup.note` did not name. Run as a module, without TRITON_INTERPRET; prints counts.

Arguments: a folder with a config.json, an architecture such as sm_90, a seed, perhaps a type of cache.
"""

from __future__ import annotations

import random
import sys

import torch

from samovar.cli.described import declare, look_up_for
from samovar.config.engine import EngineConfig, with_settings
from samovar.core.sampling_params import SamplingParams
from samovar.core.step import ScheduledSequence, ScheduledStep, SlotStart
from samovar.hardware.device import with_architecture
from samovar.kernels.triton_launch import noting
from samovar.worker.warmup import MetaStream, Shortcuts, note

SEQS, TOKENS = 40, 512


def random_step(step_id: int, rng: random.Random, length: int, block_size: int) -> ScheduledStep:
    """Decode only, prefill only, or both; every slot is taken anew."""
    count, kind = rng.randint(1, SEQS), rng.choice(["decode", "prefill", "mixed"])
    starts, sequences, left = [], [], TOKENS
    for slot in range(count):
        new = 1 if kind == "decode" or (kind == "mixed" and slot < count // 2) else rng.randint(1, TOKENS)
        new = min(new, left, length)
        if new == 0:
            break
        left -= new
        total = rng.choice([new, rng.randint(new, length)])
        params = SamplingParams(temperature=rng.choice([0.0, 0.7]), top_p=rng.choice([1.0, 0.5]))
        starts.append(SlotStart(slot, params, [0], 1, [], 0))
        blocks = list(range(-(-total // block_size)))
        samples = kind == "decode" or rng.random() < 0.8
        sequences.append(ScheduledSequence(slot, total - new, new, [0] * new, blocks, samples, total))
    return ScheduledStep(step_id, started=starts, freed_slots=list(range(SEQS)), sequences=sequences)


def main(folder: str, architecture: str, seed: str, cache: str = "auto") -> None:
    """Note, then launch random steps, and fail for a kernel that was not noted."""
    config = with_settings(EngineConfig(), model=folder, load_format="dummy", kv_cache_dtype=cache)
    config = with_settings(config, max_num_seqs=SEQS, max_num_batched_tokens=TOKENS)
    worker = declare(look_up_for(config, with_architecture(architecture)))
    noted = note(worker).launches
    rng, length, size = random.Random(int(seed)), worker.max_model_len, worker.config.cache.block_size
    with torch.inference_mode(), Shortcuts(), noting() as notes:
        runner = worker.make_runner(MetaStream.device, MetaStream())
        for step_id in range(60):
            runner.launch(random_step(step_id, rng, length, size))
    unknown = [f"{x.name} {x.arguments} {x.options}" for key, x in notes.launches.items() if key not in noted]
    assert not unknown, "\n".join(unknown)
    loaded = [name for name in ("sympy", "torch._dynamo", "torch._inductor", "transformers") if name in sys.modules]
    print(len(noted), len(notes.launches), *loaded)


if __name__ == "__main__":
    main(*sys.argv[1:])
