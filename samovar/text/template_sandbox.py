"""The Jinja environment that chat templates run in: Transformers' dialect, without its freedom.

Templates come with checkpoints (and from clients, if the operator allows it), so what one rendering uses is bounded by
`template_budget`, besides `range` (100,000 numbers, as in Jinja's sandbox); going over a bound is a
`jinja2.TemplateError`. Loops, calls, filters, operators, lists, objects and output are rewritten or wrapped to ask first.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from samovar.text.template_budget import (
    TemplateLimitError,
    budget_now,
    check_call,
    check_filter,
    check_format,
    check_method,
    check_operator,
    check_size,
    start_budget,
)

MAX_DATE_CHARS = 1000


class ChatEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Immutable sandbox with trimmed blocks, loop controls, `{% generation %}` and the globals templates expect."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            optimized=False, trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, original) for name, original in self.filters.items()}
        self.filters |= {_COUNTED: _counted, _JOINED: _joined, _MADE: _made, _COMPARED: _compared, _WRITTEN: _written}
        del self.globals["lipsum"]
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
            size = sum(len(data.data) for part in loop.body for data in part.find_all(jinja2.nodes.TemplateData))
            loop.iter = _filtered(loop.iter, _COUNTED, self, jinja2.nodes.Const(size))
        return _Bounded(self).visit(tree)  # type: ignore[no-any-return]

    def render_bounded(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render within the bounds. Raises whatever the template's expressions raise, mostly `TemplateError`."""
        budget, end = start_budget()
        parts, size = [], 0
        try:
            for part in template.generate(variables):
                size += len(part)
                check_size(size)
                budget.charge(0)
                parts.append(part)
        finally:
            end()
        return "".join(parts)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic of the template, with results of bounded size."""
        budget = budget_now()
        check_operator(budget, operator, left, right)
        return budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call something for the template: each call counts, and string methods make no giant strings."""
        budget = budget_now()
        budget.turn()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        check_call(owner, name)
        if isinstance(owner, str):
            if name == "join" and args:
                args = (list(_counted(args[0], 0)), *args[1:])
            check_method(budget, name, owner, args)
        return budget.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox's `str.format`, which takes no giant widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            check_format(budget_now(), value.__self__, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return bounded


_COUNTED, _JOINED, _MADE = "samovar_counted", "samovar_joined", "samovar_made"
_COMPARED, _WRITTEN = "samovar_compared", "samovar_written"


class _Bounded(jinja2.visitor.NodeTransformer):
    """Rewrites `a ~ b`, lists, objects and output into filters that check and charge the size of the result."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Filter:  # noqa: N802 - named by Jinja
        self.generic_visit(node)
        items = jinja2.nodes.List(node.nodes, lineno=node.lineno, environment=self._environment)
        return _filtered(items, _JOINED, self._environment)

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Filter:  # noqa: N802 - named by Jinja
        return self._made(node)

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Filter:  # noqa: N802 - named by Jinja
        return self._made(node)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:  # noqa: N802 - named by Jinja
        if node.ctx != "load":
            return node
        return self._made(node)

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Expr:  # noqa: N802 - named by Jinja
        if isinstance(node.arg, jinja2.nodes.Slice):
            return self._made(node)
        self.generic_visit(node)
        return node

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Compare:  # noqa: N802 - named by Jinja
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _COMPARED, self._environment)
        return node

    def visit_Output(self, node: jinja2.nodes.Output) -> jinja2.nodes.Output:  # noqa: N802 - named by Jinja
        self.generic_visit(node)
        node.nodes = [
            part if isinstance(part, jinja2.nodes.TemplateData) else _filtered(part, _WRITTEN, self._environment)
            for part in node.nodes
        ]
        return node

    def _made(self, node: jinja2.nodes.Node) -> jinja2.nodes.Filter:
        self.generic_visit(node)
        return _filtered(node, _MADE, self._environment)


def _filtered(
    node: jinja2.nodes.Node, name: str, environment: jinja2.Environment, *args: jinja2.nodes.Expr
) -> jinja2.nodes.Filter:
    """The expression `node | name(args)`."""
    value = cast(jinja2.nodes.Expr, node)
    return jinja2.nodes.Filter(value, name, list(args), [], None, None, lineno=node.lineno, environment=environment)


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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_DATE_CHARS:
        raise TemplateLimitError(f"strftime_now takes {MAX_DATE_CHARS} characters at most")
    return datetime.now().strftime(pattern)


def _counted(items: Iterable[Any], cost: int) -> Iterator[Any]:
    """Count the turns of a loop over `items`, in each of which `cost` characters of the template are."""
    budget = budget_now()
    for item in items:
        budget.turn(cost)
        yield item


def _joined(items: list[Any]) -> str:
    budget = budget_now()
    check_size(sum(budget.weigh(item)[0] for item in items))
    return cast(str, budget.made("".join(map(str, items))))


def _made(value: Any) -> Any:
    """Check a list or an object that the template wrote down."""
    return budget_now().made(value)


def _compared(value: Any) -> Any:
    """Charge for a comparison, which looks at everything in a list or an object."""
    if isinstance(value, (list, tuple, dict)):
        budget = budget_now()
        budget.charge(budget.weigh(value)[0])
    return value


@jinja2.pass_context
def _written(_context: jinja2.runtime.Context, value: Any) -> Any:
    """Charge for output. Takes the context only because Jinja would otherwise compute constants while it compiles."""
    budget = budget_now()
    budget.charge(budget.weigh(value)[0])
    return value


def _bounded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is charged, and refused where it would make a giant value."""
    value_at = int(hasattr(original, "jinja_pass_arg"))

    @functools.wraps(original)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = budget_now()
        before, value, others = args[:value_at], args[value_at], args[value_at + 1 :]
        if name == "join":
            value = list(_counted(value, 0))
        check_filter(budget, name, value, others, kwargs)
        return budget.made(original(*before, value, *others, **kwargs))

    return bounded
