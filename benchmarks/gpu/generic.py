"""The generic path on a GPU: answers against Transformers' with captured graphs, then decode steps beside a native family.

PYTHONPATH=. python3 benchmarks/gpu/generic.py [check] [speed], both by default. Checkpoints are random and made here.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from samovar import LLM, SamplingParams

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
CHECKED: dict[str, tuple[str, dict[str, Any]]] = {
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {}),
    "LlamaForCausalLM": ("LlamaConfig", {}),
    "StableLmForCausalLM": ("StableLmConfig", {}),
    "Gemma2ForCausalLM": ("Gemma2Config", {"sliding_window": 32, "query_pre_attn_scalar": 64}),
    "MixtralForCausalLM": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "GptOssForCausalLM": ("GptOssConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 32}),
    "OPTForCausalLM": ("OPTConfig", {"ffn_dim": 512, "word_embed_proj_dim": 256, "do_layer_norm_before": True}),
}
BILLION = {**SIZES, "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
NEW_TOKENS, PROMPTS, BATCHES = 48, 6, (1, 8, 32)


class Refusals(logging.Handler):
    """Collects what the log says of graphs that could not be captured."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage()[:160])


def write(folder: str, architecture: str, config: str, fields: dict[str, Any], dtype: torch.dtype) -> Any:
    """A random checkpoint, and the model that it is of."""
    torch.manual_seed(0)
    made = getattr(transformers, config)(**fields, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = getattr(transformers, architecture)(made).to("cuda", dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_().mul_(parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def prompt(size: int, seed: int, vocab: int = 1024) -> list[int]:
    """Random ids."""
    return torch.randint(5, vocab, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """What Transformers says, without a cache."""
    found: list[int] = []
    for _ in range(count):
        given = torch.tensor([[*ids, *found]], device="cuda")
        found.append(int(model(given, use_cache=False).logits[0, -1].argmax()))
    return found


def check() -> None:
    """Greedy ids in float32, of several sequences at once, long enough that their steps are captured."""
    torch.backends.cuda.matmul.allow_tf32 = False
    refusals = Refusals()
    logging.getLogger("samovar.worker.graphs").addHandler(refusals)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for architecture, (config, fields) in CHECKED.items():
        refusals.lines.clear()
        try:
            with tempfile.TemporaryDirectory() as folder:
                model = write(folder, architecture, config, {**SIZES, **fields}, torch.float32)
                prompts = [prompt(20 + 13 * i, i) for i in range(PROMPTS)]
                expected = [greedy(model, ids, NEW_TOKENS) for ids in prompts]
                options: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512}
                with LLM(folder, model_impl="generic", memory="8GiB", max_num_seqs=8, **options) as llm:
                    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            found = [list(output.outputs[0].token_ids) for output in outputs]
            same = sum(a == b for f, e in zip(found, expected, strict=True) for a, b in zip(f, e, strict=True))
            word = "ok" if found == expected else "WRONG" if same < 0.9 * PROMPTS * NEW_TOKENS else "nearly"
            print(f"{architecture}: {same} of {PROMPTS * NEW_TOKENS} ids, {len(refusals.lines)} graphs refused: {word}")
        except Exception as error:  # a table of all is worth more than the first failure
            print(f"{architecture}: {type(error).__name__}: {str(error)[:300]}: WRONG")
        for line in refusals.lines[:1]:
            print(f"  {line}")
        sys.stdout.flush()


def speed() -> None:
    """Milliseconds of a decode step of a Llama of a billion, native and generic, captured and not."""
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.LlamaConfig(**BILLION, bos_token_id=None, eos_token_id=None, dtype="bfloat16")
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        for name, eager in (("native", False), ("generic", False), ("generic", True)):
            options: dict[str, Any] = {"skip_tokenizer_init": True, "load_format": "dummy", "max_model_len": 1024}
            with LLM(folder, model_impl=name, memory="16GiB", max_num_seqs=32, enforce_eager=eager, **options) as llm:
                times = [f"{batch}: {decode(llm, batch):.2f}" for batch in BATCHES]
            print(
                f"llama 1B, {name}{', --enforce-eager' if eager else ''}: ms of a step at batch {', '.join(times)}",
                flush=True,
            )


def decode(llm: LLM, batch: int) -> float:
    """Milliseconds of a step: the difference of two lengths."""
    seconds = []
    for count in (24, 24, 152):
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt(32, 100 * count + i, 32000)} for i in range(batch)]
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    return 1e3 * (seconds[2] - seconds[1]) / 128


def main() -> None:
    """Run the parts named, or all."""
    transformers.logging.set_verbosity_error()
    began, parts = time.perf_counter(), sys.argv[1:] or ["check", "speed"]
    for name, part in (("check", check), ("speed", speed)):
        if name in parts:
            part()
    print(f"{Path(__file__).name}: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
