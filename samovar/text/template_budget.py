"""What one rendering of a chat template may use: time, loop turns and calls, and size of every value.

No value weighs more than `MAX_CHARS`, counted with everything in it as often as it occurs there, so that no single
operation in C is long; every operation is charged for what it reads and makes, and the sum has a bound as well.
Predictions for operations that make much of little stand here; `template_sandbox` asks before it runs them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jinja2

MAX_LOOP_TURNS = 2_000_000
MAX_SECONDS = 5.0
MAX_CHARS = 16_000_000
MAX_WORK = 128_000_000
"""Characters and items (each `ITEM_CHARS`) that one rendering may read and make in all."""
MAX_SLOW = 200_000
"""Weight of what a filter gets that is written in Python."""
MAX_WIDTH = 100_000
"""Largest number that a string method or a padding filter takes."""
MAX_BITS = 4096
"""Size of the largest integer that `*` and `**` make."""
ITEM_CHARS = 8
"""What an item of a list or an object weighs besides its contents."""

SLOW = frozenset("filesizeformat pprint random striptags sum title urlencode urlize wordcount wordwrap xmlattr".split())
_CONSTANT = frozenset("attr count d default first float int items last length round safe".split())
_WHOLE = frozenset("e escape forceescape join lower pprint string tojson trim truncate upper".split())
_ITERATING = frozenset(
    "batch dictsort groupby list map max min reject rejectattr reverse select selectattr slice".split()
)
_WIDE_METHODS = frozenset({"center", "ljust", "rjust", "zfill"})
_REFUSED_METHODS = frozenset({"encode", "to_bytes"})
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SHALLOW = 64


class TemplateLimitError(jinja2.TemplateError):
    """A rendering went over one of this module's bounds."""


class Budget:
    """What is left to one rendering."""

    def __init__(self, seconds: float, turns: int = MAX_LOOP_TURNS) -> None:
        self._deadline = time.thread_time() + seconds  # a busy machine is no fault of the template
        self._seconds, self._most_turns = seconds, turns
        self._turns = self._work = 0
        self._weights: dict[int, tuple[Any, int, int]] = {}
        """id of a container -> itself (so that the id stays its own), weight, depth. Templates cannot change one."""

    def turn(self, cost: int = 0) -> None:
        """Count one loop turn or call, with `cost` characters of the template in it."""
        self._turns += 1
        if self._turns > self._most_turns:
            raise TemplateLimitError(f"more than {self._most_turns} loop turns")
        self.charge(cost)

    def charge(self, size: int) -> None:
        """Count work, and check the time."""
        self._work += size
        if self._work > MAX_WORK:
            raise TemplateLimitError(f"it handles more than {MAX_WORK} characters")
        if time.thread_time() > self._deadline:
            raise TemplateLimitError(f"rendering took longer than {self._seconds:g} seconds")

    def weigh(self, value: Any) -> tuple[int, int]:
        """Weight of a value with everything in it, and how deep it is nested."""
        if isinstance(value, (str, bytes)):
            return len(value), 0
        if not isinstance(value, (list, tuple, dict)):
            return 1, 0
        if (known := self._weights.get(id(value))) is not None:
            return known[1], known[2]
        weight, depth = ITEM_CHARS, 0
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        for part in parts:
            size, inner = self.weigh(part)
            weight, depth = weight + size + ITEM_CHARS, max(depth, inner)
            if weight > MAX_CHARS:
                raise TemplateLimitError(f"a value of more than {MAX_CHARS} characters")
        if weight > _SHALLOW:
            self._weights[id(value)] = (value, weight, depth + 1)
        return weight, depth + 1

    def made(self, value: Any) -> Any:
        """Check and charge something the template made; returns it."""
        if isinstance(value, (str, list, tuple, dict)):
            check_size(self.weigh(value)[0])
            self.charge(len(value))
        return value


_budget: ContextVar[Budget | None] = ContextVar("chat_template_budget", default=None)


def start_budget() -> tuple[Budget, Callable[[], None]]:
    """A new budget for this context, and what ends it."""
    budget = Budget(MAX_SECONDS)
    token = _budget.set(budget)
    return budget, lambda: _budget.reset(token)


def budget_now() -> Budget:
    """The budget of the rendering in progress; a fresh one outside of any."""
    return _budget.get() or Budget(MAX_SECONDS)


def check_size(size: int) -> None:
    """Refuse a value of `size` characters if that is too much."""
    if size > MAX_CHARS:
        raise TemplateLimitError(f"a value of {size} characters; the limit is {MAX_CHARS}")


def check_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Refuse arithmetic with a giant result before it is done."""
    if operator == "*":
        for items, times in ((left, right), (right, left)):
            if isinstance(items, (str, list, tuple)) and isinstance(times, int):
                check_size(budget.weigh(items)[0] * max(times, 0))
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise TemplateLimitError(f"an integer of {bits} bits")
    if operator == "+":
        check_size(budget.weigh(left)[0] + budget.weigh(right)[0])
    if operator == "%" and isinstance(left, str):
        check_format(budget, left, right if isinstance(right, tuple) else (right,))


_NUMBER = re.compile(rf"\d{{{len(str(MAX_WIDTH)) + 1}}}")
_STARRED = re.compile(r"%[^a-zA-Z%]*\*")
_NESTED_FIELD = re.compile(r"\{[^{}]*:[^{}]*\{")


def check_format(budget: Budget, pattern: str, args: Sequence[Any]) -> None:
    """No conversion may pad to a giant width, and no argument may be written too often. For `%` and `str.format`."""
    if found := _NUMBER.search(pattern):
        raise TemplateLimitError(f"a format with the width {found[0]}...")
    if _STARRED.search(pattern) or _NESTED_FIELD.search(pattern):
        raise TemplateLimitError("a format with a width that is itself an argument")
    longest = max((budget.weigh(arg)[0] for arg in args), default=0)
    check_size(len(pattern) + (pattern.count("%") + pattern.count("{")) * longest)


def check_method(budget: Budget, name: str, owner: str, args: tuple[Any, ...]) -> None:
    """Refuse a call of a string's method that would make a giant string or list."""
    first = args[0] if args else None
    if name in _WIDE_METHODS:
        _check_widths(name, args)
    elif name == "expandtabs":
        check_size(len(owner) + owner.count("\t") * (first if isinstance(first, int) else 8))
    elif name == "replace" and len(args) >= 2:
        check_size(_replaced(owner, str(args[0]), str(args[1])))
    elif name == "join":
        budget.charge(budget.weigh(first)[0])
        check_size(
            budget.weigh(first)[0] + len(owner) * (len(first) if isinstance(first, (list, tuple, dict, str)) else 0)
        )
    elif name == "splitlines":
        check_size(sum(map(owner.count, _LINE_ENDS)) * ITEM_CHARS)
    elif name in ("split", "rsplit"):
        check_size((owner.count(first) if isinstance(first, str) and first else len(owner) // 2) * ITEM_CHARS)
    elif name == "translate" and isinstance(first, Mapping):
        check_size(len(owner) * (1 + max((len(text) for text in first.values() if isinstance(text, str)), default=0)))
    budget.charge(len(owner) if name not in ("startswith", "endswith") else 0)


def check_call(owner: Any, name: str) -> None:
    """Refuse methods that make bytes: nothing else does, and no template needs any."""
    if name in _REFUSED_METHODS and isinstance(owner, (str, int)):
        raise TemplateLimitError(f"templates cannot call {name}")


def check_filter(budget: Budget, name: str, value: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Charge a filter for what it reads, and refuse one that would make a giant value."""
    if name in SLOW and budget.weigh(value)[0] > MAX_SLOW:
        raise TemplateLimitError(f"the filter {name} takes {MAX_SLOW} characters at most")
    if name in _ITERATING and isinstance(value, str):
        check_size(len(value) * ITEM_CHARS)
    _check_amplifier(budget, name, value, (*args, *named.values()))
    if name in _WHOLE:
        budget.charge(budget.weigh(value)[0])
    elif name not in _CONSTANT and isinstance(value, (str, list, tuple, dict)):
        budget.charge(len(value))


def _check_amplifier(budget: Budget, name: str, value: Any, args: tuple[Any, ...]) -> None:
    if name in ("center", "batch", "slice", "indent", "round", "truncate", "wordwrap"):
        _check_widths(name, args)
    if name == "format":
        check_format(budget, str(value), args)
    elif name == "replace" and len(args) >= 2:
        check_size(_replaced(str(value), str(args[0]), str(args[1])))
    elif name == "indent" and isinstance(value, str):
        width = max(
            (len(arg) if isinstance(arg, str) else arg for arg in args if isinstance(arg, (str, int))), default=4
        )
        check_size(len(value) + (sum(map(value.count, _LINE_ENDS)) + 1) * (ITEM_CHARS + width))
    elif name == "join":
        longest = max((budget.weigh(arg)[0] for arg in args), default=0)
        check_size(
            budget.weigh(value)[0] + longest * (len(value) if isinstance(value, (list, tuple, dict, str)) else 0)
        )
    elif name == "tojson":
        weight, depth = budget.weigh(value)
        wide = sum(arg if isinstance(arg, int) else budget.weigh(arg)[0] for arg in args if arg is not None)
        check_size(weight + wide * (weight // ITEM_CHARS) * (depth + 1))


def _check_widths(name: str, args: tuple[Any, ...]) -> None:
    for arg in args:
        if isinstance(arg, int) and arg > MAX_WIDTH:
            raise TemplateLimitError(f"{name} to a width of {arg}")


def _replaced(text: str, old: str, new: str) -> int:
    """Size of `text` with every `old` replaced."""
    return len(text) + text.count(old) * max(0, len(new) - len(old))
