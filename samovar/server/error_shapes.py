"""Which body an error has on which path: Anthropic's under /v1/messages, OpenAI's everywhere else."""

from __future__ import annotations

from typing import Any

from samovar.server import problems
from samovar.server.anthropic import problems as anthropic_problems
from samovar.server.anthropic.schema import ErrorResponse as AnthropicError
from samovar.server.openai.schema import ErrorResponse

_ANTHROPIC = "/v1/messages"


def encode_error_for(path: str, failure: BaseException) -> tuple[int, bytes]:
    """Exception -> (HTTP status, JSON body) as the clients of `path` read it."""
    if _is_anthropic(path):
        return anthropic_problems.encode_error(failure)
    return problems.encode_error(failure)


def error_type_for(path: str) -> type[Any]:
    """The type of such a body."""
    return AnthropicError if _is_anthropic(path) else ErrorResponse


def _is_anthropic(path: str) -> bool:
    return path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")
