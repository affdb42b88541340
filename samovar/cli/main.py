"""The `samovar` command: the table of subcommands, and errors as one line. A subcommand is imported when it is named."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from samovar.config.field import Group
from samovar.config.load import HelpAsked, Settings, load
from samovar.errors import ConfigError, SamovarError

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("samovar.cli.serve", "serve a model over the OpenAI and Anthropic APIs"),
    "chat": ("samovar.cli.chat", "talk to a model, in a server or started here"),
    "complete": ("samovar.cli.complete", "continue a text"),
    "generate": ("samovar.cli.generate", "answer a file of prompts into a JSONL file"),
    "run-batch": ("samovar.cli.run_batch", "answer a file of requests in OpenAI's batch form"),
    "plan": ("samovar.cli.plan", "say what memory a model needs, without loading it"),
    "models": ("samovar.cli.models", "list the architectures that run, and why others do not"),
    "routes": ("samovar.cli.routes", "say which implementation computes each operation, and why"),
    "warmup": ("samovar.cli.warmup", "compile a model's GPU kernels now, to start faster later"),
    "doctor": ("samovar.cli.doctor", "say what this machine offers and what will be used"),
    "pull": ("samovar.cli.pull", "download a model now, to use it later without a network"),
    "eval": ("samovar.cli.eval", "quality: ppl, kl (divergence from a reference), gsm8k, or needle"),
    "bench": ("samovar.cli.bench", "measure: startup, latency, prefill, throughput, or serve (a running server)"),
}
"""Name -> module and what it does."""

BENCHES: dict[str, tuple[str, str]] = {
    "startup": ("samovar.cli.bench.startup", "seconds from the command to ready and to the first token"),
    "latency": ("samovar.cli.bench.latency", "seconds for one fixed batch, and for one decode step of it"),
    "prefill": ("samovar.cli.bench.prefill", "seconds to the first token of one prompt of a given length"),
    "throughput": ("samovar.cli.bench.throughput", "tokens per second over many prompts given at once"),
    "serve": ("samovar.cli.bench.serve", "a running server under a load of requests"),
}
"""Subcommands of `bench`."""

EVALUATIONS: dict[str, tuple[str, str]] = {
    "ppl": ("samovar.cli.eval.ppl", "perplexity on a fixed text"),
    "kl": ("samovar.cli.eval.kl", "divergence of a quantized model's distributions from its own unquantized ones"),
    "gsm8k": ("samovar.cli.eval.gsm8k", "school arithmetic in words, answered greedily"),
    "needle": ("samovar.cli.eval.needle", "a fact found again in long prompts, by length and depth"),
}
"""Subcommands of `eval`."""

GROUPS = {"bench": BENCHES, "eval": EVALUATIONS}
"""Commands that have commands of their own."""

ALIASES = {"collect-env": "doctor"}

HINT = " `samovar --version` prints the version.\nTo begin: samovar serve smollm2"

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
"""Exit codes: the command failed; a flag or argument is wrong; Ctrl-C."""


class Command(Protocol):
    """What a subcommand's module has; and perhaps `UNUSED`, the settings of `OPTIONS` that it refuses."""

    USAGE: str
    OPTIONS: tuple[type[Group], ...]
    POSITIONAL: str | None
    """The setting that the first argument sets."""

    def run(self, settings: Settings) -> int: ...


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    try:
        return _dispatch(words)
    except SamovarError as error:
        if _wants_traceback(words):
            raise
        print(f"samovar: {error}", file=sys.stderr)
        return MISUSED if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`samovar ... | head`): keep Python from failing again while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _dispatch(words: list[str]) -> int:
    name = words[0] if words else "--help"
    if name in ("-v", "-V", "--version", "version"):
        from samovar import __version__

        print(__version__)
        return 0
    if name in GROUPS:
        return _choose(f"samovar {name}", GROUPS[name], words[1:], "")
    return _choose("samovar", COMMANDS, words, HINT)


def _choose(program: str, commands: dict[str, tuple[str, str]], words: list[str], hint: str) -> int:
    """Run the command that the first word names, or list them."""
    name = ALIASES.get(words[0], words[0]) if words else "--help"
    if name in ("-h", "--help", "help"):
        print(overview(program, commands) + hint)
        return 0
    if name not in commands:
        raise ConfigError(_unknown(name, commands))
    return run_command(cast(Command, importlib.import_module(commands[name][0])), words[1:])


def run_command(command: Command, words: Sequence[str]) -> int:
    """Load a command's settings from its words and run it, or print its help."""
    try:
        settings = load(words, command.OPTIONS, positional=command.POSITIONAL)
    except HelpAsked as asked:
        from samovar.cli.help import command_help

        unused = getattr(command, "UNUSED", ())
        print(command_help(command.USAGE, command.__doc__ or "", command.OPTIONS, asked.topic, unused=unused))
        return 0
    if settings.arguments:
        raise ConfigError(f"unexpected argument {settings.arguments[0]!r}; usage: {command.USAGE}")
    return command.run(settings)


def overview(program: str, commands: dict[str, tuple[str, str]]) -> str:
    """The list of commands."""
    rows = "\n".join(f"  {name:<10} {summary}" for name, (_, summary) in commands.items())
    return f"usage: {program} COMMAND [arguments]\n\ncommands:\n{rows}\n\n`{program} COMMAND --help` lists a command's flags."


def _unknown(name: str, commands: dict[str, tuple[str, str]]) -> str:
    import difflib

    near = difflib.get_close_matches(name, commands, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(commands)}"
    return f"unknown command {name!r}; {hint}"


def _wants_traceback(words: Sequence[str]) -> bool:
    return "--log-level=debug" in words or ("--log-level", "debug") in itertools.pairwise(words)


if __name__ == "__main__":
    sys.exit(main())
