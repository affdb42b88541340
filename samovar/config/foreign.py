"""Names of settings that other engines have and this one has not: each is refused with the reason, never ignored."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

_TLS = "put a reverse proxy that ends TLS in front of the server"
_DISTRIBUTED = "one device per engine for now: run several servers behind a balancer"
_LORA = "LoRA adapters are not supported yet: merge the adapter into the weights"
_MEDIA = "images, audio and video are not supported yet: text models only"
_TOOLS = "no code is loaded by name and no tools run here; formats are named with --tool-call-parser"
_SPECULATION = "speculative decoding is not supported yet"
_OFFLOAD = "nothing is offloaded yet: choose a smaller quantization or --max-model-len"
_GRAPHS = "there is no compilation step to configure"
_ENGINE_PROCESS = "the engine always has its own process under `serve`"
_POOLING = "embedding, scoring and classification models are not supported yet"

REASONS: dict[str, str] = {
    "tokenizer_mode": "the tokenizer kind is read from the checkpoint",
    "config_format": "the format is read from the checkpoint",
    "hf_config_path": "use --hf-overrides for single values, or a folder with its own config.json",
    "hf_token": "set the HF_TOKEN environment variable: a flag would show in the process list",
    "code_revision": "no code is ever run from a model repository",
    "runner": _POOLING, "convert": _POOLING, "pooler_config": _POOLING, "task": _POOLING,
    "logprobs_mode": "logprobs are those of the model's own distribution (raw_logprobs)",
    "enable_prompt_embeds": "prompts are text or token ids",
    "prefix_caching_hash_algo": "block keys are always chained cryptographic hashes",
    "swap_space": "preempted sequences are recomputed, not swapped; leave the flag out",
    "cpu_offload_gb": _OFFLOAD, "offload_backend": _OFFLOAD, "kv_offloading_size": _OFFLOAD, "kv_offloading_backend": _OFFLOAD,
    "num_scheduler_steps": "steps overlap already; see --async-scheduling",
    "scheduler_cls": "the scheduler is not replaceable; see --scheduling-policy",
    "scheduler_reserve_full_isl": "admission always reserves what a prompt needs",
    "disable_hybrid_kv_cache_manager": "there is one cache layout per kind of layer",
    "max_seq_len_to_capture": _GRAPHS, "compilation_config": _GRAPHS, "cudagraph_capture_sizes": _GRAPHS,
    "max_cudagraph_capture_size": _GRAPHS, "performance_mode": _GRAPHS,
    "pipeline_parallel_size": _DISTRIBUTED, "data_parallel_size": _DISTRIBUTED, "enable_expert_parallel": _DISTRIBUTED,
    "all2all_backend": _DISTRIBUTED, "enable_eplb": _DISTRIBUTED, "decode_context_parallel_size": _DISTRIBUTED,
    "prefill_context_parallel_size": _DISTRIBUTED, "distributed_executor_backend": _DISTRIBUTED, "nnodes": _DISTRIBUTED,
    "node_rank": _DISTRIBUTED, "master_addr": _DISTRIBUTED, "master_port": _DISTRIBUTED, "headless": _DISTRIBUTED,
    "api_server_count": "one HTTP process serves all connections",
    "device_ids": "choose devices with the vendor's own variable (CUDA_VISIBLE_DEVICES)",
    "disable_custom_all_reduce": _DISTRIBUTED,
    "enable_lora": _LORA, "lora_modules": _LORA, "max_loras": _LORA, "max_lora_rank": _LORA, "max_cpu_loras": _LORA,
    "speculative_config": _SPECULATION, "spec_method": _SPECULATION, "spec_model": _SPECULATION, "spec_tokens": _SPECULATION,
    "structured_outputs_config": "see --structured-outputs-timeout and the limits beside it",
    "guided_decoding_backend": "it is called structured_outputs_backend",
    "limit_mm_per_prompt": _MEDIA, "mm_processor_kwargs": _MEDIA, "mm_processor_cache_gb": _MEDIA, "media_io_kwargs": _MEDIA,
    "allowed_local_media_path": _MEDIA, "allowed_media_domains": _MEDIA, "language_model_only": _MEDIA,
    "moe_backend": "choose an implementation with --kernel OP=IMPLEMENTATION",
    "linear_backend": "choose an implementation with --kernel OP=IMPLEMENTATION",
    "kv_transfer_config": "K/V transfer between engines is not supported yet",
    "kv_events_config": "K/V transfer between engines is not supported yet",
    "enable_sleep_mode": "sleeping is always possible, through the admin routes",
    "otlp_traces_endpoint": "traces are not exported yet; /metrics has the figures",
    "profiler_config": "use --profiler-dir",
    "logits_processors": "no code is loaded by name; see logit_bias, bad_words and allowed_token_ids",
    "worker_extension_cls": "no code is loaded by name", "middleware": "no code is loaded by name",
    "additional_config": "there are no hidden settings",
    "ssl_keyfile": _TLS, "ssl_certfile": _TLS, "ssl_ca_certs": _TLS, "ssl_cert_reqs": _TLS, "enable_ssl_refresh": _TLS,
    "tool_parser_plugin": _TOOLS, "tool_server": _TOOLS, "reasoning_parser_plugin": _TOOLS,
    "enable_reasoning": "reasoning is told apart wherever the chat template shows how; see --reasoning-parser",
    "grpc": "use --grpc-port",
    "disable_log_stats": "statistics are only on /metrics; nothing is logged",
    "disable_log_requests": "requests are not logged unless --enable-log-requests",
    "enable_log_outputs": "outputs are never logged", "max_log_len": "texts are never logged",
    "uvicorn_log_level": "use --log-level", "disable_uvicorn_access_log": "use --log-level warning",
    "disable_frontend_multiprocessing": _ENGINE_PROCESS,
    "enable_server_load_tracking": "/load always counts", "disable_sliding_window": "a model's window is part of the model",
    "rope_scaling": "use --hf-overrides with rope_scaling", "rope_theta": "use --hf-overrides with rope_theta",
    "max_num_partial_prefills": "every waiting prompt may be prefilled in part; see --long-prefill-token-threshold",
    "num_lookahead_slots": _SPECULATION, "use_v2_block_manager": "there is one block pool",
    "preemption_mode": "preempted sequences are recomputed", "pipeline_parallel": _DISTRIBUTED,
    "disable_async_output_proc": "use --no-async-scheduling",
}  # fmt: skip
"""Setting name -> why it does not exist here, or what to use."""

SHORT = {"pp": "pipeline_parallel_size", "dp": "data_parallel_size", "ep": "enable_expert_parallel",
         "cc": "compilation_config", "sc": "speculative_config", "asc": "api_server_count", "O": "compilation_config"}  # fmt: skip
"""Short spellings of the above."""


def flag_of(name: str) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return "--" + name.replace("_", "-")


def unknown_setting(name: str, known: Sequence[str], *, spell: Callable[[str], str] = flag_of) -> str:
    """The message for a setting nobody declares: the reason if another engine has it, else the nearest name.

    `known` holds field names; `spell` turns one into what the user would write.
    """
    plain = SHORT.get(name, name)
    bare = plain.removeprefix("no_")
    reason = REASONS.get(plain) or REASONS.get(bare)
    if reason is not None:
        return f"{spell(name)} is not available: {reason}"
    prefix, matched = ("no_", bare) if bare != plain and plain not in known else ("", plain)
    near = difflib.get_close_matches(matched, known, n=1, cutoff=0.6)
    hint = f"; did you mean {spell(prefix + near[0])}?" if near else ""
    return f"unknown setting {spell(name)}{hint}"
