"""The function-calling cases of bfcl-eval, with its notions of types as JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.packages import package_folder

SHA256 = "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"
GROUPS = ("simple_python", "multiple", "parallel")
TYPES = {
    "dict": "object", "float": "number", "tuple": "array", "list": "array", "bool": "boolean", "any": "string",
}  # fmt: skip
"""Its names of types that JSON Schema calls otherwise."""


@dataclass(frozen=True)
class FunctionCase:
    """One case: what is asked, and the functions, by name, as tools of the chat API."""

    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]

    @property
    def parameters(self) -> dict[str, Any]:
        """Function's name -> schema of its arguments."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}


def function_cases(group: str) -> Iterator[FunctionCase]:
    """All cases of a group; skips the test where the package cannot be had."""
    prefix = f"bfcl_eval/data/BFCL_v4_{group}.json"
    path = package_folder("bfcl-eval", "2026.3.23", prefix, SHA256) / prefix
    for line in path.read_text("utf-8").splitlines():
        case = json.loads(line)
        yield FunctionCase(case["id"], case["question"][0], [_tool(function) for function in case["function"]])


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    written = {
        "name": function["name"].replace(".", "_"),
        "description": function["description"],
        "parameters": _schema(function["parameters"]) | {"additionalProperties": False},
        "strict": True,
    }
    return {"type": "function", "function": written}


def _schema(given: Mapping[str, Any]) -> dict[str, Any]:
    """One schema: types by their right names, a string where there is none, and without `optional`, which is no keyword."""
    kind = given.get("type", "string")
    made: dict[str, Any] = {**given, "type": TYPES.get(kind, kind)}
    made.pop("optional", None)
    if "properties" in made:
        made["properties"] = {name: _schema(inner) for name, inner in made["properties"].items()}
    if "items" in made:
        made["items"] = _schema(made["items"])
    return made
