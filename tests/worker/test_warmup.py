"""Kernels are named before they are needed, found again by the next start, and refused where they fail."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from samovar.errors import ConfigError
from samovar.kernels.op import Kernels, Op, Target
from samovar.kernels.triton_launch import Compiled, CompileReport, Launch
from samovar.worker import warmup
from samovar.worker.warmup import Compilation, MetaStream, Shortcuts, settle, warm_steps
from tests.checkpoints import write_config, write_tokenizer
from tests.kernels.triton.processes import in_process

pytest.importorskip("triton", reason="Triton is not installed")


def folder_of(path: Path, **values: Any) -> str:
    """A model without weights."""
    path.mkdir()
    write_tokenizer(path)
    write_config(path, **values)
    return str(path)


def test_no_step_launches_what_was_not_noted(tmp_path: Path) -> None:
    """Random decode, prefill and mixed steps; and naming kernels loads none of torch's compilers."""
    folder = folder_of(tmp_path / "model", hidden_size=256, num_attention_heads=8, head_dim=64)
    noted, launched, *loaded = in_process(
        "tests.worker.noted_steps", folder, "sm_90", "1", cache=tmp_path / "cache"
    ).split()
    assert int(noted) >= int(launched) > 10
    assert loaded == []


@pytest.mark.slow
def test_latent_attention_launches_what_was_noted(tmp_path: Path) -> None:
    """Absorbed and made, whole and in parts: keys of 128 heads are made in passes from 4096 on."""
    (tmp_path / "model").mkdir()
    fields = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 1000, "hidden_size": 256,
        "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 128,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "model/config.json").write_text(json.dumps(fields))
    words = (str(tmp_path / "model"), "sm_90", "1")
    noted, launched, *loaded = in_process("tests.worker.noted_steps", *words, cache=tmp_path / "cache").split()
    assert int(noted) >= int(launched) > 10
    assert loaded == []


@pytest.mark.slow
@pytest.mark.parametrize("cache_type", ["fp8", "int8", "k8v4", "tq3.5"])
def test_caches_of_codes_launch_what_was_noted(tmp_path: Path, cache_type: str) -> None:
    folder = folder_of(tmp_path / "model", hidden_size=256, num_attention_heads=8, head_dim=64)
    arguments = (folder, "sm_90", "1", cache_type)
    noted, launched = in_process("tests.worker.noted_steps", *arguments, cache=tmp_path / "cache").split()
    assert int(noted) >= int(launched) > 10


@pytest.mark.slow
def test_the_second_warmup_compiles_nothing(tmp_path: Path) -> None:
    """For a GPU that is not here; what it prints is what it did."""
    words = (folder_of(tmp_path / "model", num_hidden_layers=1), "--load-format", "dummy", "--arch", "sm_90")
    words += ("--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    first = in_process("samovar.cli.main", "warmup", *words, cache=tmp_path / "cache")
    assert first.startswith("sm_90: kernels: ") and " compiled in " in first and str(tmp_path / "cache") in first
    count = first.removeprefix("sm_90: kernels: ").split()[0]
    second = in_process("samovar.cli.main", "warmup", *words, cache=tmp_path / "cache")
    assert second.startswith(f"sm_90: kernels: {count} from the cache in ")


def test_warm_steps_stay_within_what_they_are_given() -> None:
    """Every bucket decodes, every step fits, and there are few."""
    steps = list(warm_steps(max_num_seqs=40, max_num_tokens=512, max_model_len=700, block_size=16))
    assert len(steps) < 40
    decodes = {len(s.sequences) for s in steps if all(x.num_new_tokens == 1 for x in s.sequences)}
    assert {1, 2, 4, 8, 16, 24, 32, 40} <= decodes
    for step in steps:
        assert step.num_tokens <= 512 and len(step.sequences) <= 40
        for sequence in step.sequences:
            total = sequence.start + sequence.num_new_tokens
            assert total <= 700 and len(sequence.new_blocks) * 16 >= total
            assert len(sequence.token_ids) == sequence.num_new_tokens
    assert any(s.num_tokens == 512 and len(s.sequences) == 1 for s in steps)
    tiny = list(warm_steps(max_num_seqs=1, max_num_tokens=1, max_model_len=1, block_size=16))
    assert all(s.num_tokens == 1 for s in tiny)


def test_shortcuts_have_torchs_shapes() -> None:
    """What is not computed has the shape and dtype that torch gives."""

    def results(device: str) -> list[torch.Tensor]:
        x, weight = torch.zeros(5, 8, device=device), torch.zeros(3, 8, device=device).bfloat16()
        ids = torch.zeros(4, dtype=torch.int64, device=device)
        return [
            torch.nn.functional.embedding(ids, weight),
            torch.nn.functional.linear(weight, weight),
            torch.arange(7, device=device),
            torch.arange(7, dtype=torch.int32, device=device),
            torch.cat([x, x]),
            torch.cat((x, x[:, :3]), dim=-1),
            torch.cat([x, x], 1),
            x[ids],
            x[1:3, 2],
            x.new_empty((2, 3)),
            x.new_empty(2, 3, dtype=torch.int8),
            torch.empty_like(x),
            torch.zeros(5, 5, device=device).addmm_(x, x.t()),
        ]

    with torch.inference_mode(), Shortcuts():
        ours = results("meta")
    for got, expected in zip(ours, results("cpu"), strict=True):
        assert (got.shape, got.dtype, got.device) == (expected.shape, expected.dtype, MetaStream.device)


class BrokenKernel:
    """A kernel as Triton holds it."""

    __name__ = "broken"

    def __init__(self, module: str) -> None:
        self.module = module


def chosen_kernels() -> tuple[Kernels, Op[..., torch.Tensor]]:
    """Three implementations, of which the first is wrong."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    op: Op[..., torch.Tensor] = Op(double, prefer=("wrong", "right"))
    op.examples(lambda: [(torch.ones(3),)])
    op.tolerance[torch.float32] = (0.0, 0.0)
    op.impl("wrong", devices=("cuda",))(lambda x: x * 2.5)
    op.impl("right", devices=("cuda",))(lambda x: x + x)
    kernels = Kernels(Target("cuda", "sm_90", torch.float32), "cpu")
    kernels.use(op)
    return kernels, op


def compilation(*outcomes: Compiled) -> Compilation:
    """One that is over."""
    future: Future[CompileReport] = Future()
    future.set_result(CompileReport(list(outcomes), num_compiled=2, num_cached=3, seconds=1.25))
    return Compilation(future)


@pytest.fixture(autouse=True)
def no_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "on_compile", lambda heard: None)


def test_what_differs_is_refused_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """The next best is used afterwards, and the route gives the reason."""
    kernels, op = chosen_kernels()
    assert kernels.routes["double"].chosen == "wrong"
    with caplog.at_level(logging.INFO):
        assert settle(compilation(Compiled(Launch(BrokenKernel("any"), (), {}), None, None)), kernels) is True
    assert "kernels: 2 compiled, 3 from the cache in 1.2 s" in caplog.text
    assert "double: wrong is not used: differs from the reference" in caplog.text
    assert torch.equal(kernels.use(op)(torch.ones(2)), torch.full((2,), 2.0))
    assert "wrong: differs from the reference" in str(kernels.routes["double"])
    assert settle(compilation(), kernels) is False


def test_a_kernel_that_does_not_compile_is_blamed_on_its_op() -> None:
    """By the file that defines it; one that belongs to no op ends the start with a remedy."""
    kernels, _ = chosen_kernels()
    broken = Compiled(Launch(BrokenKernel(__name__), (), {}), None, RuntimeError("at 3:1:\nx\ntoo wide"))
    assert settle(compilation(broken), kernels) is True
    # Everything of that file is refused at once, here both implementations one after the other.
    assert kernels.routes["double"].chosen == "right"
    stray = Compiled(Launch(BrokenKernel("samovar.attention.triton_decode"), (), {}), None, RuntimeError("too wide"))
    with pytest.raises(
        ConfigError, match=r"kernel broken \(samovar.attention.triton_decode\).*too wide; use --attention"
    ):
        settle(compilation(stray), kernels)


def test_a_start_on_a_cpu_loads_nothing_of_a_gpu(tmp_path: Path) -> None:
    """Nor torch's compilers, nor transformers: imports are seconds."""
    code = (
        "import sys; from samovar import LLM\n"
        "with LLM(sys.argv[1], load_format='dummy', device='cpu', max_model_len=64, max_num_seqs=2) as llm:\n"
        "    llm.generate([{'prompt_token_ids': [1, 2, 3]}])\n"
        "heavy = ('triton', 'sympy', 'torch._dynamo', 'torch._inductor', 'transformers')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, folder_of(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
