"""Talk to a model: to a running server, or, when a model is named and no server has it, to one started here."""

from __future__ import annotations

import asyncio
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from samovar.cli.connection import ENGINE_OPTIONS, Connection, ServerOptions, connect
from samovar.config.field import Group, field
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings
from samovar.errors import SamovarError

USAGE = "samovar chat [MODEL] [-q MESSAGE] [flags]"
POSITIONAL = "model"
HELP = """\
/system TEXT  set the system prompt and begin anew (without TEXT: show it)
/clear        forget the conversation
/help         this list
/exit         leave (also Ctrl-D); Ctrl-C stops an answer"""


class ChatOptions(Group):
    """The conversation."""

    quick: str | None = field(default=None, flags=("-q",))
    """Ask this one question, print the answer and leave."""
    system_prompt: str | None = field(default=None)
    """System prompt."""
    max_tokens: int = field(default=1024, ge=1)
    """Most tokens of an answer, so that a model that rambles comes to an end."""
    temperature: float | None = field(default=None, ge=0, le=2)
    """Temperature. Default: the model's own."""
    stats: bool = field(default=False)
    """Print time to the first token and tokens per second after each answer."""


OPTIONS = (ChatOptions, ServerOptions, SourceConfig, *ENGINE_OPTIONS)


class Chat:
    """A conversation: its messages, and how the next answer is asked for and printed."""

    def __init__(self, connection: Connection, options: ChatOptions) -> None:
        self.connection, self.options = connection, options
        self.system = options.system_prompt
        self.messages: list[dict[str, str]] = []
        self.partial = ""

    def clear(self, system: str | None) -> None:
        """Begin anew with a system prompt (None: without)."""
        self.system, self.messages = system, []

    def body(self) -> dict[str, Any]:
        """The request for the next answer."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"messages": first + self.messages, "max_tokens": self.options.max_tokens}
        if self.options.temperature is not None:
            body["temperature"] = self.options.temperature
        return body

    def ask(self, question: str) -> bool:
        """Send a question and print the answer as it comes. Ctrl-C keeps what was said so far and gives False."""
        self.messages.append({"role": "user", "content": question})
        self.partial, is_whole = "", True
        try:
            asyncio.run(self._answer())
        except KeyboardInterrupt:
            is_whole = False
            print(" (stopped)", flush=True)
        except SamovarError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": self.partial})
        return is_whole

    async def _answer(self) -> None:
        began, first = time.monotonic(), 0.0
        usage: dict[str, int] = {}
        async for event in self.connection.stream("/chat/completions", self.body()):
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                text = choice.get("delta", {}).get("content") or ""
                first = first or (time.monotonic() if text else 0.0)
                self.partial += text
                print(text, end="", flush=True)
        print(flush=True)
        if self.options.stats:
            print(speed(began, first, time.monotonic(), usage.get("completion_tokens", 0)), file=sys.stderr)


def speed(began: float, first: float, end: float, tokens: int) -> str:
    """`first token 0.21 s, 24 tokens, 35.1 tokens/s`; the rate counts the tokens after the first."""
    rate = (tokens - 1) / (end - first) if first and tokens > 1 and end > first else 0.0
    return f"first token {max(first - began, 0.0):.2f} s, {tokens} tokens, {rate:.1f} tokens/s"


def run(settings: Settings) -> int:
    """One question with -q, otherwise a conversation until the input ends."""
    options = settings[ChatOptions]
    with connect(settings) as connection:
        chat = Chat(connection, options)
        if options.quick is not None:
            if not chat.ask(options.quick):
                raise KeyboardInterrupt  # The line is ended; `main` turns it into its exit code.
            return 0
        if sys.stdin.isatty() and find_spec("readline") is not None:
            import_module("readline")  # gives `input` line editing and a history
        print(f"talking to {connection.model}; /help lists what else there is", file=sys.stderr)
        while converse(chat):
            pass
    return 0


def converse(chat: Chat) -> bool:
    """One turn; False when the conversation is over."""
    try:
        line = input("> ").strip() if sys.stdin.isatty() else input().strip()
    except EOFError:
        return False
    except KeyboardInterrupt:
        print("\n(Ctrl-D or /exit leaves)")
        return True
    if not line.startswith("/"):
        if line:
            _ask(chat, line)
        return True
    return obey(chat, line)


def obey(chat: Chat, line: str) -> bool:
    """A line that begins with a slash; False for /exit."""
    word, _, rest = line.partition(" ")
    if word in ("/exit", "/quit"):
        return False
    if word == "/clear":
        chat.clear(chat.system)
        print("(forgotten)")
    elif word == "/system" and rest.strip():
        chat.clear(rest.strip())
        print("(a new conversation with this system prompt)")
    elif word == "/system":
        print(chat.system or "(no system prompt)")
    else:
        print(HELP if word == "/help" else f"unknown command {word}; /help lists what there is")
    return True


def _ask(chat: Chat, line: str) -> None:
    """A refused question does not end the conversation."""
    try:
        chat.ask(line)
    except SamovarError as error:
        print(f"({error})", file=sys.stderr)
