"""Every `auto` gets a value and a reason; rules over several settings name both."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from samovar.config.description import ModelDescription
from samovar.config.engine import ENGINE_GROUPS, EngineConfig, with_settings
from samovar.config.flags import parse_words
from samovar.config.groups import DeviceConfig, ServerConfig
from samovar.config.resolve import DECIDERS, resolve
from samovar.config.rules import REQUEST_RULES, RESULT_RULES, SERVER_RULES, check_request, check_server
from samovar.core.device_facts import DeviceFacts
from samovar.errors import ConfigError
from samovar.schedule.options import SchedulerOptions

GIB = 1 << 30
LAPTOP = DeviceFacts(
    kind="cpu", name="A laptop", architecture="avx2", total_bytes=16 * GIB, available_bytes=12 * GIB, num_threads=8
)
SERVER = dataclasses.replace(LAPTOP, architecture="amx_bf16", has_fast_bf16=True, num_threads=32)
GPU = dataclasses.replace(
    LAPTOP,
    kind="cuda",
    name="A GPU",
    architecture="sm_90",
    total_bytes=140 * GIB,
    has_fast_bf16=True,
    has_fast_fp16=True,
)
OLD_GPU = dataclasses.replace(GPU, architecture="sm_70", total_bytes=16 * GIB, has_fast_bf16=False)
MODEL = ModelDescription(
    path=Path("model"),
    format="safetensors",
    architecture="LlamaForCausalLM",
    config={"torch_dtype": "float16"},
    vocab_size=1000,
    max_position_embeddings=4096,
)


def settled(facts: DeviceFacts = LAPTOP, model: ModelDescription = MODEL, **settings: Any) -> dict[str, Any]:
    config = resolve(with_settings(EngineConfig(), **settings), model, facts).config
    return {n: getattr(getattr(config, key), n) for key, group in ENGINE_GROUPS.items() for n in group.settings}


@pytest.mark.parametrize("facts", [LAPTOP, SERVER, GPU, OLD_GPU])
def test_nothing_stays_open(facts: DeviceFacts) -> None:
    values = settled(facts)
    assert [n for n, v in values.items() if v == "auto"] == [
        "model_impl",
        "generation_config",
        "state_snapshots",
        "attention_backend",
    ]
    for name in ("max_model_len", "max_num_batched_tokens", "threads"):
        assert values[name] is not None
    assert values["step_time_target_ms"] > 0


@pytest.mark.parametrize("facts", [LAPTOP, SERVER, GPU, OLD_GPU])
def test_resolving_twice_changes_nothing(facts: DeviceFacts) -> None:
    first = resolve(EngineConfig(), MODEL, facts)
    second = resolve(first.config, MODEL, facts)
    assert second.config == first.config and second.decisions == []


def test_every_decision_has_a_reason_and_what_was_given_stays() -> None:
    resolved = resolve(EngineConfig(), MODEL, LAPTOP)
    assert all(d.reason and d.reason[-1] != "." for d in resolved.decisions)
    assert len({d.name for d in resolved.decisions}) == len(resolved.decisions)
    assert all(isinstance(cell, str) for row in resolved.as_rows() for cell in row)
    given: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 64, "threads": 3, "max_num_batched_tokens": 17, "kv_cache_dtype": "bfloat16",
        "step_time_target_ms": 9.0, "load_format": "safetensors", "device": "cpu", "max_logprobs": 5,
        "block_size": 32, "max_num_seqs": 8, "structured_outputs_backend": "llguidance",
    }  # fmt: skip
    assert resolve(with_settings(EngineConfig(), **given), MODEL, LAPTOP).decisions == []
    assert given.items() <= settled(**given).items()


@pytest.mark.parametrize(
    ("facts", "asked", "dtype"),
    [(LAPTOP, "auto", "float32"), (SERVER, "auto", "bfloat16"), (GPU, "auto", "float16"), (OLD_GPU, "auto", "float16"),
     (LAPTOP, "half", "float16"), (LAPTOP, "float", "float32"), (SERVER, "float32", "float32")],
)  # fmt: skip
def test_dtype(facts: DeviceFacts, asked: str, dtype: str) -> None:
    values = settled(facts, dtype=asked)
    assert values["dtype"] == values["kv_cache_dtype"] == dtype


def test_bfloat16_checkpoint_on_gpus() -> None:
    kernels = dataclasses.replace(LAPTOP, has_kernels=True)
    assert settled(kernels)["dtype"] == "bfloat16", "what weights take; they are computed with in float32"
    assert settled(kernels, kv_cache_dtype="int8")["kv_cache_dtype"] == "int8"
    assert settled(kernels, kv_cache_dtype="fp8")["kv_cache_dtype"] == "fp8_e4m3"
    model = dataclasses.replace(MODEL, config={"dtype": "bfloat16"})
    assert settled(GPU, model)["dtype"] == "bfloat16"
    assert settled(OLD_GPU, model)["dtype"] == "float16"
    assert settled(GPU, dataclasses.replace(MODEL, config={"dtype": "float32"}))["dtype"] == "bfloat16"


def test_step_budgets() -> None:
    assert settled(LAPTOP)["max_num_batched_tokens"] == 1024
    assert settled(dataclasses.replace(LAPTOP, num_threads=2))["max_num_batched_tokens"] == 512
    assert settled(SERVER)["max_num_batched_tokens"] == 2048
    assert settled(GPU)["max_num_batched_tokens"] == 8192
    assert settled(SERVER, max_num_seqs=4000)["max_num_batched_tokens"] == 4000
    assert settled(LAPTOP, enable_chunked_prefill=False)["max_num_batched_tokens"] == 4096


def test_defaults_of_the_device_and_what_stays() -> None:
    """Blocks follow the device unless they were asked for; no time target stays none; determinism needs a GPU."""
    assert settled(LAPTOP)["block_size"] == 16 and settled(GPU)["block_size"] == 32
    assert settled(GPU, block_size=16)["block_size"] == 16
    assert settled(GPU, step_time_target_ms=-1)["step_time_target_ms"] == -1
    made = SchedulerOptions.from_config(
        resolve(with_settings(EngineConfig(), step_time_target_ms=-1), MODEL, GPU).config
    )
    assert made.step_time_target == 0.0
    assert settled(GPU, deterministic=True)["deterministic"] is True


def test_context_length() -> None:
    assert settled()["max_model_len"] == 4096
    assert settled(max_model_len=-1)["max_model_len"] == -1
    with pytest.raises(ConfigError, match=r"--max-model-len 5000 is beyond the model's own 4096.*--hf-overrides"):
        settled(max_model_len=5000)
    with pytest.raises(ConfigError, match="does not say its context length; give --max-model-len"):
        settled(model=dataclasses.replace(MODEL, max_position_embeddings=0))
    assert settled(model=dataclasses.replace(MODEL, max_position_embeddings=0), max_model_len=99)["max_model_len"] == 99


def test_all_logprobs_is_the_vocabulary() -> None:
    assert settled(max_logprobs=-1)["max_logprobs"] == 1000


def test_a_share_of_memory_keeps_its_name() -> None:
    """The flag that was given is the one that later messages name; it is never rewritten into another."""
    values = settled(gpu_memory_utilization=0.8)
    assert (values["memory"], values["gpu_memory_utilization"]) == (None, 0.8)


BROKEN: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no_remote_code": ({"trust_remote_code": True}, ("--trust-remote-code",)),
    "one_device": ({"tensor_parallel_size": 2}, ("--tensor-parallel-size 2",)),
    "no_determinism_on_cpu": ({"deterministic": True}, ("--deterministic",)),
    "one_memory_budget": (
        {"memory": "0.5", "gpu_memory_utilization": 0.5},
        ("--memory 0.5", "--gpu-memory-utilization 0.5"),
    ),
    "one_kv_size": (
        {"kv_cache_memory_bytes": 1000, "num_gpu_blocks_override": 3},
        ("--kv-cache-memory-bytes 1000", "--num-gpu-blocks-override 3"),
    ),
    "whole_prompts_fit": (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 10, "max_model_len": 20},
        ("--no-enable-chunked-prefill", "--max-num-batched-tokens 10", "--max-model-len 20"),
    ),
    "chunk_fits_batch": (
        {"long_prefill_token_threshold": 20, "max_num_batched_tokens": 10},
        ("--long-prefill-token-threshold 20", "--max-num-batched-tokens 10"),
    ),
    "device_is_there": ({"device": "cuda"}, ("--device cuda", "cpu (A laptop)")),
    "format_is_there": ({"load_format": "gguf"}, ("--load-format gguf", "safetensors", "--load-format auto")),
    "quantization_is_there": ({"quantization": "awq"}, ("--quantization awq", "is plain", "fp8, int8, int4")),
    "context_within_model": ({"max_model_len": 9999}, ("--max-model-len 9999", "4096")),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_rules_name_the_settings(rule: str) -> None:
    settings, words = BROKEN[rule]
    with pytest.raises(ConfigError) as caught:
        settled(**settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_rule_has_a_test() -> None:
    depends_on_packages = {"xgrammar_is_there"}
    assert {rule.__name__ for rule in (*REQUEST_RULES, *RESULT_RULES)} == BROKEN.keys() | depends_on_packages
    tested = {"no_empty_key", "no_empty_admin_key", "no_empty_name", "one_address"}
    assert {rule.__name__ for rule in SERVER_RULES} == tested
    assert len({decide.__name__ for decide in DECIDERS}) == len(DECIDERS)


@pytest.mark.parametrize("flag", ["--structured-outputs-backend", "--guided-decoding-backend"])
def test_xgrammar_has_to_be_installed(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_settings(EngineConfig(), **parse_words([flag, "xgrammar"], DeviceConfig.settings).values)
    assert config.device.structured_outputs_backend == "xgrammar"
    monkeypatch.setattr("samovar.config.rules.find_spec", lambda name: object())
    check_request(config)
    monkeypatch.setattr("samovar.config.rules.find_spec", lambda name: None)
    check_request(EngineConfig())
    with pytest.raises(ConfigError, match=r"backend xgrammar .* not installed.*\[xgrammar\]") as refused:
        check_request(config)
    assert "\n" not in str(refused.value)


def test_defaults_break_no_rule() -> None:
    check_request(EngineConfig())
    check_server(ServerConfig())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"api_key": ["k", " "]}, "--api-key must not be empty"),
        ({"admin_api_key": ["k", " "]}, "--admin-api-key must not be empty"),
        ({"served_model_name": ["m", ""]}, "--served-model-name must not be empty"),
        ({"uds": "/s", "port": 1}, "--uds /s"),
    ],
)
def test_server_rules(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_server(ServerConfig(**settings))


def test_an_aliass_sampling_is_among_the_decisions() -> None:
    """It is named with its values; what somebody else decided is not."""
    model = dataclasses.replace(MODEL, recommended={"temperature": 0.2, "top_p": 0.9})
    rows = {name: reason for name, _, reason in resolve(EngineConfig(), model, LAPTOP).as_rows()}
    assert "temperature 0.2, top_p 0.9" in rows["generation_config"]
    assert "generation_config" not in {d.name for d in resolve(EngineConfig(), MODEL, LAPTOP).decisions}


@pytest.mark.parametrize(("threads", "tokens", "words"), [(1, 512, "1 thread"), (2, 512, "2 threads"), (12, 1536, "12 threads"),
                                                          (None, 1024, "8 threads")])  # fmt: skip
def test_the_step_budget_follows_the_threads_in_use(threads: int | None, tokens: int, words: str) -> None:
    resolved = resolve(with_settings(EngineConfig(), threads=threads), MODEL, LAPTOP)
    (decision,) = (d for d in resolved.decisions if d.name == "max_num_batched_tokens")
    assert (decision.value, decision.reason) == (tokens, f"a CPU with {words}")
