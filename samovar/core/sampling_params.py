"""SamplingParams: how tokens are chosen and when a sequence ends. vLLM's names, ranges and defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from samovar.core.structured import StructuredOutputsParams
from samovar.errors import ValidationError

GREEDY_BELOW = 1e-5
"""Temperatures under this value mean greedy decoding."""

MIN_TEMPERATURE = 0.01
"""Non-zero temperatures are raised to this value: smaller ones overflow float32 logits."""

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Logits are multiplied and divided by it: float32 must hold the result."""

MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS = 1024
MAX_SEED = 2**63 - 1
SWITCHES = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
"""Fields that are true or false and nothing that merely counts as such."""


class OutputKind(IntEnum):
    """What each emitted output holds: everything so far, the news only, or only the final state."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _fail(parameter: str, value: Any, rule: str) -> None:
    raise ValidationError(f"{parameter} must be {rule}, got {value!r}", parameter=parameter, value=value)


def _number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    bad_type = isinstance(value, bool) or not isinstance(value, (int, float))
    if bad_type or not math.isfinite(value) or value > high or value < low or (low_open and value == low):
        _fail(name, value, f"a finite number in {'(' if low_open else '['}{low}, {high}]")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        _fail(name, value, f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling settings; checked on construction, frozen afterwards.

    Ranges that depend on the model (vocabulary, context, server limits) are checked by
    `core.validation.resolve_params`, which every front end calls before a request enters the engine.
    Raises `ValidationError` naming the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    stream_interval: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    bad_words_token_ids: list[list[int]] | None = None
    """Token forms of `bad_words`; filled by the front end, which owns the tokenizer."""
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    """Most tokens of reasoning; then its end is forced. None and -1: no limit."""

    def __post_init__(self) -> None:
        self._normalise()
        _integer("n", self.n, 1)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0)
        _integer("min_tokens", self.min_tokens, 0)
        if self.thinking_token_budget is not None:
            _integer("thinking_token_budget", self.thinking_token_budget, -1)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            _fail("structured_outputs", self.structured_outputs, "a StructuredOutputsParams")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1)
        if self.stream_interval is not None:
            _integer("stream_interval", self.stream_interval, 1)
        self._check_kinds()
        self._check_lists()
        self._check_combinations()

    def _normalise(self) -> None:
        """Accept the spellings vLLM accepts: one stop string, None lists, string bias keys, seed -1."""
        set_ = object.__setattr__
        if self.stop is None or isinstance(self.stop, str):
            set_(self, "stop", [] if self.stop is None else [self.stop])
        for name in ("stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                set_(self, name, [])
        if self.seed == -1:
            set_(self, "seed", None)
        if self.logit_bias is not None:
            set_(self, "logit_bias", _parse_bias(self.logit_bias))

    def _check_kinds(self) -> None:
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                _fail(name, getattr(self, name), "True or False")
        if not isinstance(self.skip_reading_prefix_cache, bool | None):
            _fail("skip_reading_prefix_cache", self.skip_reading_prefix_cache, "True, False or None")
        if not isinstance(self.output_kind, OutputKind):
            _fail(
                "output_kind", self.output_kind, "one of " + ", ".join(f"OutputKind.{kind.name}" for kind in OutputKind)
            )

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            items = getattr(self, name)
            if not isinstance(items, list) or not all(isinstance(s, str) and s for s in items):
                _fail(name, items, "a list of non-empty strings")
        if len(self.bad_words) > MAX_BAD_WORDS:
            _fail("bad_words", f"{len(self.bad_words)} items", f"at most {MAX_BAD_WORDS} items")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids is None:
                continue
            if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                _fail(name, ids, "a list of token ids")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _fail("allowed_token_ids", self.allowed_token_ids, "a non-empty list of token ids")

    def _check_combinations(self) -> None:
        if self.n > 1 and self.is_greedy:
            _fail("n", self.n, "1 when temperature is 0: greedy choices would all be the same")
        if self.stop and not self.detokenize:
            _fail("stop", self.stop, "empty when detokenize is False: stop strings match text")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _fail("min_tokens", self.min_tokens, f"<= max_tokens ({self.max_tokens})")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def effective_temperature(self) -> float:
        """0.0 for greedy, otherwise the temperature raised to `MIN_TEMPERATURE`."""
        return 0.0 if self.is_greedy else max(self.temperature, MIN_TEMPERATURE)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def needs_output_ids(self) -> bool:
        """True if choosing the next token needs the previous ids on the host, so that no token may be in flight."""
        return any(len(word) > 1 for word in self.bad_words_token_ids or ())

    @property
    def reads_prefix_cache(self) -> bool:
        if self.skip_reading_prefix_cache is not None:
            return not self.skip_reading_prefix_cache
        return self.prompt_logprobs is None

    def clone(self, **changes: Any) -> SamplingParams:
        return replace(self, **changes)

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Build from values where None means "use the default"."""
        return cls(**{name: value for name, value in values.items() if value is not None})


def _parse_bias(raw: Any) -> dict[int, float]:
    """Token id -> bias in [-100, 100]. Keys may be the decimal strings that JSON objects force."""
    if not isinstance(raw, dict):
        _fail("logit_bias", raw, "an object of token id -> number")
    if len(raw) > MAX_LOGIT_BIAS:  # Before anything looks at each of them.
        message = f"logit_bias: at most {MAX_LOGIT_BIAS} entries, got {len(raw)}"
        raise ValidationError(message, parameter="logit_bias", value=len(raw))
    bias: dict[int, float] = {}
    for key, value in raw.items():
        text = str(key)
        if isinstance(key, bool) or not (text.isascii() and text.isdigit()):
            _fail("logit_bias", key, "keyed by token ids (decimal integers)")
        _number("logit_bias", value, -1e30, 1e30)
        bias[int(text)] = min(max(float(value), -100.0), 100.0)
    return bias
