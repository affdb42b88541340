"""The side process: compiles grammars of clients, where a crash, a hang or a gigabyte hurts nobody.

Messages both ways are msgpack behind four bytes of length. The first one is the vocabulary; every later one is a task.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import sys
import time
from itertools import chain
from typing import IO, TYPE_CHECKING

import msgspec

from samovar.grammar.limits import PARSER_LIMITS
from samovar.grammar.tokens import Vocabulary, table_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GRACE_SECONDS = 1
NOTHING_FITS = ("", "NoExtension", "NoExtensionBias")
TRIALS = 3
TRIAL_TOKENS = 24


class Opening(msgspec.Struct, array_like=True):
    """The first message: the vocabulary, and how much one task may take."""

    tokens: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]
    memory_bytes: int
    deadline_seconds: float
    build_seconds: float


class Task(msgspec.Struct, array_like=True):
    """Compile `text`: a grammar as llguidance takes it, or ("ebnf") one to be written in Lark first."""

    kind: str
    text: str


class Verdict(msgspec.Struct, array_like=True):
    """`problem`: why the grammar cannot be used, or None. `text`: the Lark of an "ebnf" task."""

    problem: str | None
    text: str = ""


def write_frame(pipe: IO[bytes], message: bytes) -> None:
    """Send one message."""
    pipe.write(struct.pack("<I", len(message)) + message)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """The next message; None when the other side is gone."""
    head = pipe.read(4)
    if len(head) < 4:
        return None
    body = pipe.read(struct.unpack("<I", head)[0])
    return body or None


def main() -> None:
    """Serve tasks until the parent closes the pipe."""
    tasks, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the messages
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    first = read_frame(tasks)
    if first is None:
        return
    opening = msgspec.msgpack.decode(first, type=Opening)
    table = table_of(Vocabulary(opening.tokens, opening.special_ids, opening.eos_ids))
    _limit_memory(opening.memory_bytes)
    write_frame(results, msgspec.msgpack.encode(Verdict(None)))
    while (frame := read_frame(tasks)) is not None:
        task = msgspec.msgpack.decode(frame, type=Task)
        # Should the parent die meanwhile, the alarm ends a compilation that nobody waits for.
        signal.setitimer(signal.ITIMER_REAL, opening.deadline_seconds + GRACE_SECONDS)
        verdict = _ebnf(task.text) if task.kind == "ebnf" else _compile(table, task.text, opening.build_seconds)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(results, msgspec.msgpack.encode(verdict))


def _compile(table: LLTokenizer, grammar: str, build_seconds: float) -> Verdict:
    from llguidance import LLMatcher, LLParserLimits

    started = time.process_time()
    matcher: LLMatcher = LLMatcher(table, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    spent = time.process_time() - started
    if matcher.is_error():
        return Verdict(_reason(matcher))
    if spent > build_seconds:
        return Verdict(f"compiling takes {spent:.2g} s of processor time, more than {build_seconds:g} s")
    for seed in range(TRIALS):
        problem = _try_out(matcher.deep_copy(), random.Random(seed))
        if problem is not None:
            return Verdict(problem)
    return Verdict(None)


def _try_out(matcher: LLMatcher, chance: random.Random) -> str | None:
    """What goes wrong within the first tokens of an answer made by chance. Some grammars compile and cannot be followed."""
    for _ in range(TRIAL_TOKENS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return _reason(matcher)
        token = _any_bit(mask, chance)
        if token is None:
            return "no text satisfies it"
        if not matcher.consume_token(token):
            return _reason(matcher)
        if matcher.is_stopped():
            return None
    return None


def _any_bit(mask: bytes, chance: random.Random) -> int | None:
    """One of the tokens a mask allows; None if it allows none."""
    start = chance.randrange(len(mask))
    for at in chain(range(start, len(mask)), range(start)):
        if mask[at]:
            bits = [bit for bit in range(8) if mask[at] >> bit & 1]
            return 8 * at + chance.choice(bits)
    return None


def _reason(matcher: LLMatcher) -> str:
    error: str = matcher.get_error().strip()
    return "no text satisfies it" if error.partition("\n")[0] in NOTHING_FITS else error[:2000]


def _ebnf(text: str) -> Verdict:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return Verdict(None, gbnf_to_lark(text))
    except RecursionError:
        return Verdict("the grammar is nested too deep")
    except Exception as error:  # the converter raises bare Exception for every mistake in a grammar
        return Verdict(str(error)[:2000] or type(error).__name__)


def _limit_memory(extra: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # no such limits on this system
        import resource

        with open("/proc/self/statm") as file:
            in_use = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + extra, in_use + extra))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
