"""A Messages body -> a `Dialogue` and sampling values: what is asked, in the words of the house."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from samovar.core.sampling_params import OutputKind
from samovar.core.structured import StructuredOutputsParams
from samovar.core.tools import NamedTool, ToolChoice, ToolDefinition
from samovar.errors import ValidationError
from samovar.server.anthropic import unions
from samovar.server.anthropic.client_tools import FAMILIES, client_tool
from samovar.server.anthropic.conversation import Chat, ChatWriter, needed, text_of_system
from samovar.server.anthropic.problems import NoThreadsError
from samovar.server.anthropic.schema import ContentBlock, CountTokensRequest, MessagesRequest, OutputFormat, Tool
from samovar.server.anthropic.unions import note_inside, note_skipped, refuse
from samovar.server.anthropic.volatile import (
    INTRODUCTION,
    SystemMemory,
    conversation_key,
    split_volatile,
    without_headers,
)
from samovar.text.dialogue import Dialogue
from samovar.text.nesting import check_depth

INTERLEAVED = "interleaved-thinking"
"""With this beta the thinking budget is for all thinking of a turn, and may exceed `max_tokens`."""
DEFAULT_EFFORT = "high"
"""How much a model thinks that is told to think, and not how much."""

NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "structured_outputs.json": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Our name of a field -> theirs, in refusals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What moves volatile lines of the system prompt: the memory of earlier ones, and whose request this is."""

    memory: SystemMemory
    owner: str


def check_fields(asked: CountTokensRequest) -> None:
    """Refuse fields that ask for what is not here; note those that are left out."""
    for name in asked.__struct_fields__:
        value = getattr(asked, name)
        if value is None or value == [] or value == {}:
            continue
        if name in unions.REFUSED_FIELDS:
            message = f"{name} is not supported by this server: {unions.REFUSED_FIELDS[name]}"
            raise (NoThreadsError if name == "thread" else ValidationError)(message, parameter=name)
        if name in unions.SKIPPED_FIELDS:
            note_skipped("field", name, unions.SKIPPED_FIELDS[name])
    if asked.thinking is not None and asked.thinking.block_binding is not None:
        note_inside("thinking.block_binding")
    if asked.output_config is not None and asked.output_config.task_budget is not None:
        note_inside("output_config.task_budget")


def read_dialogue(asked: CountTokensRequest, keeping: Keeping | None, *, may_choose: bool = True) -> Dialogue:
    """Everything that makes the prompt. `keeping` None leaves the system prompt as it came.

    Without `may_choose` the model calls tools only where the request makes it.
    """
    check_fields(asked)
    tools, skipped = read_tools(asked.tools or [])
    chat, goes_on = read_chat(asked, keeping, [tool.name for tool in tools])
    choice = asked.tool_choice
    chosen = read_choice(asked, tools, skipped)
    return Dialogue(
        messages=chat,
        tools=tools,
        tool_choice="none" if chosen == "auto" and not may_choose else chosen,
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        structured=read_format(asked),
        reasoning_effort=read_effort(asked),
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )


def read_values(asked: MessagesRequest, betas: str) -> dict[str, Any]:
    """Sampling values. `betas` is the anthropic-beta header."""
    budget = read_budget(asked)
    if budget is not None and budget >= asked.max_tokens:
        if INTERLEAVED not in ",".join([betas, *(asked.betas or ()), *(asked.anthropic_beta or ())]):
            message = f"thinking.budget_tokens must be below max_tokens ({asked.max_tokens}), got {budget}"
            raise ValidationError(message, parameter="thinking.budget_tokens", value=budget)
    return {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "stop": asked.stop_sequences or None,
        "thinking_token_budget": budget,
        "output_kind": OutputKind.DELTA,
    }


# --- the conversation


def read_chat(asked: CountTokensRequest, keeping: Keeping | None, tool_names: list[str]) -> tuple[Chat, bool]:
    """(messages in chat form, whether the last one is to be continued)."""
    system, messages, offset = asked.system, asked.messages, 0
    if system is None and messages[0].role == "system" and len(messages) > 1:
        system, messages, offset = messages[0].content, messages[1:], 1
    where = "messages[0].content" if offset else "system"
    blocks = [ContentBlock(type="text", text=system)] if isinstance(system, str) else system or []
    text, moved = text_of_system(blocks, where), ""
    writer = ChatWriter()
    for at, message in enumerate(messages):
        writer.add(message, f"messages[{at + offset}]", is_last=at == len(messages) - 1)
    writer.close()
    chat = writer.chat
    goes_on = _goes_on(chat)
    if keeping is not None and text:
        text = without_headers(text)
        first = next((turn["content"] for turn in chat if turn["role"] == "user"), "")
        text, moved = split_volatile(text, conversation_key(keeping.owner, tool_names, first), keeping.memory)
    if moved:
        _append(chat, goes_on, moved)
    head = [{"role": "system", "content": text}] if text else []
    return [*head, *chat], goes_on


def _goes_on(chat: Chat) -> bool:
    """Whether the model continues the last message. One that says nothing yet only marks whose turn it is."""
    last = chat[-1]
    if last["role"] != "assistant":
        return False
    if "tool_calls" in last:
        message = "messages: the last message calls tools; send their results as tool_result blocks"
        raise ValidationError(message, parameter="messages")
    if not last["content"] and len(chat) > 1:
        chat.pop()
        return False
    return True


def _append(chat: Chat, goes_on: bool, lines: str) -> None:
    """Put lines at the end of the last message that is not the model's."""
    said = chat[:-1] if goes_on else chat
    if said and said[-1]["role"] != "assistant":
        said[-1]["content"] = f"{said[-1]['content']}\n\n{INTRODUCTION}\n{lines}"
    else:
        chat.insert(len(said), {"role": "user", "content": f"{INTRODUCTION}\n{lines}"})


# --- tools


def read_tools(tools: list[Tool]) -> tuple[list[ToolDefinition], dict[str, str]]:
    """(the tools the model is told of, name of each other one -> why not)."""
    used: list[ToolDefinition] = []
    skipped: dict[str, str] = {}
    for at, tool in enumerate(tools):
        kind, where = tool.type or unions.CUSTOM_TOOL, f"tools[{at}]"
        if kind == unions.CUSTOM_TOOL:
            used.append(_definition(tool, where))
            continue
        family = unions.tool_family(kind)
        if family in FAMILIES:
            name = needed(tool.name, where, "name")
            used.append(client_tool(family, kind, name, strict=bool(tool.strict)))
            continue
        why = unions.SKIPPED_TOOLS.get(family)
        if why is None:
            raise refuse(f"{where}.type", kind, "no such tool is known; describe it with an input_schema")
        note_skipped("tool", kind, why)
        skipped[tool.name or kind] = why
    names = [tool.name for tool in used]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValidationError(
            f"tools: two of them have the name {twice!r}; give each its own", parameter="tools", value=twice
        )
    return used, skipped


def _definition(tool: Tool, where: str) -> ToolDefinition:
    name, schema = needed(tool.name, where, "name"), needed(tool.input_schema, where, "input_schema")
    check_depth(f"{where}.input_schema", schema)
    if (kind := schema.get("type", "object")) != "object":
        message = f"{where}.input_schema.type must be 'object', got {str(kind)[:100]!r}"
        raise ValidationError(message, parameter=f"{where}.input_schema.type", value=kind)
    if tool.defer_loading:
        note_inside("tools.defer_loading")
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        note_inside("tools.allowed_callers")
    description = tool.description or ""
    for example in tool.input_examples or ():
        text = msgspec.json.encode(example).decode()
        description += ("\n" if description else "") + f"Example input: {text}"
    return ToolDefinition(name=name, description=description, parameters=schema, strict=bool(tool.strict))


def read_choice(asked: CountTokensRequest, tools: list[ToolDefinition], skipped: dict[str, str]) -> ToolChoice:
    """auto, any, tool or none -> the house's choice. Raises `ValidationError` for a tool that cannot be called."""
    choice = asked.tool_choice
    if choice is None or choice.type in ("auto", "none"):
        return "auto" if choice is None or choice.type == "auto" else "none"
    if choice.type == "tool":
        if choice.name is None:
            raise ValidationError("tool_choice.name is required", parameter="tool_choice.name")
        if choice.name in skipped:
            raise refuse("tool_choice.name", choice.name, skipped[choice.name])
        if all(tool.name != choice.name for tool in tools):
            message = f"tool_choice.name: no tool of this request is called {choice.name!r}"
            raise ValidationError(message, parameter="tool_choice.name", value=choice.name)
        return NamedTool(choice.name)
    if not tools:
        raise ValidationError("tool_choice: 'any' needs at least one tool in tools", parameter="tool_choice")
    return "required"


# --- how to answer


def read_format(asked: CountTokensRequest) -> StructuredOutputsParams | None:
    """The JSON Schema of the answer's text, if one is given."""
    nested = asked.output_config.format if asked.output_config is not None else None
    wanted: OutputFormat | None = nested or asked.output_format
    if wanted is None:
        return None
    if nested is not None and asked.output_format is not None:
        message = "output_format says the same as output_config.format; give one of them"
        raise ValidationError(message, parameter="output_format")
    return StructuredOutputsParams(json=wanted.schema)


def read_budget(asked: CountTokensRequest) -> int | None:
    """Most tokens to think."""
    thinking = asked.thinking
    if thinking is None or thinking.type != "enabled":
        return None
    return needed(thinking.budget_tokens, "thinking", "budget_tokens")


def read_effort(asked: CountTokensRequest) -> str:
    """How much to think: nothing unless the request says so, as clients expect text first."""
    thinking = asked.thinking
    if thinking is None or thinking.type == "disabled":
        return "none"
    effort = asked.output_config.effort if asked.output_config is not None else None
    return effort or DEFAULT_EFFORT
