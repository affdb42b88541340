"""Lines near the top of a system prompt that change with every turn, and how they are kept from spoiling the prefix cache.

Whatever changes near the beginning of a prompt makes everything behind it new to the cache. Three rules, in this order:

1. Header lines at the very top (`x-anthropic-...: ...`, which coding agents put there for billing) are left out: they
   are addressed to Anthropic's servers and mean nothing to a model.
2. Lines like `name: value` among the first lines whose value is of the moment (a clock time, a UUID, seconds since 1970,
   a nonce in hex) are moved.
3. Lines that differ from those of the same conversation's previous request are moved, from then on.

A moved line goes to the end of the last message: behind everything that the next turn repeats. Rules 2 and 3 leave
short prompts alone, where nothing is to be gained. `--no-anthropic-volatile-lines` switches all of it off.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

MIN_CHARS = 4096
"""Rules 2 and 3 are for system prompts of at least this length."""
TOP_LINES = 64
"""Lines that rule 3 looks at."""
SHAPE_LINES, SHAPE_CHARS = 16, 300
"""Lines that rule 2 looks at, and how long they may be."""
MAX_MOVED = 4
"""More changed lines than this are another prompt, and stay where they are."""
MAX_CONVERSATIONS = 512

INTRODUCTION = "(From the system prompt, as of now:)"

_header = re.compile(r"x-anthropic-[a-z0-9-]+:", re.IGNORECASE)
_named = re.compile(r"\s*(?:[-*>]\s+)?[^\W\d_][\w .'/()-]{0,60}[:=](?P<value>.*)", re.DOTALL)
_of_the_moment = re.compile(
    r"(?<!\d)[0-2]?\d:[0-5]\d(?!\d)"
    r"|\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
    r"|\b1[5-9]\d{8}(?:\d{3}){0,2}\b"
    r"|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{5,64}\b"
)


@dataclass(slots=True)
class _Seen:
    """The top of a conversation's last system prompt: digests of its lines, and which of them move."""

    lines: list[bytes]
    moved: set[int] = field(default_factory=set)


class SystemMemory:
    """What the system prompts of recent conversations looked like. Bounded; safe to use from several threads."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, _Seen] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._seen)

    def changing(self, conversation: bytes, top: Sequence[str]) -> set[int]:
        """Indexes of lines that have changed in this conversation; notes the lines for the next time."""
        digests = [_digest(line) for line in top]
        with self._lock:
            seen = self._seen.pop(conversation, None)
            if seen is None or len(seen.lines) != len(digests):
                seen = _Seen(digests)
            else:
                seen.moved |= {i for i, (old, new) in enumerate(zip(seen.lines, digests, strict=True)) if old != new}
                if len(seen.moved) > MAX_MOVED:
                    seen.moved = set()
                seen.lines = digests
            self._seen[conversation] = seen
            while len(self._seen) > MAX_CONVERSATIONS:
                self._seen.popitem(last=False)
            return set(seen.moved)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def conversation_key(owner: str, tools: Sequence[str], first_message: str) -> bytes:
    """Names a conversation: whose it is (nobody else's lines are ever compared), its tools, and how it began."""
    hashed = blake2b(digest_size=16)
    for part in (owner, *tools, first_message):
        raw = part.encode("utf-8", "surrogatepass")
        hashed.update(len(raw).to_bytes(8, "little") + raw)
    return hashed.digest()


def without_headers(text: str) -> str:
    """Rule 1: `text` without the header lines that it begins with."""
    while _header.match(text):
        text = text.partition("\n")[2]
    return text


def split_volatile(text: str, conversation: bytes, memory: SystemMemory) -> tuple[str, str]:
    """Rules 2 and 3: a system prompt -> (what stays, the lines to move)."""
    if len(text) < MIN_CHARS:
        return text, ""
    lines = text.split("\n")
    moved = memory.changing(conversation, lines[:TOP_LINES])
    moved |= {i for i, line in enumerate(lines[:SHAPE_LINES]) if _is_of_the_moment(line)}
    moved = set(sorted(moved)[:MAX_MOVED])
    stays = [line for i, line in enumerate(lines) if i not in moved]
    return "\n".join(stays), "\n".join(lines[i] for i in sorted(moved))


def _is_of_the_moment(line: str) -> bool:
    if len(line) > SHAPE_CHARS:
        return False
    named = _named.fullmatch(line)
    return named is not None and _of_the_moment.search(named["value"]) is not None
