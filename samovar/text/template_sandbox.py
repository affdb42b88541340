"""The Jinja environment that chat templates run in: Transformers' dialect, without its freedom.

Templates come with checkpoints (and from clients, if the operator allows it), so three things are bounded, and going
over a bound is a `jinja2.TemplateError`: `range` (100,000 numbers, as in Jinja's sandbox), loop turns and seconds of
one rendering (`MAX_LOOP_TURNS`, `MAX_SECONDS`), and the size of any string an operator or string method makes and of
the result (`MAX_CHARS`). Time is looked at on loop turns and output, so a single slow expression can overrun it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

MAX_LOOP_TURNS = 2_000_000
MAX_SECONDS = 5.0
MAX_CHARS = 16_000_000
MAX_WIDTH = 100_000
"""Largest number that a string method or a padding filter takes."""
MAX_BITS = 4096
"""Size of the largest integer that `*` and `**` make."""

_TURNS_PER_LOOK = 1024


class TemplateLimitError(jinja2.TemplateError):
    """A rendering went over one of this module's bounds."""


class Budget:
    """Loop turns and time left to one rendering."""

    def __init__(self, seconds: float = MAX_SECONDS, turns: int = MAX_LOOP_TURNS) -> None:
        self._deadline = time.monotonic() + seconds
        self._seconds, self._most_turns = seconds, turns
        self._turns = 0

    def turn(self) -> None:
        """Count one loop turn."""
        self._turns += 1
        if self._turns > self._most_turns:
            raise TemplateLimitError(f"more than {self._most_turns} loop turns")
        if self._turns % _TURNS_PER_LOOK == 0:
            self.look()

    def look(self) -> None:
        """Check the time."""
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"rendering took longer than {self._seconds:g} seconds")


_budget: ContextVar[Budget | None] = ContextVar("chat_template_budget", default=None)


class ChatEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Immutable sandbox with trimmed blocks, loop controls, `{% generation %}` and the globals templates expect."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters[_COUNTED] = _counted
        self.filters[_JOINED] = _joined
        for name, width_at in (("center", 0), ("indent", 0)):
            self.filters[name] = _narrow(self.filters[name], width_at)
        self.filters["format"] = _format
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _TemplateDict()
        self.globals["namespace"] = _TemplateNamespace

    def tree(self, source: str) -> jinja2.nodes.Template:
        """A template's syntax tree as written, for looking at."""
        return super()._parse(source, None, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = _filtered(loop.iter, _COUNTED, self)
        return _Bounded(self).visit(tree)  # type: ignore[no-any-return]

    def render_bounded(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render within the bounds. Raises whatever the template's expressions raise, mostly `TemplateError`."""
        budget = Budget()
        token = _budget.set(budget)
        parts, size = [], 0
        try:
            for part in template.generate(variables):
                size += len(part)
                if size > MAX_CHARS:
                    raise TemplateLimitError(f"the result has more than {MAX_CHARS} characters")
                budget.look()
                parts.append(part)
        finally:
            _budget.reset(token)
        return "".join(parts)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic of the template, with results of bounded size."""
        if operator == "*" and (size := _product_size(left, right)) > MAX_CHARS:
            raise TemplateLimitError(f"a product of {size} items")
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TemplateLimitError(f"an integer of {bits} bits")
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _check_size(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call something for the template; string methods take no giant widths and make no giant strings."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_string_call(__obj.__name__, owner, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's `str.format`, which takes no giant widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
            if _NESTED_FIELD.search(value.__self__):
                raise TemplateLimitError("str.format with a width that is itself a field")
        return wrapped


_NESTED_FIELD = re.compile(r"\{[^{}]*:[^{}]*\{")
_COUNTED, _JOINED = "samovar_counted", "samovar_joined"


class _Bounded(jinja2.visitor.NodeTransformer):
    """Rewrites `a ~ b` into a filter that checks the size of the result."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Filter:  # noqa: N802 - named by Jinja
        self.generic_visit(node)
        items = jinja2.nodes.List(node.nodes, lineno=node.lineno, environment=self._environment)
        return _filtered(items, _JOINED, self._environment)


def _filtered(node: jinja2.nodes.Node, name: str, environment: jinja2.Environment) -> jinja2.nodes.Filter:
    """The expression `node | name`."""
    value = cast(jinja2.nodes.Expr, node)
    return jinja2.nodes.Filter(value, name, [], [], None, None, lineno=node.lineno, environment=environment)


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the model wrote; for rendering it is only its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body, lineno=line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict` for templates, without the type behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(jinja2.utils.Namespace):
    """A namespace whose attributes cannot begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` is taken from `args`, so that a template may have an attribute of that name.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attributes cannot begin with an underscore: {name!r}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter this does not escape HTML."""
    if isinstance(indent, int) and indent > MAX_WIDTH:
        raise TemplateLimitError(f"an indent of {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    """Count the turns of a loop over `items`."""
    budget = _budget.get()
    for item in items:
        if budget is not None:
            budget.turn()
        yield item


def _joined(items: list[Any]) -> str:
    texts = [str(item) for item in items]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise TemplateLimitError(f"a string of {size} characters; the limit is {MAX_CHARS}")


def _product_size(left: Any, right: Any) -> int:
    for items, times in ((left, right), (right, left)):
        if isinstance(items, (str, list, tuple)) and isinstance(times, int):
            return len(items) * max(times, 0)
    return 0


def _check_format(pattern: str) -> None:
    """No conversion of the `%` operator may pad to a giant width."""
    digits = ""
    for char in pattern:
        digits = digits + char if char.isdigit() else ""
        if len(digits) > len(str(MAX_WIDTH)):
            raise TemplateLimitError(f"a format with the width {digits}...")


def _check_string_call(name: str, owner: str, args: tuple[Any, ...]) -> None:
    for arg in args:
        if isinstance(arg, int) and name in ("center", "ljust", "rjust", "zfill", "expandtabs") and arg > MAX_WIDTH:
            raise TemplateLimitError(f"{name} to a width of {arg}")
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        _check_size(len(owner) + (owner.count(args[0]) * (len(args[1]) - len(args[0])) if args[1] else 0))
    if name == "join" and args and isinstance(args[0], (list, tuple)):
        _check_size(len(owner) * len(args[0]))
    if name == "format":
        _check_format(owner)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(str(value))
    return jinja2.filters.do_format(value, *args, **kwargs)


def _narrow(original: Callable[..., Any], width_at: int) -> Callable[..., Any]:
    """A padding filter that refuses giant widths."""

    def narrowed(value: Any, *args: Any, **kwargs: Any) -> Any:
        width = args[width_at] if len(args) > width_at else kwargs.get("width", 0)
        if isinstance(width, int) and width > MAX_WIDTH:
            raise TemplateLimitError(f"a width of {width}")
        return original(value, *args, **kwargs)

    return narrowed
