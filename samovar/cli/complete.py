"""Continue a text without a chat template: one given with -q, or each line that is typed."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from samovar.cli.chat import speed
from samovar.cli.connection import ENGINE_OPTIONS, Connection, ServerOptions, connect
from samovar.config.field import Group, field
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings

USAGE = "samovar complete [MODEL] [-q TEXT] [flags]"
POSITIONAL = "model"


class CompleteOptions(Group):
    """The completion."""

    quick: str | None = field(default=None, flags=("-q",))
    """Continue this text, print the continuation and leave."""
    max_tokens: int = field(default=128, ge=1)
    """Most tokens to add."""
    temperature: float | None = field(default=None, ge=0, le=2)
    """Temperature. Default: the model's own."""
    stats: bool = field(default=False)
    """Print time to the first token and tokens per second."""


OPTIONS = (CompleteOptions, ServerOptions, SourceConfig, *ENGINE_OPTIONS)


async def complete(connection: Connection, text: str, options: CompleteOptions) -> None:
    """Print the continuation as it comes."""
    body: dict[str, Any] = {"prompt": text, "max_tokens": options.max_tokens}
    if options.temperature is not None:
        body["temperature"] = options.temperature
    began, first = time.monotonic(), 0.0
    usage: dict[str, int] = {}
    try:
        async for event in connection.stream("/completions", body):
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                first = first or time.monotonic()
                print(choice.get("text") or "", end="", flush=True)
    finally:
        print(flush=True)  # Also after Ctrl-C: what comes next begins on a line of its own.
    if options.stats:
        print(speed(began, first, time.monotonic(), usage.get("completion_tokens", 0)), file=sys.stderr)


def run(settings: Settings) -> int:
    """One text with -q, otherwise every line of the input."""
    options = settings[CompleteOptions]
    with connect(settings) as connection:
        if options.quick is not None:
            asyncio.run(complete(connection, options.quick, options))
            return 0
        while True:
            try:
                line = input("> ") if sys.stdin.isatty() else input()
            except EOFError:
                return 0
            if line:
                asyncio.run(complete(connection, line, options))
