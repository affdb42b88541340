"""The shape of a coding agent's session over the Responses API: its fields, its tools, and how its history grows."""

from __future__ import annotations

from typing import Any

_SHELL_PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The command to run."},
        "workdir": {"type": "string"},
        "timeout_ms": {"type": "number"},
        "with_escalated_permissions": {"type": "boolean"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
_PATCH_GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Update File: " filename LF change
filename: /(.+)/
change: (("+" | "-" | " ") /(.*)/ LF)+
%import common.LF
"""
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False, "parameters": _SHELL_PARAMETERS},
    {"type": "function", "name": "update_plan", "description": "Updates the plan.", "strict": False,
     "parameters": {"type": "object", "properties": {"explanation": {"type": "string"}}, "additionalProperties": False}},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": _PATCH_GRAMMAR}},
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}},
    {"type": "namespace", "name": "mcp__docs", "description": "Documentation.", "tools": [
        {"type": "function", "name": "lookup", "description": "Looks a page up.", "strict": False, "defer_loading": True,
         "parameters": {"type": "object", "properties": {"page": {"type": "string"}}, "required": ["page"]}},
    ]},
]  # fmt: skip

CONTEXT: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>workspace</permissions>"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "# AGENTS.md\nUse tabs."}]},
    {"type": "message", "role": "user", "content": [
        {"type": "input_text", "text": "<environment_context>\n  <cwd>/src</cwd>\n</environment_context>"},
    ]},
]  # fmt: skip


def request(items: list[dict[str, Any]]) -> dict[str, Any]:
    """A turn of the session: everything is sent again each time, and nothing is stored."""
    return {
        "model": "tiny",
        "instructions": "You are a coding agent. " * 40,
        "input": [*CONTEXT, *items],
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "service_tier": "priority",
        "prompt_cache_key": "0199c1f2-0000-7000-8000-000000000001",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-installation-id": "0199c1f2"},
    }


def user(text: str) -> dict[str, Any]:
    """What the user types."""
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def as_history(item: dict[str, Any]) -> dict[str, Any]:
    """An output item as the agent sends it back: without its status, and reasoning with what was never encrypted."""
    kept = {name: value for name, value in item.items() if name != "status"}
    if item["type"] == "reasoning":
        kept["encrypted_content"] = None
    if item["type"] == "message":
        kept["phase"] = "commentary"
    return kept


SCRIPT: list[tuple[str, list[str]]] = [
    ("I list the files.\n</think>\n\n<tool_call>\n{\"name\": \"shell\", \"arguments\": {\"command\": [\"ls\", \"-l\"]}}\n</tool_call>\n"
     "<tool_call>\n{\"name\": \"mcp__docs__lookup\", \"arguments\": {\"page\": \"api\"}}\n</tool_call>",
     ["reasoning", "function_call", "function_call"]),
    ("Now the change.\n</think>\n\nI edit the file.\n<tool_call>\n{\"name\": \"apply_patch\", \"arguments\": {\"input\": "
     "\"*** Begin Patch\\n*** Update File: a.py\\n-x = 1\\n+x = \\\"é\\\"\\n*** End Patch\\n\"}}\n</tool_call>",
     ["reasoning", "message", "custom_tool_call"]),
    ("It worked.\n</think>\n\nDone: `x` is a string now.", ["reasoning", "message"]),
]  # fmt: skip
"""What the model says in each turn, and the items that come of it."""


def output_of(call: dict[str, Any]) -> dict[str, Any]:
    """What the agent answers to a call; functions with parts, patches with a string."""
    if call["type"] == "custom_tool_call":
        return {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Success. Updated a.py"}
    if call["name"] == "lookup":
        return {"type": "function_call_output", "call_id": call["call_id"], "output": []}
    parts = [{"type": "input_text", "text": "a.py"}, {"type": "output_text", "text": "exit code 0"}]
    return {"type": "function_call_output", "call_id": call["call_id"], "output": parts}
