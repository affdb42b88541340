"""Every setting, in groups. The string below a field is its help text, on the command line and in the docs."""

from __future__ import annotations

from typing import Any

from samovar.config.field import Group, field


class SourceConfig(Group):
    """Where settings come from besides the command line."""

    config: str | None = field(default=None)
    """YAML file of settings, one per line under its flag's name. Flags and environment variables win over it."""


class ModelConfig(Group):
    """Which model, and how its files are read."""

    model: str = field(default="smollm2")
    """Model: an embedded alias, a directory, a .gguf file, or a hub id."""
    tokenizer: str | None = field(default=None)
    """Tokenizer, if not the model's own: a folder, a tokenizer.json or .gguf file, an alias, or a hub id."""
    revision: str | None = field(default=None)
    """Hub revision (branch, tag or commit); pins every file of the model."""
    tokenizer_revision: str | None = field(default=None)
    """Hub revision of the tokenizer, if not the one of its repository that is used anyway."""
    dtype: str = field(default="auto", choices=("auto", "float32", "float", "bfloat16", "float16", "half"))
    """Type of weights and activations."""
    max_model_len: int | None = field(default=None, ge=1, also=(-1,))
    """Context length in tokens; accepts 32k, 1M, and -1 to fit the memory. Default: the model's own."""
    load_format: str = field(default="auto", choices=("auto", "safetensors", "gguf", "dummy"))
    """File format; "dummy" fills random weights without reading any."""
    quantization: str | None = field(default=None)
    """Weight format: the checkpoint's own, or fp8, int8, int4, nvfp4 or mxfp4, which plain linears become at load time."""
    hf_overrides: dict[str, Any] = field(factory=dict)
    """JSON object laid over config.json."""
    model_impl: str = field(default="auto", choices=("auto", "native", "generic", "any"))
    """Whose mathematics: "auto" takes Samovar's own (native) where it has the architecture, else Transformers' (generic) if
    that passed the test; "any" takes Transformers' untested, too. `samovar models` lists them."""
    generation_config: str = field(default="auto")
    """Where sampling defaults come from: "auto" (the model, or what is recommended for an alias), "vllm" (none), or a
    directory."""
    override_generation_config: dict[str, Any] = field(factory=dict)
    """JSON object of sampling defaults laid over the model's own."""
    seed: int = field(default=0)
    """Seed of dummy weights. Requests without a seed are always random."""
    max_logprobs: int = field(default=20, ge=0, also=(-1,))
    """Most logprobs a request may ask for; -1 allows the whole vocabulary."""
    skip_tokenizer_init: bool = field(default=False)
    """Take and give token ids only."""
    trust_remote_code: bool = field(default=False)
    """Refused: no code is ever run from a model repository."""
    download_dir: str | None = field(default=None)
    """Where downloaded models are kept."""
    offline: bool = field(default=False, env="SAMOVAR_OFFLINE")
    """Never touch the network."""


class CacheConfig(Group):
    """The paged K/V cache and its memory."""

    block_size: int = field(default=0, choices=(0, 8, 16, 32, 64))
    """Tokens in one cache block. 0: chosen for the device."""
    kv_cache_dtype: str = field(
        default="auto",
        choices=(
            *("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"),
            *("k8v4", "tq3.5", "tq2.5"),
        ),
        flags=("--cpu-kv-dtype",),
    )
    """Type of cached keys and values; auto follows the model, fp8 is fp8_e4m3. k8v4 has keys of 8 bits and values of 4;
    tq3.5 and tq2.5 (TurboQuant) rotate rows and keep 3.5 or 2.5 bits of a number."""
    enable_prefix_caching: bool = field(default=True)
    """Reuse the cache of equal prompt beginnings."""
    memory: str | None = field(default=None)
    """Memory to use: a fraction (0.9), a size (100GiB), or what to leave (leave=8GiB)."""
    gpu_memory_utilization: float | None = field(default=None, ge=0.01, le=1.0)
    """vLLM's spelling of --memory with a fraction."""
    kv_cache_memory_bytes: int | None = field(default=None, ge=1)
    """Size of the K/V cache; overrides --memory. Accepts 4GiB."""
    num_gpu_blocks_override: int | None = field(default=None, ge=1)
    """Exact number of cache blocks, for tests."""
    state_snapshots: str = field(default="auto")
    """Memory for snapshots of the states of recurrent layers, without which a model that has any finds no prefix cached:
    a size (8GiB), or auto, a quarter of what is left beside the model. 0 keeps none."""


class SchedulerConfig(Group):
    """Who runs, and how much one step computes."""

    max_num_seqs: int = field(default=0, ge=0, le=65536)
    """Sequences that may run in one step. 0: chosen for the device."""
    max_num_batched_tokens: int | None = field(default=None, ge=1)
    """Tokens one step may compute. Default: chosen for the device."""
    enable_chunked_prefill: bool = field(default=True)
    """Split long prompts over steps."""
    long_prefill_token_threshold: int = field(default=0, ge=0)
    """Most prompt tokens of one sequence in one step while others run; 0 for no limit of its own."""
    step_time_target_ms: float = field(default=0.0, ge=0, also=(-1,))
    """Longest a step should take while sequences decode; prefill chunks shrink to meet it. 0: chosen for the device;
    -1: any time, which is what `LLM` uses, where nobody reads along."""
    scheduling_policy: str = field(default="fcfs", choices=("fcfs", "priority"))
    """Order of waiting requests."""
    async_scheduling: bool = field(default=True)
    """Launch a step before the previous one's tokens are read."""
    max_num_queued_reqs: int = field(default=2048, ge=1)
    """Waiting requests before new ones are answered 503."""
    max_num_queued_tokens: int = field(default=4_000_000, ge=1)
    """Waiting prompt tokens before new requests are answered 503."""
    stream_interval: int = field(default=1, ge=1)
    """Tokens per streamed chunk."""


class DeviceConfig(Group):
    """What runs the model."""

    device: str = field(default="auto", choices=("auto", "cpu", "cuda"))
    """Device kind."""
    threads: int | None = field(default=None, ge=1, le=1024)
    """CPU threads for the model. Default: the physical cores this process may use."""
    enforce_eager: bool = field(default=False)
    """Never capture graphs."""
    attention_backend: str = field(default="auto")
    """Attention implementation by name; an unusable choice is an error."""
    structured_outputs_backend: str = field(
        default="auto", choices=("auto", "llguidance", "xgrammar"), flags=("--guided-decoding-backend",)
    )
    """What makes the masks of structured outputs. xgrammar: for plain JSON Schemas, llguidance for all else; needs the
    package of the extra `xgrammar`. auto: llguidance."""
    kernel: list[str] = field(factory=list)
    """OP=IMPLEMENTATION, repeatable: choose one op's implementation."""
    require_route: bool = field(default=False)
    """Refuse to start if any op would fall back to its reference."""
    deterministic: bool = field(default=False)
    """Same tokens at every batch size (GPU only)."""
    tensor_parallel_size: int = field(default=1, ge=1, flags=("-tp",))
    """Devices that share each layer."""
    profiler_dir: str | None = field(default=None)
    """Directory that profiles are written to, when start_profile asks for one. Default: profiling is off."""


class ServerConfig(Group):
    """The HTTP front end."""

    host: str = field(default="127.0.0.1")
    """Address to listen on."""
    port: int = field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    uds: str | None = field(default=None)
    """Unix socket to listen on instead."""
    api_key: list[str] = field(factory=list, env="SAMOVAR_API_KEY")
    """Keys accepted as bearer tokens, repeatable."""
    api_keys_file: str | None = field(default=None)
    """YAML list of keys: name, key (or sha256), and what its requests get: priority, salt (own or shared), trusted."""
    admin_api_key: list[str] = field(factory=list, env="SAMOVAR_ADMIN_API_KEY")
    """Keys that open the admin routes (and all others), repeatable."""
    admin_port: int | None = field(default=None, ge=0, le=65535)
    """Port on 127.0.0.1 of a second listener for the admin routes, without a key unless --admin-api-key is given; 0 picks
    a free one. Default: none."""
    salt_by_key: bool = field(default=False)
    """Give every key its own part of the prefix cache, so that no user learns from timing what another one sent."""
    grpc_port: int | None = field(default=None, ge=0, le=65535)
    """Port of the gRPC service; 0 picks a free one. Needs the packages of the extra `grpc`. Default: no gRPC."""
    grpc_host: str = field(default="127.0.0.1")
    """Address of the gRPC service."""
    served_model_name: list[str] = field(factory=list)
    """Names the model answers to; the first is reported."""
    chat_template: str | None = field(default=None)
    """Chat template file, or the template itself."""
    chat_template_content_format: str = field(default="auto", choices=("auto", "string", "openai"))
    """How the template takes message content: as one string, or as a list of parts. Default: as its source shows."""
    default_chat_template_kwargs: dict[str, Any] = field(factory=dict)
    """JSON object of template variables."""
    trust_request_chat_template: bool = field(default=False)
    """Accept chat templates in requests."""
    enable_auto_tool_choice: bool = field(default=True)
    """Let the model choose whether to call a tool. Off: tool_choice "auto" counts as "none"."""
    tool_call_parser: str = field(default="auto")
    """How the model writes tool calls: the name of a format, or "none". Default: as the chat template shows."""
    reasoning_parser: str = field(default="auto")
    """How the model marks what it thinks: the name of a format, or "none". Default: as the chat template shows."""
    reasoning_content_alias: bool = field(default=True)
    """Chat answers repeat `reasoning` as `reasoning_content`, the name that many clients read."""
    max_tools: int = field(default=1024, ge=1)
    """Most tools in one request."""
    max_tools_bytes: int = field(default=4 * 1024 * 1024, ge=1024)
    """Largest size of all tool definitions of one request, as JSON."""
    structured_outputs_timeout: float = field(default=2.0, ge=0.05)
    """Seconds that compiling the grammar of one request may take; it is refused then."""
    structured_outputs_max_bytes: int = field(default=512 * 1024, ge=1024)
    """Largest schema, regex or grammar of one request."""
    structured_outputs_cache_bytes: int = field(default=64 * 1024 * 1024, ge=0)
    """Memory for grammars that were compiled before."""
    enable_responses_store: bool = field(default=True)
    """Keep answers of /v1/responses in memory, for `previous_response_id` and retrieval."""
    responses_store_bytes: int = field(default=64 * 1024 * 1024, ge=1024)
    """Memory for kept answers; the oldest go first."""
    anthropic_volatile_lines: bool = field(default=True)
    """Keep lines of a system prompt that change with every turn from spoiling the prefix cache (/v1/messages): billing
    headers are left out, others move to the end of the last message."""
    anthropic_model_aliases: bool = field(default=False)
    """Answer /v1/messages under every model name that begins with "claude"."""
    response_role: str = field(default="assistant")
    """Role of generated messages."""
    allowed_origins: list[str] = field(factory=list)
    """CORS origins, repeatable. Default: none."""
    root_path: str = field(default="")
    """Path prefix added by a proxy."""
    max_body_bytes: int = field(default=32 * 1024 * 1024, ge=1024)
    """Largest request body."""
    max_choices: int = field(default=128, ge=1)
    """Largest n of a request."""
    max_prompts: int = field(default=1024, ge=1)
    """Most prompts in one completions request."""
    max_tokens_ceiling: int | None = field(default=None, ge=1)
    """Most tokens an answer may have; a larger max_tokens is cut to it, and the answer ends with finish_reason length."""
    shutdown_timeout: float = field(default=30.0, ge=0)
    """Seconds running requests may finish in after SIGTERM."""
    sse_keep_alive_interval: float = field(default=0.0, ge=0)
    """Seconds of silence after which a stream sends a comment; 0 for never."""
    enable_prompt_tokens_details: bool = field(default=True)
    """Report cached prompt tokens in usage."""
    enable_force_include_usage: bool = field(default=False)
    """Send usage on every stream."""
    enable_request_id_headers: bool = field(default=False)
    """Answer with an X-Request-Id header."""
    return_tokens_as_token_ids: bool = field(default=False)
    """Write logprob tokens as token_id:N."""
    disable_docs: bool = field(default=False, flags=("--disable-fastapi-docs",))
    """Do not serve /docs and /openapi.json."""
    enable_log_requests: bool = field(default=False)
    """Log one line per request (never its text)."""
    log_level: str = field(default="info", choices=("debug", "info", "warning", "error"), env="SAMOVAR_LOG_LEVEL")
    """Least important messages to log."""
    engine_timeout: float = field(default=120.0, ge=1)
    """Seconds without progress, while it starts or work exists, after which the engine counts as stuck."""
