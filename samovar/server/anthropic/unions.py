"""What the Messages API knows by name: blocks, tools, sources and fields. Each is used, skipped with a notice, or refused.

A test walks the unions of the official SDK: nothing of them may be missing here.
"""

from __future__ import annotations

import logging
from typing import Final

from samovar.core.once import Once
from samovar.errors import ValidationError

_once = Once(logging.getLogger(__name__))

_MEDIA = "the model takes text only"
_SERVER_TOOL = "it belongs to a tool that runs on Anthropic's servers"
_MCP = "this server connects to no MCP servers"

USED_BLOCKS: Final = frozenset(
    {"text", "thinking", "tool_use", "tool_result", "search_result", "document", "compaction"}
)
SKIPPED_BLOCKS: Final[dict[str, str]] = {
    "redacted_thinking": "only its maker can read it",
    "fallback": "it tells which model answered",
}
"""Blocks of a history that hold nothing a model could read -> why."""
REFUSED_BLOCKS: Final[dict[str, str]] = {
    "image": _MEDIA,
    "container_upload": "there are no containers here",
    "server_tool_use": _SERVER_TOOL,
    "web_search_tool_result": _SERVER_TOOL,
    "web_fetch_tool_result": _SERVER_TOOL,
    "code_execution_tool_result": _SERVER_TOOL,
    "bash_code_execution_tool_result": _SERVER_TOOL,
    "text_editor_code_execution_tool_result": _SERVER_TOOL,
    "tool_search_tool_result": _SERVER_TOOL,
    "advisor_tool_result": _SERVER_TOOL,
    "mcp_tool_use": _MCP,
    "mcp_tool_result": _MCP,
    "mcp_tool_listing": _MCP,
    "tool_addition": "tools are those of the request",
    "tool_removal": "tools are those of the request",
}

USED_IN_RESULT: Final = frozenset({"text", "search_result", "document", "tool_reference"})
REFUSED_IN_RESULT: Final[dict[str, str]] = {"image": _MEDIA, "browser_state": "there is no browser tool here"}

USED_SOURCES: Final = frozenset({"text", "content"})
REFUSED_SOURCES: Final[dict[str, str]] = {
    "base64": _MEDIA,
    "url": "this server fetches nothing",
    "file": "this server keeps no files",
}

CUSTOM_TOOL: Final = "custom"
SKIPPED_TOOLS: Final[dict[str, str]] = {
    "computer": _MEDIA,
    "browser_toolset": _MEDIA,
    "computer_toolset": _MEDIA,
    "code_execution": _SERVER_TOOL,
    "web_search": _SERVER_TOOL,
    "web_fetch": _SERVER_TOOL,
    "tool_search_tool_bm25": "every tool is given to the model at once",
    "tool_search_tool_regex": "every tool is given to the model at once",
    "advisor": _SERVER_TOOL,
    "mcp_toolset": _MCP,
}
"""Families of tools (their type without its date) that the model is not told of -> why. See also `client_tools`."""

SKIPPED_FIELDS: Final[dict[str, str]] = {
    "context_management": "nothing is cut from a conversation here",
    "compaction": "nothing is cut from a conversation here",
    "inference_geo": "the answer is made where this server stands",
    "diagnostics": "usage tells what was cached",
    "fallbacks": "there is one model here",
    "fallback_credit_token": "nothing is billed here",
    "billing_policy": "nothing is billed here",
    "user_profile_id": "there are no profiles here",
    "workspace_id": "there are no workspaces here",
}
"""Fields that do not change an answer made here -> why."""
SKIPPED_INSIDE: Final[dict[str, str]] = {
    "messages.clear_at": "nothing is cut from a conversation here",
    "messages.output_config": "effort is that of the request",
    "content.citations": "answers cite nothing here",
    "thinking.block_binding": "signatures are not checked here",
    "output_config.task_budget": "only max_tokens and the thinking budget are enforced here",
    "tools.defer_loading": "every tool is given to the model at once",
    "tools.allowed_callers": "the model calls every tool itself",
}
"""Fields further inside, likewise."""
REFUSED_FIELDS: Final[dict[str, str]] = {
    "container": "there are no containers here; leave it out",
    "mcp_servers": f"{_MCP}; let the client connect and give their tools in `tools`",
    "thread": "conversations are not kept here; send all messages",
}
"""Fields that ask for what is not here -> why, and what to do. Their empty values ask for nothing."""


def note_skipped(kind: str, name: str, why: str) -> None:
    """Log, once for each name, that something of a request was left out."""
    _once.warn(f"/v1/messages: {kind} {name[:128]!r} is skipped: {why}")


def note_inside(field: str) -> None:
    """Note one of `SKIPPED_INSIDE`."""
    note_skipped("field", field, SKIPPED_INSIDE[field])


def refuse(where: str, name: str, why: str) -> ValidationError:
    """The refusal of a block, source or tool by its name."""
    return ValidationError(f"{where}: {name[:128]!r} is not supported: {why}", parameter=where, value=name)


def tool_family(kind: str) -> str:
    """A tool's type without the date that ends it."""
    head, _, date = kind.rpartition("_")
    return head if head and len(date) == 8 and date.isdigit() else kind
