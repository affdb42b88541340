"""An EngineClient that emits given tokens per step: the real `Conversation` in front of a scripted loop, no model.

Also the tiny real checkpoint folder (byte-level tokenizer, ChatML template) that the server's text side runs on.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from samovar.config.description import ModelDescription
from samovar.config.groups import SchedulerConfig
from samovar.core.messages import AbortRequest, AddRequest, FrontEndMessage, Outputs
from samovar.core.outputs import EngineInfo, EngineStats, SequenceOutput, SequenceTiming, TokenLogprobs
from samovar.core.request import Request
from samovar.core.sequence import FinishReason
from samovar.engine.conversation import Conversation

END, START, BOS = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' and not m.content %}{% elif m.role not in "
    "['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% for document in documents or [] %}({{ document.text }}){% endfor %}"
    "{% if mood %}[{{ mood }}]{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 259
MAX_LEN = 512

Script = Callable[[Request, int], list[int]]


def write_model(folder: Path) -> ModelDescription:
    """A checkpoint folder without weights: every byte is a token (ids 0..255), then three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = {char: i for i, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=order, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, START, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": END, "bos_token": None, "tokenizer_class": "GPT2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return ModelDescription(
        path=folder,
        format="safetensors",
        architecture="LlamaForCausalLM",
        config={},
        eos_token_ids=(258,),
        vocab_size=VOCAB,
    )


def engine_facts(**changes: Any) -> EngineInfo:
    """Facts of an imaginary engine."""
    facts: dict[str, Any] = {
        "model": "tiny", "architecture": "LlamaForCausalLM", "vocab_size": VOCAB, "max_model_len": MAX_LEN,
        "dtype": "float32", "kv_cache_dtype": "float32", "block_size": 16, "num_blocks": 1000, "max_num_seqs": 256,
        "max_num_batched_tokens": 2048, "load_seconds": 0.1, "weight_bytes": 1, "prefix_caching": True,
        "scheduling_policy": "fcfs",
    }  # fmt: skip
    return EngineInfo(**(facts | changes))


@dataclass
class _Run:
    request: Request
    index: int
    tokens: list[int]
    finish: FinishReason
    at: int = 0
    error: str | None = None
    timing: SequenceTiming = field(default_factory=SequenceTiming)


class ScriptedEngine:
    """`script(request, index)` gives a choice's tokens; every `step_seconds`, each running choice emits `per_step`.

    `delay` is how long a request waits for its first step. An id of -1 in a script fails the choice there.
    """

    def __init__(
        self,
        script: Script,
        *,
        info: EngineInfo | None = None,
        step_seconds: float = 0.0,
        per_step: int = 1,
        delay: float = 0.0,
        limits: SchedulerConfig | None = None,
    ) -> None:
        self.info = info or engine_facts()
        self.script, self.step_seconds, self.per_step, self.delay = script, step_seconds, per_step, delay
        self.requests: list[Request] = []
        self.aborts: list[tuple[str, int | None, float]] = []
        self.num_steps = 0
        self.cached = 0
        self._runs: dict[tuple[str, int], _Run] = {}
        self._work: asyncio.Event = asyncio.Event()
        self._conversation = Conversation(limits or SchedulerConfig(), self._hear)
        self._conversation.open()
        self._loop_task: asyncio.Task[None] | None = None
        self.is_ready = True
        self.refuses: str | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}

    # --- EngineClient

    @property
    def stats(self) -> EngineStats:
        return self._conversation.stats

    @property
    def is_alive(self) -> bool:
        return self._conversation.is_open

    def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        if self._loop_task is None:
            self._loop_task = asyncio.ensure_future(self._run())
        return self._conversation.generate(request)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        self._conversation.abort(request_id, index)

    async def call(self, name: str, **arguments: Any) -> Any:
        """Note the call and answer with what `answers` has for it: a value, or an error to raise."""
        self.calls.append((name, arguments))
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def on_stats(self, listener: Callable[[EngineStats], None]) -> None:
        self._conversation.on_stats(listener)

    async def close(self) -> None:
        self._conversation.close("closed")
        if self._loop_task is not None:
            self._loop_task.cancel()

    # --- the test's side

    def die(self) -> None:
        """As if the process had been killed."""
        self._runs.clear()
        self._conversation.close("the engine process ended")

    @property
    def num_running(self) -> int:
        return len(self._runs)

    def _hear(self, message: FrontEndMessage) -> None:
        if isinstance(message, AddRequest):
            request = message.request
            self.requests.append(request)
            most = request.params.max_tokens or 0
            for index in range(request.params.n):
                tokens = self.script(request, index)
                finish = FinishReason.STOP
                if len(tokens) >= most:
                    tokens, finish = tokens[:most], FinishReason.LENGTH
                else:
                    tokens = [*tokens, 258]
                timing = SequenceTiming(arrival=request.arrival, first_scheduled=time.monotonic() + self.delay)
                self._runs[request.request_id, index] = _Run(request, index, tokens, finish, timing=timing)
            self._work.set()
        elif isinstance(message, AbortRequest):
            self.aborts.append((message.request_id, message.index, time.monotonic()))
            for key in [k for k in self._runs if k[0] == message.request_id and message.index in (None, k[1])]:
                del self._runs[key]
            self._work.set()

    async def _run(self) -> None:
        while True:
            self._work.clear()
            now = time.monotonic()
            ready = [r for r in self._runs.values() if r.timing.first_scheduled <= now]
            outputs = [self._emit(run, now) for run in ready]
            self.num_steps += 1
            self._conversation.take(Outputs(outputs, self._snapshot()))
            if self._runs:
                await asyncio.sleep(self.step_seconds)
            else:
                await self._work.wait()

    def _snapshot(self) -> EngineStats:
        running = len(self._runs)
        return EngineStats(
            num_running=running, num_blocks=1000, num_free_blocks=1000 - running, kv_cache_usage=running / 1000,
            num_steps=self.num_steps, step_tokens=[running] if running else [],
        )  # fmt: skip

    def _emit(self, run: _Run, now: float) -> SequenceOutput:
        request, first = run.request, run.at == 0
        tokens = run.tokens[run.at : run.at + self.per_step]
        run.at += len(tokens)
        failed = -1 in tokens
        is_last = run.at >= len(run.tokens)
        if tokens and not run.timing.first_token:
            run.timing.first_token = now
        run.timing.last_token = now
        output = SequenceOutput(request.request_id, run.index, tokens, num_cached_tokens=self.cached)
        if request.params.logprobs is not None:
            output.logprobs = [_logprobs(t, request.params.logprobs) for t in tokens]
        if first and run.index == 0 and request.params.prompt_logprobs is not None:
            ids = request.prompt_token_ids
            output.prompt_logprobs = [None, *(_logprobs(t, request.params.prompt_logprobs) for t in ids[1:])]
        if failed:
            output.token_ids, output.logprobs = [], None
            output.finish_reason, output.error = FinishReason.ERROR, "row failed"
        elif is_last:
            output.finish_reason, output.timing = run.finish, run.timing
        if failed or is_last:
            self._runs.pop((request.request_id, run.index), None)
        return output


def _logprobs(token: int, top: int) -> TokenLogprobs:
    """The chosen token at rank 2, alternatives counting up from id 1; one of them is impossible."""
    count = VOCAB if top == -1 else top
    others = [(token + 1 + i) % VOCAB for i in range(count)]
    values = [-0.5 * (i + 1) for i in range(count)]
    if count > 2:
        values[-1] = float("-inf")
    return TokenLogprobs([token, *others], [-0.75, *values], 2)


def saying(text: str) -> Script:
    """Every choice says `text`, choice number appended after the first."""

    def script(request: Request, index: int) -> list[int]:
        return list(encode(text if index == 0 else f"{text}{index}"))

    return script


_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def _byte_of_char() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {chr(b): b for b in printable}, 0
    for byte in range(256):
        if byte not in printable:
            table[chr(256 + extra)] = byte
            extra += 1
    return table


_ID_OF_BYTE = {_byte_of_char()[char]: i for i, char in enumerate(_ALPHABET)}


def encode(text: str) -> list[int]:
    """Text -> the ids of its bytes."""
    return [_ID_OF_BYTE[byte] for byte in text.encode()]
