"""Chat templates: messages to one prompt text, with the stretches that came from messages kept apart.

Text from messages, tools and documents must never become special tokens. Before rendering, every special token's text
inside them is replaced by one private-use character that occurs nowhere else; after rendering it is put back and its
place is noted. `ChatTemplate.encode` then recognises special tokens everywhere but in these places, in one pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2

from samovar.config.description import ModelDescription
from samovar.config.gguf import read_gguf_header
from samovar.errors import ConfigError, ValidationError
from samovar.text.hf_tokenizer import named_tokens, read_settings
from samovar.text.matching import NEVER, any_of, beginnings, unfinished_tail
from samovar.text.messages import ContentFormat, detect_content_format, normalize, plain, tests_for_string
from samovar.text.template_sandbox import ChatEnvironment
from samovar.text.tokenizer import SpanTokenizer, Tokenizer

RESERVED = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)
"""Names that `chat_template_kwargs` cannot set."""

TOOL_TEMPLATE = "tool_use"
_ROLES = frozenset(
    {
        *("system", "user", "assistant", "tool", "developer", "function", "model", "ipython", "observation"),
        *("environment", "tool_response", "tool_result", "tool_call", "documents", "document", "available_tools"),
        *("platform", "chatbot", "critic", "latest_reminder"),
    }
)
"""Roles that templates write between marks on purpose."""
_FIRST_PRIVATE = 0x100000
_PRIVATE = re.compile("[\U00100000-\U0010ffff]")
_ERRORS = (
    jinja2.TemplateError,
    *(TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, UnicodeError),
)
"""What evaluating a template's expressions on a client's data can raise."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt's text and the (start, end) stretches that must stay ordinary text."""

    text: str
    literal: tuple[tuple[int, int], ...] = ()


def encode_rendered(tokenizer: Tokenizer, rendered: RenderedPrompt) -> list[int]:
    """Ids of a rendered prompt, with no special token where it is literal and no BOS added."""
    if rendered.literal and isinstance(tokenizer, SpanTokenizer):
        return tokenizer.encode_spans(rendered.text, rendered.literal)
    return tokenizer.encode(rendered.text, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The texts that must not be forged: special tokens, and for client text also added tokens the template uses."""

    special: re.Pattern[str] = NEVER
    all: re.Pattern[str] = NEVER
    special_starts: frozenset[str] = frozenset()
    all_starts: frozenset[str] = frozenset()
    longest: int = 0
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, added: Mapping[str, bool], sources: Iterable[str]) -> ControlTokens:
        """From added token text -> is special, and the sources of the templates."""
        source = "\0".join(sources)
        special = [text for text, is_special in added.items() if is_special and text.strip()]
        used = [text for text, is_special in added.items() if not is_special and _is_mark(text) and text in source]
        texts = (*special, *used)
        return cls(
            any_of(special),
            any_of(texts),
            beginnings(text for text in special if _is_mark(text[0])),
            beginnings(text for text in texts if _is_mark(text[0])),
            max(map(len, texts), default=0),
            texts,
        )


def _is_mark(text: str) -> bool:
    """Added tokens that are words or white space are ordinary text in every place."""
    return any(not (char.isalnum() or char.isspace() or char in "\u2581_") for char in text)


@dataclass(frozen=True, slots=True)
class _Compiled:
    source: str
    template: jinja2.Template
    content_format: Literal["string", "openai"]
    tests_type: bool


class ChatTemplate:
    """One model's chat templates by name, and the variables and control tokens its tokenizer gives them.

    Immutable. `content_format` overrides what is detected from each template. Raises `ConfigError` for a syntax error.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        *,
        content_format: ContentFormat = "auto",
        controls: ControlTokens | None = None,
    ) -> None:
        self.sources = dict(sources)
        self.variables = dict(variables or {})
        self.content_format: ContentFormat = content_format
        self.controls = controls or ControlTokens()
        self._environment = ChatEnvironment()
        self._compiled = {name: _compile(self._environment, name, source) for name, source in self.sources.items()}

    def with_tokenizer(self, tokenizer: Tokenizer | None) -> ChatTemplate:
        """This template with a tokenizer's token names and control tokens."""
        if not isinstance(tokenizer, SpanTokenizer):
            return self
        changed = copy(self)
        changed.variables = {**self.variables, **tokenizer.named_tokens}
        changed.controls = ControlTokens.of(tokenizer.added_tokens, self.sources.values())
        return changed

    def with_format(self, content_format: ContentFormat) -> ChatTemplate:
        """This template with another rule for message content."""
        changed = copy(self)
        changed.content_format = content_format
        return changed

    def with_source(self, source: str, tokenizer: Tokenizer | None) -> ChatTemplate:
        """Another template in place of this model's."""
        changed = ChatTemplate({"default": source}, self.variables, content_format=self.content_format)
        return changed.with_tokenizer(tokenizer)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> RenderedPrompt:
        """Messages to a prompt. `kwargs` are further template variables.

        With `tools`, a template named "tool_use" is preferred. `continue_final_message` ends the prompt right after
        the last message's text and excludes `add_generation_prompt`. Raises `ValidationError` with the template's own
        words when it refuses the conversation, and when it goes over a bound of `template_sandbox`.
        """
        if add_generation_prompt and continue_final_message:
            raise ValidationError(
                "continue_final_message: cannot be combined with add_generation_prompt; set that to false",
                parameter="continue_final_message",
                value=True,
            )
        if reserved := RESERVED & kwargs.keys():
            name = min(reserved)
            message = f"chat_template_kwargs: {name!r} is set by its own field"
            raise ValidationError(message, parameter="chat_template_kwargs", value=name)
        compiled = self._choose(has_tools=bool(tools))
        wants = compiled.content_format if self.content_format == "auto" else self.content_format
        chat = normalize(messages, wants)
        self._check_roles(chat, compiled)
        if wants == "openai" and not compiled.tests_type:
            for turn in chat:
                if isinstance(turn["content"], str):
                    turn["content"] = [{"type": "text", "text": turn["content"]}]
        others = plain({"tools": tools, "documents": documents, "kwargs": kwargs}, "the request")
        shield = _Shield(self.controls, [compiled.source, *_strings(chat), *_strings(others)])
        chat = [shield.message(turn) for turn in chat]
        variables = {
            **self.variables,
            **shield.client(others["kwargs"]),
            "messages": chat,
            "tools": shield.client(others["tools"]),
            "documents": shield.client(others["documents"]),
            "add_generation_prompt": add_generation_prompt,
        }
        mark = _open_end(chat[-1], shield) if continue_final_message else None
        text = self._run(compiled, variables)
        if mark is not None:
            text = _cut_at(text, mark)
        return shield.restore(text)

    def encode(self, tokenizer: Tokenizer, rendered: RenderedPrompt) -> list[int]:
        """Ids of a rendered prompt: the template writes BOS itself if it wants one, none is added."""
        return encode_rendered(tokenizer, rendered)

    def _choose(self, *, has_tools: bool) -> _Compiled:
        compiled = self._compiled
        if has_tools and TOOL_TEMPLATE in compiled:
            return compiled[TOOL_TEMPLATE]
        if "default" in compiled:
            return compiled["default"]
        if len(compiled) == 1:
            return next(iter(compiled.values()))
        names = ", ".join(sorted(compiled))
        message = f"this model has no default chat template, only {names}; choose one with --chat-template"
        raise ValidationError(message, parameter="messages")

    def _check_roles(self, chat: list[dict[str, Any]], compiled: _Compiled) -> None:
        """Roles are written between a template's marks, so one that spells a control token's name is refused."""
        for turn in chat:
            role = turn["role"]
            if role == "developer" and "developer" not in compiled.source:
                turn["role"] = "system"
            if role not in _ROLES and any(role in text for text in self.controls.texts):
                message = f"messages: role {role!r} is the name of a control token"
                raise ValidationError(message, parameter="messages", value=role)

    def _run(self, compiled: _Compiled, variables: dict[str, Any]) -> str:
        try:
            return self._environment.render_bounded(compiled.template, variables)
        except _ERRORS as error:
            raise ValidationError(f"chat template: {error}", parameter="messages") from error


def load_chat_template(
    description: ModelDescription, override: str | None = None, *, content_format: ContentFormat = "auto"
) -> ChatTemplate | None:
    """The chat template of a checkpoint; None if it has none.

    `override` is a template file, the name of one of the checkpoint's templates, or a template itself. Token names come
    from the checkpoint's files until `with_tokenizer` (which `Preparer` calls) gives the tokenizer's own.
    """
    read = _from_gguf if description.format == "gguf" else _from_folder
    sources, variables = read(description.path)
    if override is not None:
        sources = {"default": sources[override] if override in sources else _override(override)}
    return ChatTemplate(sources, variables, content_format=content_format) if sources else None


def _override(given: str) -> str:
    looks_inline = "{" in given or "\n" in given
    path = Path(given)
    if not looks_inline and path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {given}: cannot be read: {error}") from error
    if looks_inline:
        return given
    raise ConfigError(f"--chat-template {given}: no such file, no template of this model, and not a template itself")


def _from_gguf(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    metadata = read_gguf_header(path).metadata
    sources = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template" and isinstance(value, str):
            sources["default"] = value
        elif key.startswith("tokenizer.chat_template.") and isinstance(value, str):
            sources[key.removeprefix("tokenizer.chat_template.")] = value
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    variables = {}
    for name in ("bos", "eos"):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokens):
            variables[f"{name}_token"] = tokens[token]
    return sources, variables


def _from_folder(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    folder = path if path.is_dir() else path.parent
    settings = read_settings(folder)
    sources: dict[str, str] = {}
    stored = settings.get("chat_template")
    if isinstance(stored, str):
        sources["default"] = stored
    elif isinstance(stored, list):
        sources.update({entry["name"]: entry["template"] for entry in stored if {"name", "template"} <= entry.keys()})
    if (folder / "chat_template.json").is_file():
        content = json.loads((folder / "chat_template.json").read_text("utf-8"))
        if isinstance(content, dict) and isinstance(content.get("chat_template"), str):
            sources["default"] = content["chat_template"]
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = (folder / "chat_template.jinja").read_text("utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = file.read_text("utf-8")
    return sources, named_tokens(settings)


def _compile(environment: ChatEnvironment, name: str, source: str) -> _Compiled:
    try:
        template = environment.from_string(source)
        tree = environment.tree(source)
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        raise ConfigError(f"chat template {name!r}: {error}") from error
    return _Compiled(source, template, detect_content_format(tree), tests_for_string(tree))


def _strings(value: Any) -> list[str]:
    """Every string in nested data, keys included."""
    found: list[str] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            stack += item
    return found


class _Shield:
    """Hides control tokens of one conversation behind private-use characters, and brings them back."""

    def __init__(self, controls: ControlTokens, texts: list[str]) -> None:
        self._controls = controls
        self._texts = texts
        self._used: set[str] | None = None
        self._next = _FIRST_PRIVATE
        self._char: dict[str, str] = {}
        self._text: dict[str, str] = {}

    def new_char(self) -> str:
        """A character that occurs nowhere in the conversation or the template."""
        if self._used is None:
            self._used = {char for text in self._texts for char in _PRIVATE.findall(text)}
        while (char := chr(self._next)) in self._used:
            self._next += 1
        self._next += 1
        return char

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message without control tokens; what the assistant said keeps marks that are not special tokens."""
        if message["role"] != "assistant":
            return {key: self.client(value) for key, value in message.items()}
        controls = self._controls
        return {key: self._hide(value, controls.special, controls.special_starts) for key, value in message.items()}

    def client(self, value: Any) -> Any:
        """Data without control tokens."""
        return self._hide(value, self._controls.all, self._controls.all_starts)

    def _hide(self, value: Any, pattern: re.Pattern[str], starts: frozenset[str]) -> Any:
        if isinstance(value, dict):
            return {
                self._hide(key, pattern, frozenset()): self._hide(item, pattern, starts) for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._hide(item, pattern, starts) for item in value]
        if not isinstance(value, str) or not self._controls.texts:
            return value
        value = pattern.sub(lambda match: self._stand_in(match[0]), value)
        # A token's beginning at the end of one string must not be completed by the next string the template writes.
        body = value.rstrip()
        tail = unfinished_tail(body, starts, self._controls.longest)
        return body[:-tail] + self._stand_in(body[-tail:]) + value[len(body) :] if tail else value

    def _stand_in(self, text: str) -> str:
        if text not in self._char:
            self._char[text] = char = self.new_char()
            self._text[char] = text
        return self._char[text]

    def restore(self, rendered: str) -> RenderedPrompt:
        """Put the texts back and note their places; also where a template's filter wrote JSON escapes for them."""
        if not self._text:
            return RenderedPrompt(rendered)
        back = {form: text for char, text in self._text.items() for form in (char, json.dumps(char)[1:-1])}
        parts: list[str] = []
        literal: list[tuple[int, int]] = []
        done = size = 0
        for match in any_of(back).finditer(rendered):
            text = back[match[0]]
            parts += [rendered[done : match.start()], text]
            size += match.start() - done
            literal.append((size, size + len(text)))
            size += len(text)
            done = match.end()
        return RenderedPrompt("".join([*parts, rendered[done:]]), tuple(literal))


def _open_end(message: dict[str, Any], shield: _Shield) -> str:
    """Mark the end of the last message's text; returns the mark."""
    mark = shield.new_char() + " "
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + mark
    elif content:
        content[-1]["text"] += mark
    else:
        complaint = "continue_final_message: the last message has no text"
        raise ValidationError(complaint, parameter="continue_final_message")
    return mark


def _cut_at(text: str, mark: str) -> str:
    """The text before the mark. If the template trimmed the message, white space before the mark goes as well."""
    at = text.rfind(mark[0])
    if at < 0:
        message = "continue_final_message: this model's chat template does not show the last message"
        raise ValidationError(message, parameter="continue_final_message")
    return text[:at] if text.startswith(mark, at) else text[:at].rstrip()
