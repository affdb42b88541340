"""Chat templates: messages to one prompt text, with the stretches that came from messages kept apart.

Text from messages, tools and documents must never become special tokens: `shield` hides every place where one could
begin and notes it after rendering. `encode_rendered` then recognises special tokens everywhere but in these places, in
one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.meta

from samovar.config.checkpoint import read_json
from samovar.config.description import ModelDescription
from samovar.config.gguf import read_gguf_header
from samovar.errors import CheckpointError, ConfigError, ValidationError
from samovar.text.hf_tokenizer import named_tokens, read_settings
from samovar.text.messages import (
    ContentFormat,
    detect_content_format,
    normalize,
    plain,
    tests_for_string,
    with_object_arguments,
)
from samovar.text.shield import KNOWN_ROLES, ControlTokens, Mentioned, Shield
from samovar.text.template_sandbox import ChatEnvironment
from samovar.text.tokenizer import SpanTokenizer, Tokenizer
from samovar.text.tool_preamble import history_as_text, with_preamble

RESERVED = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)
"""Names that `chat_template_kwargs` cannot set."""

TOOL_TEMPLATE = "tool_use"
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
    """Ids of a rendered prompt, with no special token where it is literal. A template writes BOS itself if it wants one."""
    if rendered.literal and isinstance(tokenizer, SpanTokenizer):
        return tokenizer.encode_spans(rendered.text, rendered.literal)
    return tokenizer.encode(rendered.text, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class _Compiled:
    source: str
    template: jinja2.Template
    content_format: Literal["string", "openai"]
    tests_type: bool
    mentioned: Mentioned
    variables: frozenset[str]
    """What it reads that it does not set first; may name more."""

    @property
    def tools_variable(self) -> str | None:
        """The variable under which it reads definitions of tools; None: it knows none."""
        return next((name for name in ("tools", "xml_tools") if name in self.variables), None)

    @property
    def knows_calls(self) -> bool:
        """Whether it shows the calls that an assistant made."""
        return "tool_calls" in self.mentioned.names or "tool_calls" in self.mentioned.constants


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
        changed.controls = ControlTokens.of(
            tokenizer.added_tokens,
            self.sources.values(),
            reduce(or_, (compiled.mentioned for compiled in self._compiled.values()), Mentioned()),
        )
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

    def reads(self, *, has_tools: bool) -> tuple[frozenset[str], frozenset[str]]:
        """Names of the variables, and all texts, that the template for such a conversation speaks of."""
        compiled = self._choose(has_tools=has_tools)
        return compiled.variables, compiled.mentioned.constants

    def knows_tools(self) -> bool:
        """Whether definitions of tools reach the prompt by the template's own words."""
        return self._choose(has_tools=True).tools_variable is not None

    def knows_calls(self) -> bool:
        """Whether calls of the history do."""
        return self._choose(has_tools=True).knows_calls

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> RenderedPrompt:
        """Messages to a prompt. `kwargs` are further template variables.

        With `tools`, a template named "tool_use" is preferred; where the template knows no tools, `tool_preamble` says
        it in words. Arguments of calls that are no JSON object are given as they came, and as an object to templates
        that cannot take them so. `continue_final_message` ends the prompt right after the last message's text and
        excludes `add_generation_prompt`. Raises `ValidationError` with the template's own words when it refuses the
        conversation, and when it goes over a bound of `template_sandbox`.
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
        others = plain({"tools": tools, "documents": documents, "kwargs": kwargs}, "the request")
        options = {"add_generation_prompt": add_generation_prompt}
        wants = compiled.content_format if self.content_format == "auto" else self.content_format
        failure: ValidationError | None = None
        for chat in _forms(compiled, normalize(messages, wants), others["tools"]):
            self._check_roles(chat, compiled)
            if wants == "openai" and not compiled.tests_type:
                chat = [
                    {**turn, "content": [{"type": "text", "text": turn["content"]}]}
                    if isinstance(turn["content"], str)
                    else turn
                    for turn in chat
                ]
            try:
                return self._render(compiled, chat, others, options, is_continued=continue_final_message)
            except ValidationError as error:
                failure = failure or error
        assert failure is not None  # there is at least one form
        raise failure

    def _render(
        self,
        compiled: _Compiled,
        chat: list[dict[str, Any]],
        others: dict[str, Any],
        options: dict[str, Any],
        *,
        is_continued: bool,
    ) -> RenderedPrompt:
        shield = Shield(self.controls, compiled.source, chat, others)
        chat = [shield.message(turn) for turn in chat]
        variables = {
            **self.variables,
            **shield.variables(others["kwargs"]),
            "messages": chat,
            "tools": None,
            compiled.tools_variable or "tools": shield.client(others["tools"]),
            "documents": shield.client(others["documents"]),
            **options,
        }
        mark = _open_end(chat[-1], shield) if is_continued else None
        text = self._run(compiled, variables)
        if mark is not None:
            text = _cut_at(text, mark)
        return RenderedPrompt(*shield.restore(text))

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
            if role not in KNOWN_ROLES and any(role in text for text in self.controls.texts):
                message = f"messages: role {role!r} is the name of a control token"
                raise ValidationError(message, parameter="messages", value=role)

    def _run(self, compiled: _Compiled, variables: dict[str, Any]) -> str:
        try:
            return self._environment.render_bounded(compiled.template, variables)
        except _ERRORS as error:
            raise ValidationError(f"chat template: {error}", parameter="messages") from error


def load_chat_template(
    description: ModelDescription,
    override: str | None = None,
    *,
    content_format: ContentFormat = "auto",
    tokenizer: Path | None = None,
) -> ChatTemplate | None:
    """The chat template of a checkpoint; None if it has none. Raises `CheckpointError` for a file that is damaged.

    `override` is a template file, the name of one of the checkpoint's templates, or a template itself. A template
    beside a `tokenizer` from elsewhere (file or folder) goes before the checkpoint's. Token names come from the files
    until `with_tokenizer` (which `Preparer` calls) gives the tokenizer's own.
    """
    read = _from_gguf if description.format == "gguf" else _from_folder
    sources, variables = read(description.path)
    if tokenizer is not None:
        beside = (_from_gguf if tokenizer.suffix == ".gguf" else _from_folder)(tokenizer)
        sources, variables = beside if beside[0] else (sources, variables)
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
            raise ConfigError(f"--chat-template {given}: cannot be read: {_reason(error)}") from error
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
    if (stored := settings.get("chat_template")) is not None:
        sources.update(_stored(folder / "tokenizer_config.json", stored))
    if (folder / "chat_template.json").is_file():
        path = folder / "chat_template.json"
        sources.update(_stored(path, read_json(path).get("chat_template", {})))
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = _read_source(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = _read_source(file)
    return sources, named_tokens(settings)


def _stored(path: Path, value: Any) -> dict[str, str]:
    """Templates by name from a JSON file: one string, or a list of names and templates."""
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else value or []
    try:
        found = {entry["name"]: entry["template"] for entry in entries}
    except (TypeError, LookupError):
        found = {"": None}
    if not all(isinstance(part, str) for item in found.items() for part in item):
        raise CheckpointError(f"{path}: chat_template must be a string or a list of objects with a name and a template")
    return found


def _reason(error: OSError | UnicodeDecodeError) -> str:
    """Why a file cannot be read, without its name, which the message has already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _read_source(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {_reason(error)}") from error


def _compile(environment: ChatEnvironment, name: str, source: str) -> _Compiled:
    try:
        template = environment.from_string(source)
        tree = environment.tree(source)
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        raise ConfigError(f"chat template {name!r}: {error}") from error
    variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
    content_format = detect_content_format(tree)
    return _Compiled(source, template, content_format, tests_for_string(tree), Mentioned.by(tree), variables)


def _forms(
    compiled: _Compiled, chat: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> Iterator[list[dict[str, Any]]]:
    """The conversation in the forms to try, one after the other until the template takes one."""
    is_told = bool(tools) and compiled.tools_variable is None
    if is_told or not compiled.knows_calls:
        chat = history_as_text(chat)
    forms = [chat]
    if tools and is_told:
        forms = [with_preamble(chat, tools)]
        if not any(turn["role"] in ("system", "developer") for turn in chat):
            forms.append(with_preamble(chat, tools, in_system=False))
    for form in forms:
        yield form
        if (other := with_object_arguments(form)) is not None:
            yield other


def _open_end(message: dict[str, Any], shield: Shield) -> str:
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
