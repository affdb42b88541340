"""Everything that is measured on a GPU machine, by one word each, bounded in time, with one compact table each.

    python3 benchmarks/gpu/run.py smoke                       versions, device, one tiny generation, routes
    python3 benchmarks/gpu/run.py ops [NAME ...]               every script of kernels, or those named
    python3 benchmarks/gpu/run.py engine MODEL [flags]         the comparison's own script over engine "samovar"
    python3 benchmarks/gpu/run.py profile MODEL [flags]        profile_step.py
    python3 benchmarks/gpu/run.py serve MODEL [flags]          serve_load.py
    python3 benchmarks/gpu/run.py startup MODEL [flags]        ready and first token, kernel cache cold and warm
    python3 benchmarks/gpu/run.py tests [words of pytest]      all of tests/gpu side by side, or exactly what is named

MODEL is a folder with a config.json, or the name of one under --configs. --limit SECONDS bounds the whole command.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OPS = ("elementwise", "linear", "attention", "sampler")
"""Scripts beside this one that measure kernels."""
LIMITS = {"smoke": 120, "ops": 360, "engine": 580, "profile": 300, "serve": 300, "startup": 200, "tests": 400}
"""Seconds a word may take unless --limit says otherwise."""
OP_SECONDS = 120
"""Seconds one script of kernels may take."""

GOALS: dict[tuple[str, str, int], tuple[float, float]] = {
    ("llama-8b", "decode", 1): (4.3, 4.0),
    ("llama-8b", "decode", 32): (5.3, 5.0),
    ("llama-8b", "decode", 256): (12.8, 11.9),
    ("qwen3-0.6b", "decode", 1): (0.9, 0.6),
    ("qwen3-0.6b", "decode", 64): (2.3, 2.0),
    ("qwen3-0.6b", "decode", 256): (6.0, 5.2),
    ("llama-8b", "prefill", 2048): (41e3, 45e3),
    ("llama-8b", "prefill", 8192): (41e3, 45e3),
    ("llama-8b", "prefill", 32768): (30e3, 35e3),
    ("llama-8b", "throughput", 512): (11.5e3, 13e3),
    ("qwen3-0.6b", "throughput", 256): (30e3, 40e3),
}
"""(model, figure, size) -> what one H200 must reach and what it is meant to reach: ms for decode, tokens/s otherwise."""

SMOKE = """
import json, sys, tempfile, time
from pathlib import Path
import torch
from samovar import LLM, SamplingParams
from samovar.cli.bench.circumstances import software
print("  ".join(f"{k} {v}" for k, v in software().items()))
config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 3072,
          "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
          "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
          "tie_word_embeddings": False, "vocab_size": 32000, "torch_dtype": "bfloat16"}
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "config.json").write_text(json.dumps(config))
    began = time.perf_counter()
    with LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, kv_cache_memory_bytes=1 << 30) as llm:
        print(f"ready after {time.perf_counter() - began:.2f} s, {llm.info.num_blocks} blocks of {llm.info.block_size}")
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
        for prompts in ([[5] * 9], [[7] * n for n in range(1, 33)], [[9] * 1500]):
            seconds = []
            for _ in range(3):
                began = time.perf_counter()
                outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
                seconds.append(time.perf_counter() - began)
            ends = {output.outputs[0].finish_reason for output in outputs}
            print(f"{len(prompts)} prompts, longest {max(map(len, prompts))}: "
                  + ", ".join(f"{1000 * s:.1f}" for s in seconds) + f" ms, {ends}")
        for line in getattr(llm.info, "routes", []):
            print(line[:160])
"""


class Clock:
    """What is left of a limit."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


def run(
    words: Sequence[str | Path], seconds: float, *, keep: str | None = None, env: dict[str, str] | None = None
) -> tuple[int, list[str]]:
    """Run one command for at most `seconds`, its output passed on as it comes; (exit code, lines that began with `keep`).

    A command that takes longer is ended with everything it started; its exit code is 124.
    """
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }
    child = subprocess.Popen(
        list(map(str, words)), cwd=ROOT, env=variables | (env or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child.pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1.0))
    end, kept = time.monotonic() + seconds, []
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if keep is not None and line.startswith(keep):
                kept.append(line.removeprefix(keep).strip())
            else:
                print(line, end="", flush=True)
        code = child.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if code and time.monotonic() >= end:
        print(f"ended after {seconds:.0f} s", flush=True)
        code = 124
    return code, kept


def find_model(name: str, configs: Path) -> Path:
    """The folder that `name` means."""
    for folder in (Path(name), configs / name):
        if (folder / "config.json").is_file():
            return folder.resolve()
    raise SystemExit(f"{name}: no config.json there nor in {configs / name}")


def engine_rows(results: Sequence[dict[str, Any]]) -> list[str]:
    """One line per figure: its value, and how it stands to what is required and meant."""
    lines = []
    for row in results:
        figure = row["figure"]
        if figure == "startup":
            lines.append(
                f"{row['model']:<12} startup             ready {row['ready_s']} s, first token {row['first_token_s']} s"
            )
            continue
        key, value, unit = {
            "decode": ("batch", row.get("tpot_ms"), "ms"),
            "prefill": ("prompt", row.get("tok_s"), "tok/s"),
            "throughput": ("requests", row.get("out_tok_s"), "tok/s out"),
        }[figure]
        size = row[key]
        line = f"{row['model']:<12} {figure:<10} {size:>6}  {value:>10,} {unit:<9}"
        if (goal := GOALS.get((row["model"], figure, size))) is not None:
            less_is_better = figure == "decode"
            marks = [
                "met" if (value <= g if less_is_better else value >= g) else f"{abs(value / g - 1):.0%} off"
                for g in goal
            ]
            line += f"  required {goal[0]:,} ({marks[0]}), goal {goal[1]:,} ({marks[1]})"
        extra = {"decode": "prefill_ms", "prefill": "ttft_ms", "throughput": "seconds"}[figure]
        lines.append(f"{line}  [{extra} {row[extra]}]")
    return lines


def engine(model: Path, options: argparse.Namespace, flags: list[str], clock: Clock) -> int:
    """The script that other engines were measured with, unchanged."""
    words = [sys.executable, options.script, "--engine", "samovar", "--model", model, *flags]
    code, kept = run(words, clock.left, keep="RESULT ")
    print("\n".join(engine_rows([json.loads(line) for line in kept])))
    return code


def ops(names: Sequence[str], clock: Clock) -> int:
    """Scripts of kernels, one after the other."""
    worst = 0
    for name in names or OPS:
        script = HERE / f"{name}.py"
        if not script.is_file():
            print(f"== {name}: there is no {script.name}")
            worst = max(worst, 2)
            continue
        print(f"== {name}", flush=True)
        began = time.monotonic()
        code, _ = run([sys.executable, script], min(OP_SECONDS, clock.left))
        print(f"== {name}: exit code {code} after {time.monotonic() - began:.0f} s", flush=True)
        worst = max(worst, code)
    return worst


def startup(model: Path, flags: list[str], clock: Clock) -> int:
    """`samovar bench startup` on an empty cache of kernels: the first start fills it, the others find it."""
    with tempfile.TemporaryDirectory(prefix="samovar-kernels-") as cache:
        words = [sys.executable, "-m", "samovar", "bench", "startup", model, "--load-format", "dummy", "--skip-tokenizer-init",
                 "--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", "3", *flags]  # fmt: skip
        return run(words, clock.left, env={"SAMOVAR_CACHE": cache, "TRITON_CACHE_DIR": f"{cache}/triton"})[0]


def tests(flags: Sequence[str], clock: Clock) -> int:
    """`tests/gpu`, files side by side where pytest can: compiling kernels is most of it. The memory's test needs the device
    for itself."""
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--durations=5"]
    if flags or importlib.util.find_spec("xdist") is None:
        return run([*words, *(flags or ["tests/gpu"])], clock.left)[0]
    alone = "tests/gpu/test_memory_plan.py"
    first, _ = run([*words, "tests/gpu", f"--ignore={alone}", "-n", "6", "--dist", "loadfile"], clock.left)
    return max(first, run([*words, alone], clock.left)[0])


def main() -> int:
    """Read the words and run what they name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(LIMITS))
    parser.add_argument("--limit", type=float, help="seconds for the whole command")
    parser.add_argument(
        "--configs", type=Path, default=ROOT / ".gpu" / "bench" / "configs", help="folder of model shapes"
    )
    parser.add_argument("--script", type=Path, default=ROOT / ".gpu" / "bench" / "engine_bench.py", help="for engine")
    options, flags = parser.parse_known_args()
    clock = Clock(options.limit or LIMITS[options.what])
    if options.what == "smoke":
        return run([sys.executable, "-c", SMOKE], clock.left)[0]
    if options.what == "ops":
        return ops(flags, clock)
    if options.what == "tests":
        return tests(flags, clock)
    if not flags:
        parser.error(f"{options.what} needs a model")
    model, rest = find_model(flags[0], options.configs), flags[1:]
    if options.what == "engine":
        return engine(model, options, rest, clock)
    if options.what == "startup":
        return startup(model, rest, clock)
    script = {"profile": "profile_step.py", "serve": "serve_load.py"}[options.what]
    return run([sys.executable, HERE / script, model, *rest], clock.left)[0]


if __name__ == "__main__":
    sys.exit(main())
