"""Answers a file of prompts (text: one a line; or JSONL) into a JSONL file, in order, as they are done."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from samovar.cli.connection import ENGINE_OPTIONS, Connection, ServerOptions, connect
from samovar.cli.http_stream import RequestRefused
from samovar.cli.output import ProgressLine
from samovar.config.field import Group, field
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings
from samovar.errors import ConfigError, SamovarError

USAGE = "samovar generate INPUT [-o OUTPUT] [--model MODEL] [flags]"
POSITIONAL = "input"
NAMES = ("id", "custom_id")
"""Fields of an input line that are copied to its output line."""


class GenerateOptions(Group):
    """The files, and what every request has unless its line says otherwise."""

    input: str = field(default="")
    """Prompts: a .jsonl file of objects with "prompt" or "messages" (and sampling fields), or text, one prompt a line."""
    output: str = field(default="-", flags=("-o",))
    """JSONL file to write; - for standard output."""
    overwrite: bool = field(default=False)
    """Replace the output file if it exists."""
    chat: bool = field(default=False)
    """Send plain prompts as a user's message, through the chat template."""
    max_tokens: int | None = field(default=None, ge=1)
    """Most tokens of an answer."""
    temperature: float | None = field(default=None, ge=0, le=2)
    """Temperature. Default: the model's own."""
    concurrency: int = field(default=256, ge=1)
    """Requests in flight."""


OPTIONS = (GenerateOptions, ServerOptions, SourceConfig, *ENGINE_OPTIONS)


def run(settings: Settings) -> int:
    """Answer everything; exit code 1 if any line failed (its output line says why)."""
    options = settings[GenerateOptions]
    prompts = read_prompts(options)
    with open_output(options) as out, connect(settings) as connection, ProgressLine("prompts") as progress:
        failed = asyncio.run(answer_all(connection, prompts, options, out, progress))
    if failed:
        print(f"{failed} of {len(prompts)} prompts failed; their lines have an error field", file=sys.stderr)
    return 1 if failed else 0


def read_prompts(options: GenerateOptions) -> list[dict[str, Any]]:
    """The input's lines as objects with "prompt" or "messages". Raises `ConfigError` naming the line."""
    if not options.input:
        raise ConfigError(f"no input file; usage: {USAGE}")
    try:
        text = sys.stdin.read() if options.input == "-" else Path(options.input).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{options.input}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{options.input}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    is_json = options.input.endswith((".jsonl", ".json"))
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    prompts = [_parse_line(options.input, *entry) if is_json else {"prompt": entry[1]} for entry in lines]
    if not prompts:
        raise ConfigError(f"{options.input}: holds no prompt")
    return prompts


def _parse_line(name: str, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{name}:{number}: is not JSON: {error}") from None
    if isinstance(entry, str):
        return {"prompt": entry}
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ConfigError(f"{name}:{number}: needs either a prompt or messages")
    return entry


@contextmanager
def open_output(options: GenerateOptions) -> Iterator[TextIO]:
    """The output file, or standard output. Raises `ConfigError` for a file that cannot be opened, or is the input."""
    if options.output == "-":
        yield sys.stdout
        return
    if is_same_file(options.input, options.output):
        raise ConfigError(f"--output {options.output}: is the input file; name another one")
    try:
        file = Path(options.output).open("w" if options.overwrite else "x", encoding="utf-8")  # noqa: SIM115
    except FileExistsError:
        raise ConfigError(f"--output {options.output}: exists already; --overwrite replaces it") from None
    except OSError as error:
        raise ConfigError(f"--output {options.output}: cannot be written: {error.strerror or error}") from error
    with file:
        yield file


def is_same_file(one: str, other: str) -> bool:
    """Whether both names lead to one existing file."""
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)


def write_line(line: dict[str, Any], out: TextIO, name: str) -> None:
    """One line of JSON, written at once. Raises `SamovarError` naming the output if it takes no more.

    `BrokenPipeError` is passed on: a reader that leaves is no fault.
    """
    text = json.dumps(line, ensure_ascii=False)
    try:
        text.encode(out.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(line)
    try:
        print(text, file=out, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is still buffered must not fail a second time when the file is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        where = "standard output" if name == "-" else f"--output {name}"
        reason = f"cannot be written from answer {line['index']} on: {error.strerror or error}"
        raise SamovarError(f"{where}: {reason}; free space or name another file") from None


async def answer_all(
    connection: Connection,
    prompts: list[dict[str, Any]],
    options: GenerateOptions,
    out: TextIO,
    progress: ProgressLine,
) -> int:
    """Keep `concurrency` requests in flight and write their lines in the input's order; returns how many failed."""
    gate = asyncio.Semaphore(options.concurrency)
    done = 0

    async def one(index: int) -> dict[str, Any]:
        nonlocal done
        async with gate:
            line = await answer(connection, index, prompts[index], options)
        done += 1
        progress(done, len(prompts))
        return line

    failed = 0
    # Not a TaskGroup: the first error is to arrive as it is, not in an ExceptionGroup.
    tasks = [asyncio.create_task(one(index)) for index in range(len(prompts))]
    try:
        for task in tasks:
            line = await task
            failed += "error" in line
            write_line(line, out, options.output)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return failed


async def answer(connection: Connection, index: int, entry: dict[str, Any], options: GenerateOptions) -> dict[str, Any]:
    """The output line of one input line."""
    line = {"index": index} | {name: entry[name] for name in NAMES if name in entry}
    body = {key: value for key, value in entry.items() if key not in NAMES}
    if options.chat and isinstance(body.get("prompt"), str):
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    for name in ("max_tokens", "temperature"):
        if (value := getattr(options, name)) is not None:
            body.setdefault(name, value)
    try:
        answered = await connection.ask("/chat/completions" if "messages" in body else "/completions", body)
    except RequestRefused as error:
        return line | {"error": str(error)}
    texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answered["choices"]]
    reasons = [choice["finish_reason"] for choice in answered["choices"]]
    many = {"texts": texts, "finish_reasons": reasons}
    return (
        line
        | (many if len(texts) > 1 else {"text": texts[0], "finish_reason": reasons[0]})
        | {"usage": answered["usage"]}
    )
