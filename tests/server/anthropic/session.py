"""A coding agent's session in the shape Claude Code sends it: what each request looks like, turn by turn.

The texts are made up; their sizes can be chosen. A billing line with a new nonce stands at the top of every system
prompt, cache breakpoints wander with the end of the conversation, and small requests go between the turns.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

TOOL_NAMES = (
    "Task", "Bash", "Glob", "Grep", "LS", "ExitPlanMode", "Read", "Edit", "MultiEdit", "Write", "NotebookEdit", "WebFetch",
    "TodoWrite", "WebSearch", "BashOutput",
)  # fmt: skip
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "user-agent": "claude-cli/2.1.37 (external, cli)",
}
EPHEMERAL = {"type": "ephemeral"}


def tools(words: int) -> list[dict[str, Any]]:
    """Fifteen tools with long descriptions and nested schemas."""
    return [_tool(name, words) for name in TOOL_NAMES]


def _tool(name: str, words: int) -> dict[str, Any]:
    item = {
        "type": "object",
        "properties": {
            "content": {"type": "string", "minLength": 1},
            "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
        },
        "required": ["content", "status"],
        "additionalProperties": False,
    }
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": f"What {name} is to do"},
            "timeout": {"type": "number", "description": "Optional timeout in milliseconds (max 600000)"},
            "items": {"type": "array", "items": item},
        },
        "required": ["command"],
        "additionalProperties": False,
    }
    description = f"The tool {name}. " + "Use it with care and only where it helps. " * words
    return {"name": name, "description": description, "input_schema": schema}


@dataclass
class AgentSession:
    """One session. `size` scales system prompt and tools; `clock` adds a line with the time near the top.

    Sessions of different projects share no prompt.
    """

    project: str = "samovar"

    model: str = "claude-sonnet-4-5-20250929"
    size: int = 0
    clock: bool = False
    conversation: list[dict[str, Any]] = field(default_factory=list)
    turn: int = 0

    def system(self) -> list[dict[str, Any]]:
        """The system prompt of this turn."""
        nonce = sha256(str(self.turn).encode()).hexdigest()
        billing = f"x-anthropic-billing-header: cc_version=2.1.37.{nonce[:3]}; cc_entrypoint=cli; cch={nonce[3:8]};"
        lines = [f"You are a coding agent in the project {self.project}."] + (
            [f"Current time: 12:{self.turn:02}:{self.turn:02}"] if self.clock else []
        )
        rules = [
            f"# Rule {i}\nBe careful with the files of this project; say what you changed."
            for i in range(60 + self.size * 20)
        ]
        return [
            {"type": "text", "text": billing},
            {"type": "text", "text": "\n".join(lines), "cache_control": EPHEMERAL},
            {"type": "text", "text": "\n".join(rules), "cache_control": EPHEMERAL},
        ]

    def ask(self, text: str) -> None:
        """The user says something; a reminder goes before it, as agents do."""
        reminder = "<system-reminder>\nThe list of things to do is empty.\n</system-reminder>"
        blocks = [{"type": "text", "text": reminder}, {"type": "text", "text": text}]
        self.conversation.append({"role": "user", "content": blocks})

    def hear(self, content: list[dict[str, Any]], result: str) -> None:
        """Take an answer into the history, and give each of its calls a result."""
        self.conversation.append({"role": "assistant", "content": content})
        results: list[dict[str, Any]] = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": result if i % 2 else [{"type": "text", "text": result}],
                "is_error": False,
            }
            for i, block in enumerate(b for b in content if b["type"] == "tool_use")
        ]
        self.conversation.append({"role": "user", "content": results or [{"type": "text", "text": "Go on."}]})

    def body(self, **changes: Any) -> dict[str, Any]:
        """The main request of a turn."""
        self.turn += 1
        messages = copy.deepcopy(self.conversation)
        last = messages[-1]["content"][-1]
        last["cache_control"] = EPHEMERAL
        return {
            "model": self.model,
            "messages": messages,
            "system": self.system(),
            "tools": tools(self.size),
            "metadata": {"user_id": "user_0123456789abcdef_account__session_3f2504e0-4f89-11d3-9a0c-0305e82c3301"},
            "max_tokens": 32000,
            "thinking": {"type": "enabled", "budget_tokens": 31999},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "stream": True,
        } | changes

    def quota_check(self) -> dict[str, Any]:
        """The first request of a session: one token, to see whether the server is there."""
        return {
            "model": "claude-haiku-4-5-20251001",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "quota"}],
            "metadata": {"user_id": "user_0123456789abcdef"},
        }

    def title(self) -> dict[str, Any]:
        """A side request to the small model: the conversation's title, as JSON begun by a prefill."""
        return {
            "model": "claude-haiku-4-5-20251001",
            "max_tokens": 512,
            "temperature": 0,
            "system": [{"type": "text", "text": "Say in JSON whether this is a new topic, and its title."}],
            "messages": [{"role": "user", "content": "Fix the test."}, {"role": "assistant", "content": "{"}],
            "stream": True,
        }

    def count(self) -> dict[str, Any]:
        """What the agent asks before it compacts a conversation."""
        body = self.body()
        return {name: body[name] for name in ("model", "messages", "system", "tools", "thinking")}
