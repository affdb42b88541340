"""A worker with the CPU library: what it says about itself, its formats in memory, its caches, its plan; and without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from samovar.config.checkpoint import describe
from samovar.config.engine import EngineConfig, with_settings
from samovar.config.groups import CacheConfig, ModelConfig, SchedulerConfig
from samovar.core.sampling_params import SamplingParams
from samovar.hardware.device import probe
from samovar.native import library
from samovar.native.abi import Format
from samovar.native.library import NativeError
from samovar.sample.sampler import NOT_FINITE
from samovar.worker.model_runner import ModelRunner
from samovar.worker.native_runner import NativeRunner
from samovar.worker.worker import Worker
from tests.native.random_blocks import random_source
from tests.weights.gguf_files import finish, tiny_model, write_gguf
from tests.worker.tiny_llama import BLOCK, NUM_BLOCKS, Driver, Oracle, Run, make_worker, no_library, prompt

GREEDY = SamplingParams(temperature=0, max_tokens=8)
TWO_THREADS = replace(probe("cpu"), num_threads=2)


@pytest.fixture(autouse=True)
def needs_library() -> None:
    if library.find() is None:
        pytest.skip("the CPU kernels are not built")


def worker_of(path: Path, **settings: Any) -> Worker:
    """A worker that has loaded nothing yet."""
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="bfloat16", max_model_len=64),
        cache=CacheConfig(block_size=BLOCK, num_gpu_blocks_override=NUM_BLOCKS),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )
    return Worker(with_settings(config, **settings), describe(path, config.model), TWO_THREADS)


def outputs(worker: Worker, lengths: tuple[int, ...] = (3, 17, 40), **sampling: Any) -> list[list[int]]:
    """What greedy runs say that begin with random ids."""
    params = replace(GREEDY, **sampling)
    runs = [Run(slot, params, prompt(length, length)) for slot, length in enumerate(lengths)]
    Driver(worker).finish(runs)
    assert [run.error for run in runs] == [None] * len(runs)
    return [run.output for run in runs]


def line(worker: Worker, name: str) -> str:
    return next(text for text in worker.routes() if text.startswith(f"{name}: "))


def test_whole_steps_are_one_call(shared_worker: Worker) -> None:
    assert isinstance(shared_worker._runner, NativeRunner)
    assert shared_worker.dtype is torch.float32
    text = line(shared_worker, "model step")
    # Embedding, rope tables, five and one for attention in each of three layers, head, argmax.
    assert "whole step in one call: 22 instructions" in text and library.load().best_isa in text
    assert line(shared_worker, "weights") == "weights: 22 F32"


def test_without_the_library_torch_runs_and_says_so(checkpoint: tuple[Path, Oracle], oracle: Oracle) -> None:
    with no_library():
        worker = make_worker(checkpoint[0])
    assert line(worker, "model step").endswith("layer by layer, several times slower: left out by a test")
    assert type(worker._runner) is ModelRunner and worker.native is None
    assert outputs(worker, (5,)) == [oracle.greedy(prompt(5, 5), 8)]


def test_a_library_that_was_named_is_not_replaced_in_silence(
    checkpoint: tuple[Path, Oracle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMOVAR_NATIVE_LIBRARY", str(tmp_path / "gone.so"))
    library.load.cache_clear()
    try:
        with pytest.raises(NativeError, match=r"gone\.so"):
            worker_of(checkpoint[0])
    finally:
        monkeypatch.undo()
        library.load.cache_clear()


def test_eager_means_layer_by_layer(checkpoint: tuple[Path, Oracle], oracle: Oracle) -> None:
    """Packed weights all the same: one instruction at a time."""
    worker = worker_of(checkpoint[0], dtype="float32", enforce_eager=True)
    worker.load()
    assert type(worker._runner) is ModelRunner
    assert "layer by layer: --enforce-eager" in line(worker, "model step")
    assert outputs(worker, (5, 17)) == [oracle.greedy(prompt(length, length), 8) for length in (5, 17)]


def test_the_plan_is_what_is_held(checkpoint: tuple[Path, Oracle]) -> None:
    """Weights to the byte; memory of programs; what the team holds after a step of the largest size."""
    worker = worker_of(checkpoint[0])
    worker.load()
    lines, storages = dict(worker.memory_plan.lines), dict[int, int]()
    for layer in worker.model.modules():
        tensors = [getattr(layer, "weight", None), *vars(layer).get("weights", {}).values()]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert sum(storages.values()) == worker.weight_bytes == lines["weights"]
    runner = worker._runner
    assert isinstance(runner, NativeRunner)
    assert runner._native._memory.nbytes == lines["activations"]
    assert runner._native._logits.nbytes == lines["logits"]
    outputs(worker, (56,))
    assert worker.native is not None
    assert 0 < worker.native.team().num_bytes <= lines["kernel scratch"]


def test_asleep_there_are_no_threads(checkpoint: tuple[Path, Oracle], oracle: Oracle) -> None:
    worker = make_worker(checkpoint[0])
    expected = [oracle.greedy(prompt(5, 5), 8)]
    assert outputs(worker, (5,)) == expected
    worker.release_cache()
    assert worker.native is not None and worker.native._team is None
    worker.release_weights(2)
    worker.restore_weights()
    worker.restore_cache()
    assert outputs(worker, (5,)) == expected


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "fp8_e4m3", "int8"])
def test_caches_of_every_type(checkpoint: tuple[Path, Oracle], oracle: Oracle, kind: str) -> None:
    """Sixteen bits are multiplied as bfloat16 where the machine does so; keys of 8 bits err by about 3 %."""
    worker = worker_of(checkpoint[0], dtype="float32", kv_cache_dtype=kind)
    worker.load()
    cache = worker._runner._copy_blocks.__self__  # type: ignore[attr-defined, union-attr]
    assert cache.nbytes == dict(worker.memory_plan.lines)["kv cache"]
    run = Run(0, replace(GREEDY, max_tokens=1, logprobs=5), prompt(40, 40))
    Driver(worker).finish([run])
    exact = oracle.logits(run.prompt)[-1].log_softmax(-1).numpy()
    entry = run.logprobs[0]
    wide = 2e-2 if "float16" in kind else 0.15
    np.testing.assert_allclose(entry.logprobs, exact[entry.token_ids], atol=wide)


def test_a_broken_sequence_fails_alone(tmp_path: Path) -> None:
    """A token whose embedding is not finite, greedy and drawn: its neighbours say what they always say."""
    model = tiny_model("llama")
    write_gguf(tmp_path / "good.gguf", model)
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = torch.nan
    write_gguf(tmp_path / "bad.gguf", model)
    good, bad = worker_of(tmp_path / "good.gguf", dtype="float32"), worker_of(tmp_path / "bad.gguf", dtype="float32")
    for worker in (good, bad):
        worker.load()
    for params in (GREEDY, replace(GREEDY, temperature=0.8)):
        kept = [[i for i in prompt(length, length) if i != 77] for length in (5, 17)]
        expected = [Run(slot, params, ids, key=slot) for slot, ids in enumerate(kept)]
        Driver(good).finish(expected)
        runs = [Run(slot, params, ids, key=slot) for slot, ids in enumerate(kept)]
        poisoned = Run(5, params, [1, 77, 3])
        Driver(bad).finish([runs[0], poisoned, runs[1]])
        assert poisoned.error == NOT_FINITE
        if all(77 not in run.output for run in expected):
            assert [run.output for run in runs] == [run.output for run in expected]


def test_greedy_rows_get_the_same_with_and_without_logits(shared_worker: Worker) -> None:
    """The library's argmax and the sampler's; rows with logprobs go through the sampler."""
    plain = outputs(shared_worker)
    shared_worker.reset_cache()
    assert outputs(shared_worker, logprobs=0) == plain
    shared_worker.reset_cache()


MIXED = {
    "attn_q": Format.Q4_K, "attn_k": Format.Q6_K, "attn_v": Format.Q8_0, "attn_output": Format.Q5_K,
    "ffn_gate": Format.Q4_0, "ffn_up": Format.IQ4_XS, "ffn_down": Format.Q3_K, "token_embd": Format.Q6_K,
    "output": Format.Q5_1,
}  # fmt: skip
"""A file with another format in every part of what is one linear here."""


def write_mixed(path: Path, *, odd: str | None = None) -> None:
    """A random llama of `MIXED`; `odd` is a type that has no form in memory, for one of its tensors."""
    rng, hidden, heads, vocab = np.random.default_rng(3), 256, 4, 131
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(96)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(512)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(vocab)])
    writer.add_token_types([1] * vocab)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    sizes = {
        "attn_q": (hidden, hidden), "attn_k": (128, hidden), "attn_v": (128, hidden), "attn_output": (hidden, hidden),
        "ffn_gate": (512, hidden), "ffn_up": (512, hidden), "ffn_down": (hidden, 512),
    }  # fmt: skip
    names = [(f"blk.{i}.{name}", name, *size) for i in range(2) for name, size in sizes.items()]
    for stem, name, rows, cols in [
        *names,
        ("token_embd", "token_embd", vocab, hidden),
        ("output", "output", vocab, hidden),
    ]:
        if odd is not None and stem == "blk.1.attn_v":
            kind = gguf.GGMLQuantizationType[odd]
            block, size = gguf.GGML_QUANT_SIZES[kind]
            source = np.zeros((rows, cols // block * size), np.uint8)
        else:
            kind, source = gguf.GGMLQuantizationType[MIXED[name].name], random_source(MIXED[name], rows, cols, rng)
        writer.add_tensor(f"{stem}.weight", source, raw_dtype=kind)
    for norm in (*(f"blk.{i}.{name}" for i in range(2) for name in ("attn_norm", "ffn_norm")), "output_norm"):
        writer.add_tensor(f"{norm}.weight", rng.uniform(0.5, 1.5, hidden).astype(np.float32))
    finish(writer)


def logprobs_of(worker: Worker, length: int) -> np.ndarray:
    """Log-probabilities of everything that may follow a random prompt."""
    params = replace(GREEDY, max_tokens=1, logprobs=-1)
    run = Run(0, params, prompt(length, length))
    Driver(worker).finish([run], chunk=16)
    entry = run.logprobs[0]
    row = np.empty(len(entry.token_ids) - 1)
    row[entry.token_ids[1:]] = entry.logprobs[1:]
    return row


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    write_mixed(path)
    yield path


def test_blocks_stay_blocks(mixed: Path) -> None:
    """In memory every tensor takes what it takes in the file, or a few bytes of scales more; nothing is dequantized."""
    worker = worker_of(mixed)
    worker.load()
    stored = sum(tensor.n_bytes for tensor in gguf.GGUFReader(str(mixed)).tensors)
    assert stored <= worker.weight_bytes <= 1.1 * stored
    assert all(kind.name in line(worker, "weights") for kind in MIXED.values())
    assert isinstance(worker._runner, NativeRunner)


@pytest.mark.parametrize("eager", [False, True], ids=["step", "layers"])
@pytest.mark.parametrize("length", [1, 5, 61])
def test_blocks_compute_what_their_numbers_do(mixed: Path, length: int, eager: bool) -> None:
    """Against the same file as float32 numbers. Inputs of a product are rounded to int8, by at most 1 / 254 of the
    largest of 32 (about 2.5 times their rms), evenly spread: an error of 2.5 / 254 / sqrt(3) = 0.6 % of a result's own
    size. Fourteen products and the head, each adding its own, make about 2 % of the logits' spread, and as much again
    where attention chooses between many keys by scores that are off. A wrong scale or sum makes 100 %."""
    blocks = worker_of(mixed, enforce_eager=eager, kv_cache_dtype="float32")
    numbers = worker_of(mixed, dtype="float32")
    for worker in (blocks, numbers):
        worker.load()
    got, expected = logprobs_of(blocks, length), logprobs_of(numbers, length)
    error = (got - got.mean()) - (expected - expected.mean())
    assert np.sqrt((error**2).mean()) < 0.1 * expected.std()


def test_types_without_a_form_are_converted_and_named(tmp_path: Path) -> None:
    write_mixed(tmp_path / "odd.gguf", odd="IQ3_S")
    worker = worker_of(tmp_path / "odd.gguf")
    assert "weights: 1 tensors of type IQ3_S, which has no form in memory: held as BF16" in worker.routes()
    worker.load()
    assert outputs(worker, (5,))
