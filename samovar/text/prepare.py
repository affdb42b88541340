"""Preparer: the single door. Ids or a dialogue, and sampling values in; a checked `Request` out.

`LLM` and the server use it alike, so that nothing reaches the engine unchecked and no two APIs differ in a default.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Literal, TypeAlias

from samovar.config.description import ModelDescription
from samovar.core.constraint import Constraint
from samovar.core.outputs import EngineInfo
from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.core.validation import RequestLimits, check_prompt, check_routing, resolve_params
from samovar.errors import ConfigError, ValidationError
from samovar.text.answering import checked_structured, plan_dialogue
from samovar.text.chat_template import RESERVED, ChatTemplate, RenderedPrompt, encode_rendered
from samovar.text.dialogue import Dialogue, PreparedDialogue
from samovar.text.formats.base import ReasoningFormat, ToolFormat
from samovar.text.grammar_source import GrammarSource
from samovar.text.reasoning import end_of_ids, reasoning_span
from samovar.text.tokenizer import Tokenizer
from samovar.text.wording import prepare_dialogue

_DEFAULTS_OF_MODEL = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""generation_config.json key -> sampling parameter."""


Side: TypeAlias = Literal["left", "right"]
Formats: TypeAlias = tuple[ToolFormat | None, ReasoningFormat | None]
"""How a model writes calls, and how it marks what it thinks; None where that is not known."""


def limits_from(
    info: EngineInfo, *, max_logprobs: int = 20, max_choices: int = 128, max_tokens_ceiling: int | None = None
) -> RequestLimits:
    """Limits of one request on this engine. `max_logprobs` -1 allows the whole vocabulary."""
    return RequestLimits(
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_logprobs=info.vocab_size if max_logprobs == -1 else max_logprobs,
        max_choices=max_choices,
        max_tokens_ceiling=max_tokens_ceiling,
        allows_priority=info.scheduling_policy == "priority",
    )


def end_token_ids(description: ModelDescription, tokenizer: Tokenizer | None) -> list[int]:
    """Ids that end a sequence: all the checkpoint's files name, and the tokenizer's eos."""
    eos = None if tokenizer is None else tokenizer.eos_token_id
    return list(dict.fromkeys([*description.eos_token_ids, *([] if eos is None else [eos])]))


def sampling_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters that a generation_config sets, under our names; everything else in it is left out.

    `do_sample: false` means temperature 0. What this returns may be given to it again. Raises `ConfigError` for a value
    that no request could be served with.
    """
    found = {}
    for theirs, ours in _DEFAULTS_OF_MODEL.items():
        value = config.get(theirs, config.get(ours))
        if value is not None:
            found[ours] = value
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        SamplingParams(**found)
    except ValidationError as error:
        message = f"generation_config: {error}; correct generation_config.json or --override-generation-config"
        raise ConfigError(f"{message}, or leave the file out with --generation-config vllm") from error
    return found


SLICE_CHARS = 65_536
"""Texts up to this length are encoded at once."""
SEAM_TOKENS = 512
"""Tokens that cutting a text in two may add: no token is longer than this many characters."""
MIN_MESSAGES = 4096
"""So many messages, or documents, are looked at whatever the context is."""
CONTEXTS_ENCODED, MIN_TOKENS_ENCODED = 4, 100_000
"""A text is encoded whole up to that many times the context, or that many tokens, for truncation and /tokenize."""


class Preparer:
    """Makes requests for one engine. Immutable; cheap to share between threads.

    `default_sampling` (a generation_config, or sampling parameters) and `default_variables` (of the chat template) are
    used where a request sets nothing. Without a tokenizer only token ids are taken, without a `grammar` compiler no
    structured output and no tool choice that must be enforced. Every error is a `ValidationError` naming the request's field.

    Wherever a prompt is taken, `truncate_prompt_tokens` keeps that many of its tokens (-1: as many as the context holds
    besides one generated token), from its end for `truncation_side` "left" and from its beginning for "right". Without
    it a prompt that is too long is refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        limits: RequestLimits,
        eos_token_ids: Sequence[int],
        default_sampling: Mapping[str, Any] | None = None,
        *,
        formats: Formats = (None, None),
        grammar: GrammarSource | None = None,
        default_variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = None if template is None else template.with_tokenizer(tokenizer)
        self.limits = limits
        self.eos_token_ids = list(eos_token_ids)
        self.default_sampling = sampling_defaults(default_sampling or {})
        self.formats = formats
        self.grammar = grammar
        self.default_variables = dict(default_variables or {})

    def with_variables(self, variables: Mapping[str, Any]) -> Preparer:
        """This door with further default variables of the chat template."""
        changed = copy(self)
        changed.default_variables = {**self.default_variables, **variables}
        return changed

    def close(self) -> None:
        """End what the grammar compiler started."""
        if self.grammar is not None:
            self.grammar.close()

    def params(self, values: Mapping[str, Any] | None = None, *, max_tokens: int | None = None) -> SamplingParams:
        """Sampling parameters: what a request sets (None counts as unset), else the model's defaults, else ours.

        `max_tokens` is for requests and models that set none: None is the room left in the context (chat), an int is
        itself (16 for completions).
        """
        given = {name: value for name, value in (values or {}).items() if value is not None}
        return SamplingParams(**{"max_tokens": max_tokens, **self.default_sampling, **given})

    def from_ids(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side = "left",
    ) -> Request:
        """A request that continues these tokens."""
        params = self.params() if params is None else params
        ids = self._kept(token_ids, params, truncate_prompt_tokens, truncation_side)
        constraint = self._constraint_of_ids(ids, params)
        return self._request(ids, params, constraint, priority=priority, cache_salt=cache_salt, parameter="prompt")

    def _request(
        self,
        ids: list[int],
        params: SamplingParams,
        constraint: Constraint | None,
        *,
        priority: int,
        cache_salt: str | None,
        parameter: str,
    ) -> Request:
        check_prompt(ids, self.limits, parameter=parameter)
        check_routing(priority, cache_salt, self.limits)
        if params.stop and self.tokenizer is None:
            message = "stop: needs a tokenizer, and this engine has none"
            raise ValidationError(message, parameter="stop", value=params.stop)
        params = self._with_bad_words(params.clone(structured_outputs=None))  # the constraint says it from here on
        return Request(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=ids,
            params=resolve_params(params, len(ids), self.limits, self.eos_token_ids),
            eos_token_ids=self.eos_token_ids,
            arrival=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
            constraint=constraint,
        )

    def _constraint_of_ids(self, ids: list[int], params: SamplingParams) -> Constraint | None:
        """What a prompt of ids, which holds no dialogue, is to be followed by: structured output, or thinking in bounds."""
        if params.structured_outputs is not None:
            return Constraint(grammar=checked_structured(params.structured_outputs, self.needed_grammar()))
        budget, format = params.thinking_token_budget, self.formats[1]
        if budget is None or budget < 0 or format is None or self.tokenizer is None:
            return None
        end = end_of_ids(self.tokenizer, ids, format)
        span = reasoning_span(self.tokenizer, format, end, budget)
        return None if span is None else Constraint(reasoning=span)

    def from_dialogue(
        self,
        dialogue: Dialogue,
        values: Mapping[str, Any] | None = None,
        *,
        max_tokens: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side = "left",
    ) -> PreparedDialogue:
        """The request that answers a dialogue, and how its answers are read. The one door of all chat-like APIs.

        `values` are sampling parameters, `max_tokens` as for `params`, the rest as for `from_ids`. Rendering, and above
        all compiling a grammar, may take a while: not for an event loop.
        """
        params = self.params(values, max_tokens=max_tokens)
        self._check_count(dialogue)
        asked = prepare_dialogue(self, dialogue, params)
        ids = self.encode_rendered(asked.rendered, add_special_tokens=dialogue.add_special_tokens)
        kept = self._kept(ids, params, truncate_prompt_tokens, truncation_side)
        cuts_end = len(kept) < len(ids) and truncation_side == "right"
        plan, constraint = plan_dialogue(self, asked, "free" if cuts_end else None)
        request = self._request(
            kept, params, constraint, priority=priority, cache_salt=cache_salt, parameter="messages"
        )
        return PreparedDialogue(request=request, plan=plan, num_truncated=len(ids) - len(kept))

    def _check_count(self, dialogue: Dialogue) -> None:
        """Each has a token at least: what cannot fit need not be rendered, which takes long for so many."""
        room = self.limits.max_model_len
        for name, count in (("messages", len(dialogue.messages)), ("documents", len(dialogue.documents or ()))):
            if count > max(room, MIN_MESSAGES):
                message = f"{name}: {count} are more than this model's context of {room} tokens can hold; send fewer"
                raise ValidationError(message, parameter=name, value=count)

    def encode_dialogue(self, dialogue: Dialogue, values: Mapping[str, Any] | None = None) -> list[int]:
        """Ids of a dialogue, as `from_dialogue` makes them with these values."""
        asked = prepare_dialogue(self, dialogue, self.params(values))
        return self.encode_rendered(asked.rendered, add_special_tokens=dialogue.add_special_tokens)

    def needed_grammar(self) -> GrammarSource:
        """The grammar compiler, or a refusal where there is none."""
        if self.grammar is None:
            message = "structured_outputs: this engine enforces no grammars; it runs without a tokenizer or a compiler"
            raise ValidationError(message, parameter="structured_outputs")
        return self.grammar

    def _kept(self, token_ids: Sequence[int], params: SamplingParams, keep: int | None, side: Side) -> list[int]:
        ids = list(token_ids)
        return ids if keep is None else self._truncated(ids, params, keep, side)

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text prompt. Special tokens written in it count as such."""
        if not isinstance(text, str):
            raise ValidationError(f"prompt must be a string, got {text!r}", parameter="prompt", value=text)
        tokenizer = self._needed_tokenizer("prompt")
        self._refuse_endless(tokenizer, text, "prompt")
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _refuse_endless(self, tokenizer: Tokenizer, text: str, parameter: str) -> None:
        """Refuse a text far longer than the context after encoding only as much of it as that takes.

        Encoding tens of megabytes whole, to refuse them then, would take minutes and gigabytes. A slice counts for its
        tokens less those that a seam may cost, so no text is refused that has fewer tokens than the message says.
        """
        if len(text) <= SLICE_CHARS:
            return
        most = max(CONTEXTS_ENCODED * self.limits.max_model_len, MIN_TOKENS_ENCODED)
        fewest = 0
        for start in range(0, len(text), SLICE_CHARS):
            part = tokenizer.encode(text[start : start + SLICE_CHARS], add_special_tokens=False)
            fewest += max(len(part) - SEAM_TOKENS, 0)
            if fewest > most:
                raise ValidationError(
                    f"{parameter}: has more than {most} tokens, but this model's context holds "
                    f"{self.limits.max_model_len}; shorten it (texts this long are not truncated either)",
                    parameter=parameter,
                    value=len(text),
                )

    def encode_rendered(self, rendered: RenderedPrompt, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a rendered conversation. BOS comes from the template; `add_special_tokens` adds one if it wrote none."""
        tokenizer = self._needed_tokenizer("messages")
        self._refuse_endless(tokenizer, rendered.text, "messages")
        ids = encode_rendered(tokenizer, rendered)
        bos = tokenizer.bos_token_id
        if add_special_tokens and bos is not None and ids[:1] != [bos] and tokenizer.encode("")[:1] == [bos]:
            return [bos, *ids]
        return ids

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt text of a conversation. `chat_template` is a whole template in place of the model's own."""
        variables = self.default_variables | dict(_checked_variables(template_variables))
        return self.chosen_template(chat_template).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            documents=documents,
            **variables,
        )

    def _needed_tokenizer(self, parameter: str) -> Tokenizer:
        if self.tokenizer is None:
            message = f"{parameter}: this engine runs without a tokenizer and takes token ids only"
            raise ValidationError(message, parameter=parameter)
        return self.tokenizer

    def chosen_template(self, source: str | None) -> ChatTemplate:
        """The model's own template, or the one a caller gave. Raises `ValidationError` if there is neither."""
        if source is not None:
            base = ChatTemplate({}) if self.template is None else self.template
            try:
                return base.with_source(source, self.tokenizer)
            except ConfigError as error:
                raise ValidationError(str(error), parameter="chat_template") from error
        if self.template is None:
            raise ValidationError(
                "messages: this model has no chat template; use completions, or start with --chat-template",
                parameter="messages",
            )
        return self.template

    def _truncated(self, ids: list[int], params: SamplingParams, keep: int, side: Side) -> list[int]:
        room = self.limits.max_model_len - (0 if params.max_tokens == 0 else 1)
        if isinstance(keep, bool) or not isinstance(keep, int) or not (keep == -1 or 1 <= keep <= room):
            message = f"truncate_prompt_tokens must be -1 or an integer in [1, {room}], got {keep!r}"
            raise ValidationError(message, parameter="truncate_prompt_tokens", value=keep)
        if side not in ("left", "right"):
            message = f"truncation_side must be 'left' or 'right', got {side!r}"
            raise ValidationError(message, parameter="truncation_side", value=side)
        keep = room if keep == -1 else keep
        return ids[-keep:] if side == "left" else ids[:keep]

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Token forms of `bad_words`: as the word stands at the start of a text, and after a space."""
        if not params.bad_words:
            return params
        tokenizer = self._needed_tokenizer("bad_words")
        forms: list[list[int]] = []
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in forms:
                    forms.append(ids)
        return params.clone(bad_words_token_ids=forms)


def _checked_variables(variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Template variables of a request: an object whose names are free, so that none shadows the conversation."""
    if not isinstance(variables, Mapping | None):
        message = f"chat_template_kwargs must be an object of template variables, got {variables!r}"
        raise ValidationError(message, parameter="chat_template_kwargs", value=variables)
    for name in variables or ():
        if name in RESERVED:
            message = f"chat_template_kwargs: {name!r} is set by a field of its own"
        elif not isinstance(name, str) or not name.isidentifier():
            message = f"chat_template_kwargs: {name!r} cannot be the name of a template variable"
        else:
            continue
        raise ValidationError(message, parameter="chat_template_kwargs", value=name)
    return variables or {}
