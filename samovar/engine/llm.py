"""LLM: offline batches. One engine in this process, driven by the caller's thread; vLLM's signatures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

from samovar.config.description import ModelDescription
from samovar.config.engine import EngineConfig, with_settings
from samovar.config.resolve import NO_STEP_TIME_TARGET
from samovar.core.collector import collector_paused
from samovar.core.outputs import EngineInfo
from samovar.core.request import Request
from samovar.core.sampling_params import OutputKind, SamplingParams
from samovar.engine.batch import run_batch
from samovar.engine.beam_search import BeamSearchParams, search
from samovar.engine.build import build_engine, find_model, once_each
from samovar.engine.chatting import door_for, tool_options, values_of
from samovar.engine.door import DEFAULT_MAX_TOKENS, load_text, make_preparer
from samovar.engine.engine_args import EngineArgs, engine_config
from samovar.engine.metric_snapshots import Metric, snapshots
from samovar.engine.metrics import ServingMetrics
from samovar.engine.prompts import PromptType, prompt_list, require_params, split_prompt
from samovar.engine.request_output import BeamSearchOutput, RequestOutput
from samovar.errors import ConfigError, ConflictError, ValidationError
from samovar.text.dialogue import Dialogue
from samovar.text.messages import ContentFormat
from samovar.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from samovar.worker.model_runner import LogitsWatch

logger = logging.getLogger(__name__)

Params = SamplingParams | Sequence[SamplingParams] | None
Messages = list[dict[str, Any]]


class LLM:
    """A loaded model that answers lists of prompts with lists of outputs, in the same order.

    `flags` are any engine flags (`max_model_len`, `dtype`, `gpu_memory_utilization`, `load_format`, ...). Raises
    `TypeError` for an unknown flag, `ConfigError` for one that only other engines have or a value out of range,
    `CheckpointError` and `MemoryPlanError` for a model that cannot be loaded. Use it as a context manager, or call
    `shutdown`, to give the memory back. Safe to call from several threads; calls wait for each other.
    """

    def __init__(
        self, model: str, *, tokenizer: str | None = None, chat_template: str | None = None, **flags: Any
    ) -> None:
        self._start(engine_config({"model": model, "tokenizer": tokenizer, **flags}), chat_template)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """The same from an `EngineArgs`."""
        made = cls.__new__(cls)
        made._start(engine_args.config, None)
        return made

    def _start(self, config: EngineConfig, chat_template: str | None) -> None:
        self._lock = threading.Lock()
        self._is_shut_down = False
        if config.scheduler.step_time_target_ms == 0:
            config = with_settings(config, step_time_target_ms=NO_STEP_TIME_TARGET)  # nobody reads along
        self.description: ModelDescription = find_model(config)
        """What the checkpoint says about itself."""
        # Before the weights: a tokenizer or a template that cannot be read is known at once.
        text = load_text(config, self.description, chat_template=chat_template)
        with collector_paused():
            self._engine, info = build_engine(config, once_each(_log_phase), self.description, tokenizer=text.tokenizer)
        while self._engine.prepare():
            pass  # A batch has no idle moments in which that could be done.
        self.info: EngineInfo = info
        """Facts about the loaded engine: sizes, decisions, memory plan."""
        self._preparer = make_preparer(config, self.description, info, text)
        self._metrics = ServingMetrics(info.model, info)
        self._world_size = config.device.tensor_parallel_size

    # --- generation

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: list[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt: text, token ids, or a dict of either.

        `sampling_params` is one for all, one per prompt, or None for the model's own defaults. `priority` has one
        integer per prompt (needs `scheduling_policy="priority"`). Raises `ValidationError` before anything runs.
        """
        _refuse(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        items = prompt_list(prompts)
        per_prompt = _params_per_item(sampling_params, len(items))
        priorities = _per_item("priority", priority, len(items))
        special = _add_special_tokens(tokenization_kwargs)
        requests: list[tuple[Request, str | None]] = []
        for prompt, params, rank in zip(items, per_prompt, priorities, strict=True):
            text, ids, salt = split_prompt(prompt)
            params = self._offline(params or self.get_default_sampling_params())
            if ids is None:
                ids = self._preparer.encode_text(text or "", add_special_tokens=special)
            request = self._preparer.from_ids(ids, params, priority=rank or 0, cache_salt=salt)
            requests.append((request, text))
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several.

        `chat_template` is a whole template in place of the model's own. `options` are `priority`, `tools` (OpenAI's
        form), `tool_choice`, `parallel_tool_calls`, `reasoning_effort` and `chat_template_kwargs`. Without
        `sampling_params` an answer may be as long as the context allows. Reasoning and calls are left in the text as the
        model wrote them. The rendered prompt is in each output's `prompt`. Raises `ValidationError` before anything runs.
        """
        conversations = _conversations(messages)
        per_prompt = _params_per_item(sampling_params, len(conversations))
        priorities = _per_item("priority", options.pop("priority", None), len(conversations))
        asked = {
            **tool_options(options),
            "reasoning_effort": options.pop("reasoning_effort", None),
            "template_variables": options.pop("chat_template_kwargs", None) or {},
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
        }
        _refuse(**options)
        door = door_for(self._preparer, chat_template_content_format)
        requests: list[tuple[Request, str | None]] = []
        for conversation, params, rank in zip(conversations, per_prompt, priorities, strict=True):
            params = self._offline(params or door.params(max_tokens=None))
            prepared = door.from_dialogue(
                Dialogue(messages=conversation, **asked), values_of(params), priority=rank or 0
            )
            requests.append((prepared.request, self._decode(prepared.request.prompt_token_ids)))
        return self._run(requests, use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` likeliest continuations of each prompt, best first; width 1 is greedy decoding.

        `concurrency_limit` is how many prompts are searched side by side (default: all).
        """
        _refuse(lora_request=lora_request)
        token_lists = [self._token_ids(prompt) for prompt in prompt_list(prompts)]
        with self._lock:
            self._require_awake()
            return search(self._engine, self._preparer, token_lists, params, self._metrics, concurrency_limit)

    # --- about the model

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; `ConfigError` with `skip_tokenizer_init`."""
        if self._preparer.tokenizer is None:
            raise ConfigError("there is no tokenizer: skip_tokenizer_init is set")
        return self._preparer.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses when it is given no `sampling_params`: the model's own defaults."""
        return self._preparer.params(max_tokens=DEFAULT_MAX_TOKENS)

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms of this engine as they are now, under the names that a server's /metrics has."""
        with self._lock:
            self._require_engine()
            self._metrics.take_snapshot(self._engine.stats())
            return snapshots(self._metrics)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Devices that share the model. There is one engine, so `include_dp` changes nothing."""
        return self._world_size

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget every cached prompt beginning. Between two batches nothing runs, so the arguments change nothing."""
        return bool(self._call("reset_prefix_cache", reset_running_requests=reset_running_requests))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`: the K/V cache and, on a GPU, the weights: moved to host memory (level 1) or
        dropped (level 2, read again from the checkpoint). On a CPU level 1 keeps the weights. Level 0 frees nothing."""
        self._call("sleep", level=level, mode=mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back "weights" and "kv_cache", or those of them that `tags` names, and go on once both are there."""
        self._call("wake_up", tags=tags)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Note what runs, for a trace in `profiler_dir`. Raises `ConflictError` without that flag."""
        self._call("start_profile", prefix=profile_prefix or "")

    def stop_profile(self) -> None:
        """Write the trace."""
        logger.info("profile written to %s", self._call("stop_profile"))

    def watch_logits(self, watch: LogitsWatch | None) -> None:
        """Have `watch(position, logits)` see the float32 logits [rows, vocab] of prompts whose logprobs are asked for, from
        a position of the prompt on; None ends it. It is called while `generate` runs, in any pieces, and again for rows
        that had to be computed again; prompts are told apart by giving one at a time. What it raises fails the prompt."""
        with self._lock:
            self._require_awake()
            self._engine.executor.call("watch_logits", watch)

    # --- the end

    def shutdown(self) -> None:
        """Stop the engine; calling it twice is fine."""
        with self._lock:
            if not self._is_shut_down:
                self._is_shut_down = True
                self._engine.close()
                self._preparer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _call(self, name: str, **arguments: Any) -> Any:
        with self._lock:
            self._require_engine()
            return self._engine.call(name, **arguments)

    def _require_engine(self) -> None:
        if self._is_shut_down:
            raise ValidationError("this LLM is shut down; make a new one")

    def _require_awake(self) -> None:
        self._require_engine()
        if self._engine.standby.is_paused:
            raise ConflictError(f"the engine is {self._engine.standby.state}: call wake_up() first")

    def _run(self, requests: list[tuple[Request, str | None]], use_tqdm: bool) -> list[RequestOutput]:
        with self._lock:
            self._require_awake()
            tokenizer = self._preparer.tokenizer
            return run_batch(self._engine, tokenizer, requests, self._metrics, show_progress=use_tqdm)

    def _offline(self, params: SamplingParams) -> SamplingParams:
        has_tokenizer = self._preparer.tokenizer is not None
        return params.clone(output_kind=OutputKind.FINAL_ONLY, detokenize=params.detokenize and has_tokenizer)

    def _token_ids(self, prompt: PromptType) -> list[int]:
        text, ids, _ = split_prompt(prompt)
        if ids is not None:
            return ids
        assert text is not None
        return self.get_tokenizer().encode(text)

    def _decode(self, ids: Iterable[int]) -> str | None:
        tokenizer = self._preparer.tokenizer
        return None if tokenizer is None else tokenizer.decode(list(ids), skip_special_tokens=False)


def _log_phase(phase: str) -> None:
    logger.info("%s", phase)


def _refuse(**arguments: Any) -> None:
    """Arguments of vLLM's methods that ask for what this engine does not have."""
    for name, value in arguments.items():
        if value is not None and value != "auto":
            raise ValidationError(f"{name} is not supported; leave it out", parameter=name, value=value)


def _add_special_tokens(tokenization_kwargs: dict[str, Any] | None) -> bool:
    options = dict(tokenization_kwargs or {})
    special = options.pop("add_special_tokens", True)
    _refuse(**options)
    return bool(special)


def _per_item(name: str, value: Any, count: int) -> list[Any]:
    """One value for each prompt, from one value for all or a list of the right length."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        message = f"{name}: {len(value)} were given for {count} prompts; give one, or one per prompt"
        raise ValidationError(message, parameter=name, value=len(value))
    return list(value)


def _params_per_item(value: Params, count: int) -> list[SamplingParams | None]:
    items = _per_item("sampling_params", value, count)
    for item in items:
        require_params(item)
    return items


def _conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    _require_list(messages)
    if messages and all(isinstance(message, dict) for message in messages):
        return [list(messages)]  # type: ignore[arg-type]
    for conversation in messages:
        _require_list(conversation)
    return [list(conversation) for conversation in messages]  # type: ignore[arg-type]


def _require_list(messages: object) -> None:
    if not isinstance(messages, (list, tuple)):
        message = f"messages must be a list of messages, or a list of such lists, got {type(messages).__name__}"
        raise ValidationError(message, parameter="messages", value=messages)
