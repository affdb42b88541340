"""Tools that Anthropic defines and the client runs: requests only name them, so their interfaces are written here."""

from __future__ import annotations

from typing import Any

from samovar.core.tools import ToolDefinition

_PATH = {"type": "string", "description": "Absolute path of the file or directory."}
_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "For view: first and last line, -1 for the end.",
}
_LINE = {"type": "integer", "description": "For insert: the line behind which the text goes, 0 for the beginning."}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _command(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names), "description": "What to do."}


def _bash(kind: str) -> tuple[str, dict[str, Any]]:
    properties = {
        "command": _text("The command line to run."),
        "restart": {"type": "boolean", "description": "True restarts the shell instead of running a command."},
    }
    return "Runs commands in a shell that stays open between calls.", _object(properties)


def _text_editor(kind: str) -> tuple[str, dict[str, Any]]:
    commands = ["view", "create", "str_replace", "insert"]
    if kind in ("text_editor_20241022", "text_editor_20250124"):
        commands.append("undo_edit")
    # The text to insert has two names: the first versions said new_str, later ones insert_text.
    properties = {
        "command": _command(*commands),
        "path": _PATH,
        "view_range": _RANGE,
        "file_text": _text("For create: the whole text of the file."),
        "old_str": _text("For str_replace: text that occurs exactly once in the file."),
        "new_str": _text("For str_replace: what stands in its place. For insert: the text to insert."),
        "insert_line": _LINE,
    }
    if kind == "text_editor_20250728":
        properties["insert_text"] = _text("For insert: the text to insert.")
    return "Shows, creates and edits text files.", _object(properties, "command", "path")


def _memory(kind: str) -> tuple[str, dict[str, Any]]:
    properties = {
        "command": _command("view", "create", "str_replace", "insert", "delete", "rename"),
        "path": _text("Path below /memories; not for rename."),
        "view_range": _RANGE,
        "file_text": _text("For create: the whole text of the file."),
        "old_str": _text("For str_replace: text that occurs exactly once in the file."),
        "new_str": _text("For str_replace: what stands in its place."),
        "insert_line": _LINE,
        "insert_text": _text("For insert: the text to insert."),
        "old_path": _text("For rename: the path now."),
        "new_path": _text("For rename: the new path."),
    }
    description = "Keeps notes in files below /memories that last beyond this conversation. Look there first."
    return description, _object(properties, "command")


_MAKERS = {"bash": _bash, "text_editor": _text_editor, "memory": _memory}
FAMILIES = frozenset(_MAKERS)
"""Their types without the date."""


def client_tool(family: str, kind: str, name: str, *, strict: bool) -> ToolDefinition:
    """The definition of such a tool of type `kind`, under the name the request gives it."""
    description, parameters = _MAKERS[family](kind)
    return ToolDefinition(name=name, description=description, parameters=parameters, strict=strict)
